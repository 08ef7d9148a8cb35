"""What a plan takes of each device's memory: by what it is for, and against what is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from program_kit import block
from worlds import CPU, SIM0, tiny

from ggraph import cache_dir, ops
from ggraph.account import Account, accounts
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.sim import sim_spec
from ggraph.device import HOST, Need
from ggraph.dtype import I32, I64, Q4_0
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.show import plan_summary, plan_text
from ggraph.tensor import Tensor, input, weight
from models.run.fetch import DEFAULT

MODEL = cache_dir() / DEFAULT.file


def test_every_byte_of_a_device_is_of_one_kind() -> None:
    plan = make_plan(tiny(), [SIM0]).plan
    on_sim, on_host = accounts(plan)
    held = plan.memory.buffers.values()
    assert on_sim.weights + on_sim.states == sum(b.nbytes for b in held if b.external)
    assert on_sim.compute == sum(b.nbytes for b in held if b.device == "sim0" and not b.external)
    assert on_sim.scratch == 0 and on_sim.staging == 0
    assert on_host == Account(HOST, staging=sum(b.nbytes for b in held if b.device == HOST))
    assert accounts(make_plan(tiny(), [CPU]).plan)[0].staging == 0


def test_scratch_is_what_only_needs_lie_on() -> None:
    def needs(t: Tensor) -> tuple[Need, ...]:
        return (Need("room", 4096),) if t.op == "mul_mat" else ()

    without, with_room = (
        accounts(make_plan(tiny(), [spec]).plan)[0]
        for spec in (SIM0, sim_spec("sim0", needs=needs))
    )
    assert 4096 <= with_room.scratch <= 3 * 4096, "launches one after the other share theirs"
    assert with_room.total > without.total
    assert (with_room.weights, with_room.states) == (without.weights, without.states)


@pytest.mark.parametrize("exact", [False, True])
def test_weights_count_as_the_cpu_keeps_them(exact: bool) -> None:
    """Packed once for all kernels that share a form, raw for views, decoded for NumPy."""
    x, ids = input("x", (3, 64)), input("ids", (2,), I32)
    w = weight("w", (96, 64), Q4_0)
    spec = cpu_spec("cpu", exact)
    twice = make_plan(Graph.of({"a": ops.mul_mat(w, x), "b": ops.get_rows(w, ids)}), [spec])
    once = make_plan(Graph.of({"a": ops.mul_mat(w, x)}), [spec])
    packed = accounts(once.plan)[0].weights
    assert accounts(twice.plan)[0].weights == packed == (96 * 64 * 4 if exact else w.nbytes)
    plain = make_plan(Graph.of({"a": ops.add(weight("v", (3, 64)), x)}), [spec])
    assert accounts(plain.plan)[0].weights == 3 * 64 * 4
    far = ops.get_rows(w, input("far", (2,), I64))  # which has no kernel
    decoded = make_plan(Graph.of({"c": far}), [spec])
    assert accounts(decoded.plan)[0].weights == w.nbytes + 96 * 64 * 4
    (room,) = spec.needs(decoded.plan.graph["c"])
    assert decoded.plan.schedule.values["c#arrays"].nbytes == room.nbytes > 0
    assert "c#arrays" in plan_text(decoded)


def test_the_account_is_printed_and_in_the_summary() -> None:
    verified = make_plan(block(), [cpu_spec("cpu")])
    (row,) = accounts(verified.plan)
    assert f"account cpu: weights {row.weights}, states {row.states}, " in plan_text(verified)
    assert plan_summary(verified)["accounts"] == [{**vars(row), "total": row.total}]


@pytest.mark.skipif(not MODEL.is_file(), reason=f"{DEFAULT.file} is not in the cache")
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc")
@pytest.mark.parametrize("rows", [1, 64])
def test_the_account_is_within_three_hundredths_of_what_is_measured(rows: int) -> None:
    program = Path(__file__).parent / "memory_growth.py"
    command = [sys.executable, str(program), str(MODEL), str(rows)]
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env=path
    )
    found = json.loads(done.stdout.splitlines()[-1])
    total = sum(sum(v for k, v in a.items() if k != "device") for a in found["accounts"])
    sys.stdout.write(f"grown {found['grown']}, accounted for {total}\n")
    assert abs(found["grown"] - total) < 0.03 * total, f"{found}"
