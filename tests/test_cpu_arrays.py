"""Ops without a kernel: NumPy's arrays lie on bytes of the plan, and nowhere else."""

import subprocess
import sys
import tracemalloc
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from program_kit import cases, executor

from ggraph import Graph, Session, input, ops, weight
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.lowering.numpy_step import numpy_need
from ggraph.backends.cpu.runtime.arrays import Room, arrays_in, vast
from ggraph.device import Need
from ggraph.dtype import ALL, DType
from ggraph.errors import BackendError, GraphError, InputError
from ggraph.extend import register_op
from ggraph.formats import dequantize
from ggraph.ops.evaluate import evaluate, to_storage
from ggraph.pipeline import make_plan
from ggraph.plan import VerifiedPlan
from ggraph.tensor import OPS, Arg, Array, Example, Kind

RNG = np.random.default_rng(3)
PRODUCT = (Example((Arg((3, 4)), Arg((4, 4)))),)
OWN = 32_768  # bytes of objects, and of what casts take, in a run


def test_a_room_gives_the_lowest_place_and_no_more_than_it_has() -> None:
    room = vast()
    with arrays_in(room):
        a, b, c = (np.ones(100, np.float32) for _ in range(3))
        places = [x.ctypes.data - room.at for x in (a, b, c)]
        del b
        d = np.zeros(90, np.float32)
        e = np.zeros((100, 100), np.float32)
        e.resize((200, 100), refcheck=False)
        assert places == [64, 576, 1088] and d.ctypes.data - room.at == places[1]
        assert not d.any() and not e.any() and (a == 1).all() and (c == 1).all()
        del a, c, d, e
    assert room.close()
    few = Room(room.at, 4096, room.memory)
    with arrays_in(few):
        held = np.ones(900, np.float32)
        with pytest.raises(MemoryError):
            np.ones(900, np.float32)
        del held
        again = np.full(900, 2.0, np.float32)
    outside = np.ones(10)
    assert not few.close(), "an array is still there"
    few.open()
    assert again[0] == 2 and outside.sum() == 10
    del again  # which must not give back what is new there
    with arrays_in(few):
        assert np.ones(900, np.float32).sum() == 900
    assert few.close()


@pytest.mark.parametrize("dtype", [d for d in ALL if d.is_block], ids=str)
def test_weights_of_every_block_type_are_read_without_a_kernel(dtype: DType) -> None:
    """Also of those that nothing here writes, whose values planning cannot make up."""
    rows = RNG.integers(0, 256, (7, dtype.row_bytes(512)), np.uint8) & 0x37  # scales are finite
    w = weight("w", (7, 512), dtype)
    graph = Graph.of({"all": ops.cast(w, "f32"), "some": ops.cast(w[1::2, 256:], "f16")})
    with Session({"cpu": open_cpu("cpu", threads=1)}) as session:
        session.prepare("k", graph, {"w": rows})
        found = session.run("k", {})
    want = dequantize(rows, dtype)
    assert np.isfinite(want).all()
    assert np.array_equal(found["all"], want)
    with np.errstate(over="ignore"):
        assert np.array_equal(found["some"], want[1::2, 256:].astype(np.float16))


ENDS = """
import gc
import numpy as np
from ggraph.backends.cpu.codegen import jit
from ggraph.backends.cpu.runtime import arrays

room = arrays.vast()
with arrays.arrays_in(room):
    held = [np.ones(1000), np.arange(10.0)]
assert not room.close()
del room
for module in arrays, jit:  # as Python does when it ends
    vars(module).clear()
gc.collect()
assert held[0].sum() == 1000
del held[0]
"""


def test_arrays_are_freed_when_python_has_cleared_all_modules() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True)


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_takes_nothing_but_what_its_plan_has(exact: bool) -> None:
    """NumPy tells tracemalloc of its arrays wherever they lie: those on bytes of the plan are as
    many as these at most."""
    backend, count = open_cpu("cpu", threads=1, exact=exact), 0
    for title, graph, given in cases([n for n in OPS if n != "copy"]):
        if all(backend.spec.compiled(t) for t in graph.nodes):
            continue
        verified = make_plan(graph, [backend.spec])
        held = executor(verified, backend, given)
        feeds = {t.name: given[t.name] for t in graph.leaves(Kind.INPUT)}
        held.run(feeds)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        result = held.run(feeds)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        planned = sum(b.nbytes for b in verified.plan.memory.buffers.values())
        assert peak < planned + sum(r.nbytes for r in result.values()) + OWN, title
        held.close()
        count += 1
    assert count > 20
    backend.close()


@pytest.mark.parametrize("order", [("whole", "part", "turned"), ("turned", "part", "whole")])
@pytest.mark.parametrize("dtype", ["tq1_0", "f16"])
def test_views_of_weights_are_planned_for_as_weights(dtype: str, order: tuple[str, ...]) -> None:
    """Launches alike share one answer of what NumPy needs, whichever was asked about first."""
    op = register_op("product_in_numpy", lambda x, w: np.sort(x @ w.T, axis=-1), examples=PRODUCT)
    n = 256 if order[0] == "whole" else 512  # answers are remembered
    w, large = weight("w", (n, n), dtype), weight("large", (n + 3, n), dtype)
    given = {t.name: RNG.standard_normal(t.shape).astype(np.float32) for t in (w, large)}
    stored = {t.name: to_storage(given[t.name], t) for t in (w, large)}
    seen = {"whole": w, "part": large[3:], "turned": w.T if dtype == "f16" else w}
    x = input("x", (2, n))
    graph = Graph.of([op(x, seen[name], name=name) for name in order])
    feeds = {"x": RNG.standard_normal(x.shape).astype(np.float32)}
    with closing(open_cpu("cpu", threads=1)) as backend:
        held = executor(make_plan(graph, [backend.spec]), backend, stored)
        want = evaluate(graph, {**stored, **feeds})
        for name, found in held.run(feeds).items():
            assert np.array_equal(found, want[name])
        held.close()


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
EXAMPLES = (Example((Arg((3, 4)),)),)


def plan_of(op: Any, rows: int = 3) -> VerifiedPlan:
    """A plan of one op on the CPU."""
    with closing(open_cpu("cpu", threads=1)) as backend:
        return make_plan(Graph.of([op(input("x", (rows, 4)), name="y")]), [backend.spec])


def test_after_a_meaning_that_raises_the_next_run_has_all_its_bytes() -> None:
    def meaning(x: Array) -> Array:
        half = np.sort(x, axis=-1) / 2
        if x.max() > 1000:
            raise InputError(f"{half.max()} is too much")
        return half

    op = register_op("halved_if_small", meaning, examples=EXAMPLES)
    backend, graph = open_cpu("cpu", threads=1), Graph.of([op(input("x", (3, 4)), name="y")])
    held = executor(make_plan(graph, [backend.spec]), backend, {})
    for _ in range(20):
        assert np.array_equal(held.run({"x": X})["y"], np.sort(X, axis=-1) / 2)
        with pytest.raises(InputError, match="is too much"):
            held.run({"x": X * 1e6})
    held.close()


def test_a_plan_with_too_few_bytes_fails_and_says_so() -> None:
    """By a backend that says something else of its needs."""
    op = register_op("in_order", lambda x: np.sort(x, axis=-1), examples=EXAMPLES)
    backend = open_cpu("cpu", threads=1)
    object.__setattr__(backend.spec, "needs", lambda t: (Need("arrays", 4096),))
    verified = make_plan(Graph.of([op(input("x", (50, 40)), name="y")]), [backend.spec])
    held = executor(verified, backend, {})
    for _ in range(2):
        with pytest.raises(BackendError, match="NumPy takes more than the 4096 bytes"):
            held.run({"x": np.ones((50, 40), np.float32)})
    held.close()
    backend.close()


def test_a_meaning_that_keeps_arrays_is_refused() -> None:
    kept: list[Array] = []

    def hoards(x: Array) -> Array:
        kept.append(np.sort(x, axis=-1))
        return kept[-1] * 2

    op = register_op("hoards", hoards, examples=EXAMPLES)
    with pytest.raises(GraphError, match="keeps arrays of its own"):
        plan_of(op)
    assert all(np.isfinite(k).all() for k in kept), "what it kept can be read still"


def _three_rows_only(x: Array) -> Array:
    """A meaning that takes its examples and refuses other shapes."""
    held = np.sort(x)
    if len(held) != 3:
        raise InputError(f"{held.shape} is refused")
    return held


def test_a_meaning_that_refuses_a_shape_cannot_be_planned_for_it() -> None:
    op = register_op("three", _three_rows_only, examples=EXAMPLES, shape=OPS["relu"].infer)
    plan_of(op)
    with pytest.raises(GraphError, match=r"what NumPy needs is not known: \(5, 4\) is refused"):
        plan_of(op, rows=5)


def test_refused_rehearsals_give_their_addresses_back() -> None:
    """Each takes so many that a process has none left after some hundred."""

    op = register_op("three", _three_rows_only, examples=EXAMPLES, shape=OPS["relu"].infer)
    most = vast().nbytes
    for i in range(700):
        t = op(input(f"x{i}", (5, 4)), name="y")
        with pytest.raises(GraphError, match="is refused"):
            numpy_need(t)
    assert vast().nbytes == most
