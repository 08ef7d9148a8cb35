"""Declared is done: a slice of `scripts/check_declared.py`, and that it finds what is not declared.

The script runs every op in every form on memory whose every other byte changes; here each N-th of
its cases runs, and kernels that go one element further than they say.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_host import COMPILER

from ggraph import ops
from ggraph.backends.cpu import backend as cpu_room
from ggraph.backends.protocol import Launch
from ggraph.errors import BackendError, GraphError
from ggraph.graph import Graph
from ggraph.tensor import input

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_declared.py"
sys.path.append(str(SCRIPT.parent))

import check_declared as kit  # noqa: E402
from declared_ground import Ground  # noqa: E402

SLICES = {"cpu": 151, "cuda": 61, "sim": 41}  # each N-th case, which takes seconds


@pytest.mark.parametrize("kind", SLICES)
def test_every_op_touches_what_it_declares(kind: str) -> None:
    if kind == "cuda" and COMPILER is None:
        pytest.skip("g++ is not installed")
    command = [sys.executable, str(SCRIPT), "--backend", kind, "--every", str(SLICES[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-800:]} {done.stderr[-800:]}"
    assert int(done.stdout.split("cases ")[-1].split(",")[0]) > 50


def further(launches: Sequence[Launch], written: bool) -> list[Launch]:
    """The launches one element further on, in what they read first or in what they write."""
    found = []
    for x in launches:
        if written:
            x = replace(x, result=replace(x.result, offset=x.result.offset + 4))
        else:
            first = replace(x.sources[0], offset=x.sources[0].offset + 4)
            x = replace(x, sources=(first, *x.sources[1:]))
        found.append(x)
    return found


CASES = {
    "add": ops.add(input("x0", (3, 7)), input("x1", (3, 7)), name="y"),
    "soft_max": ops.soft_max(input("x0", (3, 7)), name="y"),
    "rms_norm": ops.rms_norm(input("x0", (3, 8)), eps=1e-5, name="y"),
    "sum_rows": ops.sum_rows(input("x0", (3, 7)), name="y"),
}


@pytest.mark.parametrize("written", [False, True], ids=["reads", "writes"])
@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("name", CASES)
def test_one_element_further_is_found(
    name: str, kind: str, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "cuda" and COMPILER is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setattr(cpu_room, "judge", lambda *_: 0)  # which would refuse it before
    graph = Graph.of([CASES[name]])
    rng = np.random.default_rng(2)
    stored = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in graph if t.is_leaf}
    for title, world in kit.worlds(kind):
        if title.endswith("end"):  # where the fault would be the machine's
            world.device.close()
            continue
        assert kit.check(world, (name, graph, stored), 0) >= 2, "the kernels themselves are right"
        lower = world.device.lower
        world.device.lower = lambda xs, lower=lower: lower(further(xs, written))
        with pytest.raises((kit.Fault, GraphError)):
            kit.check(world, (name, graph, stored), 0)
        world.device.close()


def test_an_allocation_while_a_plan_runs_is_refused() -> None:
    ground = Ground(at_end=False)
    assert ground.take(8, 64).nbytes == 8
    ground.running = True
    with pytest.raises(BackendError, match="8 bytes are asked for while a plan runs"):
        ground.take(8, 64)


def test_packed_weights_lie_on_guarded_pages() -> None:
    """The backend of the check must pack where the check looks."""
    case = next(c for c in kit.cases(1) if c[0].startswith("mul_mat ") and c[0].endswith("weight"))
    for title, world in kit.worlds("cpu"):
        assert kit.check(world, case, 0)
        held = {id(a) for a in world.ground.held}
        packed = [p.data for forms in world.device._packer.made.values() for p in forms.values()]
        assert id(packed[-1]) in held, title
        world.device.close()
