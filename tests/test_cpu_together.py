"""Kernels that several processes compile: the same objects, whatever becomes of a helper."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ggraph import dtypes
from ggraph.backends.cpu.codegen import together
from ggraph.backends.cpu.codegen.compiler import compile_object
from ggraph.backends.cpu.codegen.isa import host
from ggraph.backends.cpu.codegen.jit import SOURCE, WATCHERS, Jit
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.backends.cpu.kernels.nest import register
from ggraph.backends.cpu.kernels.nest_form import Nest, Operand
from ggraph.backends.cpu.lowering import lower  # noqa: F401  (all kernels)
from ggraph.backends.cpu.lowering.rehearsal import products
from ggraph.formats.checkpoint import RawTensor

ROOT = Path(__file__).parent.parent
SMALL = ["quantise", "copy", "rms_norm", "gather_f32", "gather_f16", "gather_q8_0", "set_rows_f32",
         "set_rows_f16", "rope_f32", "rope_f16", "shown_slots", "listed_slots"]  # fmt: skip


def own_kernel() -> str:
    """One that a helper cannot know."""
    flat = tuple(Operand("f32", "v") for _ in "yab")
    steps = (("load", (1,)), ("load", (2,)), ("add", (0, 1)))
    return register(Nest(2, 0, "kept", flat, steps, "f32", False)).name


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together.env, "usable_cores", lambda: 2)


def test_helpers_give_what_one_process_does(two_cores: None) -> None:
    names, told = [*SMALL, own_kernel()], list[str]()
    found = dict(together.Crew(host(), SOURCE, told.append).compiled(names))
    assert sorted(found) == sorted(names)
    assert set(told) == set(names)
    for name, code in found.items():
        assert code == compile_object(KERNELS[name], host()), name


@pytest.mark.parametrize(
    "program",
    ["raise SystemExit(3)", "print('!', end='', flush=True); input(); input()",
     "import sys; sys.stdout.write('!' + 'x' * 9); sys.stdout.flush(); sys.stdin.read()"],
)  # fmt: skip
def test_a_helper_that_ends_costs_nothing_but_its_help(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(together, "HELP", program.replace("{", "{{"))
    found = dict(together.Crew(host(), SOURCE, lambda name: None).compiled(SMALL))
    assert sorted(found) == sorted(SMALL)
    assert all(found.values())


def test_a_helper_of_another_source_does_not_help(two_cores: None) -> None:
    """Files that change while a process runs: what it keeps is of the source that it read."""
    crew = together.Crew(host(), "another", lambda name: None)
    crew.begin(SMALL)
    (helper,) = crew._helpers
    helper.join(60)
    assert not helper.is_alive()
    assert crew.found == {}
    assert sorted(dict(crew.compiled(SMALL))) == sorted(SMALL)


def test_what_is_prepared_is_neither_compiled_again_nor_left_out(
    two_cores: None, tmp_path: Path
) -> None:
    told: list[str] = []
    WATCHERS.append(told.append)
    try:
        jit = Jit(folder=tmp_path)
        jit.prepare([*SMALL, *SMALL])
        assert sorted(jit.compiled) == sorted(SMALL)
        again = Jit(folder=tmp_path)
        again.prepare(SMALL)
        assert again.compiled == []
        assert all(again.address(name) for name in SMALL)
    finally:
        WATCHERS.remove(told.append)
    assert sorted(told) == sorted(SMALL)


def test_what_is_expected_is_compiled_beside_and_found(two_cores: None, tmp_path: Path) -> None:
    """By helpers alone, as long as this process has other work; what nobody asks for then is not
    waited for, and what nobody expected is compiled as ever."""
    jit, expected = Jit(folder=tmp_path), ["matmul_each_bf16", "rope_f16"]
    jit.expect(expected)
    (helper,) = jit._crews[0]._helpers
    helper.join(60)
    assert sorted(jit._crews[0].found) == sorted(expected)
    assert jit.compiled == expected, "the longest is begun first"
    jit.prepare([expected[0], *SMALL[:3]])
    assert sorted(jit.compiled) == sorted({*expected, *SMALL[:3]})
    again = Jit(folder=tmp_path)
    again.expect([expected[0], *SMALL[:3]])
    assert not again._crews, "nothing is missing"
    assert again.compiled == []


def test_several_ask_at_once_and_each_gets_what_it_asked_for(
    two_cores: None, tmp_path: Path
) -> None:
    jit = Jit(folder=tmp_path)
    jit.expect(["matmul_each_bf16"])
    halves = SMALL[::2], SMALL[1::2]
    with ThreadPoolExecutor(2) as both:
        list(both.map(jit.prepare, halves))
    assert sorted({*jit.compiled} - {"matmul_each_bf16"}) == sorted(SMALL)
    assert all(map(jit.address, SMALL))


def test_a_file_says_which_products_will_be_asked_for() -> None:
    """Those of its matrices, by the lowering itself; vectors, and what NumPy does, ask for none."""
    stored = [
        RawTensor("w", dtypes.Q4_K, (32, 256), np.zeros((32, 144), np.uint8)),
        RawTensor("v", dtypes.Q4_K, (64, 256), np.zeros((64, 144), np.uint8)),
        RawTensor("norm", dtypes.F32, (256,), np.zeros(256, np.float32)),
        RawTensor("numpy's", dtypes.F64, (32, 256), np.zeros((32, 256))),
        RawTensor("empty", dtypes.F16, (32, 0), np.zeros((32, 0), np.float16)),
    ]
    assert sorted(products(stored, exact=False)) == sorted(
        ["matmul_n4k", "pack_q4_k", "pack_piece", "quantise"]
    )
    assert "matmul_f32" in products(stored, exact=True)


def test_a_program_finds_its_kernels_compiled(tmp_path: Path) -> None:
    """None is compiled while the program is made: all were at once, before."""
    program = """
from ggraph.backends.cpu.codegen.jit import Jit
seen, compile = [], Jit._compile
Jit._compile = lambda self, name: seen.append(name) or compile(self, name)
import numpy as np
from ggraph import Graph, Session, dtypes, input, open_backend, ops, weight
x, w = input("x", (4, 64)), weight("w", (32, 64), dtypes.F32)
graph = Graph.of({"y": ops.soft_max(ops.mul_mat(w, ops.silu(x)))})
backend = open_backend("cpu", threads=1)
session = Session({"cpu": backend})
session.prepare("step", graph, {"w": np.ones((32, 64), np.float32)})
session.run("step", {"x": np.ones((4, 64), np.float32)})
print(*seen, "|", *backend.pool.jit.compiled)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "GGRAPH_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone, every = (half.split() for half in done.stdout.split("|"))
    assert alone == ["pool_run"], "the pool's own is compiled when it opens"
    assert len(every) > 3
    assert len(set(every)) == len(every)
