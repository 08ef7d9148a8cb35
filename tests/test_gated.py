"""Two products and the gated unit of both as one launch: the bits of three, on every backend."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from cuda_host import COMPILER, FIRST_ALONE, HostDriver
from cuda_kit import DEVICE, need_driver, opened, place, room, run
from program_kit import executor, mutated, run_parts
from stored_weights import raw_weight

from ggraph import dtype as dt
from ggraph import ops
from ggraph.backends.cpu import CpuBackend
from ggraph.backends.cpu import backend as cpu_room
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.codegen.simd import BARRIER, HEADER_WORDS, KERNELS
from ggraph.backends.cpu.kernels.elementwise import UNITS as ON_CPU
from ggraph.backends.cpu.kernels.tiles import LAYOUTS
from ggraph.backends.cpu.lowering.judge import judge
from ggraph.backends.cpu.runtime.program import Flat
from ggraph.backends.cuda import kernels, matmul
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.protocol import Launch, Ref
from ggraph.device import DeviceSpec
from ggraph.dtype import DType
from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.ops.fused import FEW_ROWS
from ggraph.ops.glu import UNITS
from ggraph.pipeline import make_plan
from ggraph.plan import Actor, Command, Do
from ggraph.rewrite import rewrite
from ggraph.tensor import Array, Kind, Tensor, input, weight

GATED = {"mul_mat_gated", "mul_mat_gated_quantise"}


def unit(
    rows: int, n: int, k: int, gate: DType, down: DType | None = None, op: str = "swiglu"
) -> Graph:
    """A gated unit of two products, and the product that reads it where a type is given for it."""
    x = input("x", (rows, k))
    first, second = (ops.mul_mat(weight(name, (n, k), gate), x) for name in ("gate", "up"))
    made = getattr(ops, op)(first, second)
    y = made if down is None else ops.mul_mat(weight("down", (32, n), down), made)
    return Graph.of({"y": y})


def experts_unit(rows: int, gate: DType, up: DType) -> Graph:
    """The same of the experts chosen for each row, and of those that read it."""
    x, ids = input("x", (rows, 1, 256)), ops.top_k(input("scores", (rows, 6)), 2)
    first, second = (
        ops.mul_mat_id(weight(name, (6, 96, 256), kind), x, ids)
        for name, kind in (("gate", gate), ("up", up))
    )
    down = weight("down", (6, 32, 96), dt.Q8_0 if gate.is_block else gate)
    return Graph.of({"y": ops.mul_mat_id(down, ops.swiglu(first, second), ids)})


def feeds(graph: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    given = graph.leaves(Kind.INPUT)
    values = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in given}
    weights = [t for t in graph.tensors if t.is_leaf and t.name not in values]
    raws = {
        t.name: raw_weight(t.dtype, prod(t.shape[:-1]), t.shape[-1], seed=i)
        for i, t in enumerate(weights)
    }
    return {**values, **{name: raw.reshape(-1) for name, raw in raws.items()}}


def descending(threads: int) -> range:
    return range(threads - 1, -1, -1)


def value(backend: CpuBackend, graph: Graph, fused: bool) -> tuple[Array, Counter[str]]:
    """The result, and which ops made it."""
    spec = backend.spec if fused else replace(backend.spec, fused=backend.spec.fused - GATED)
    given = feeds(graph)
    verified = make_plan(graph, [spec])
    held = executor(verified, backend, given)
    found = held.run({t.name: given[t.name] for t in graph.leaves(Kind.INPUT)})["y"].copy()
    held.close()
    return found, Counter(t.op for t in verified.plan.graph.nodes)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Flat]:
    """What the judge is given from now on."""
    found: list[Flat] = []

    def watch(code: Array, names: tuple[str, ...], grounds: Iterator[object]) -> int:
        grounds = list(grounds)
        found.append(Flat(code, tuple(names), (grounds,)))
        return judge(code, names, grounds)

    monkeypatch.setattr(cpu_room, "judge", watch)
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_every_weight_type_gives_the_bits_of_three_launches(dtype: DType, exact: bool) -> None:
    """On the CPU; 32 columns for many threads, and a count that is no whole block."""
    k = 2 * max(dtype.block, 32)
    for threads, rows, n in ((1, 1, 96), (3, 5, 96), (2, 11, 72), (2, FEW_ROWS, 32)):
        backend = open_cpu("cpu", threads=threads, exact=exact)
        for down in (None, dt.Q8_0) if n % 32 == 0 else (None,):
            for op in ON_CPU:
                graph = unit(rows, n, k, dtype, down, op)
                one, made = value(backend, graph, True)
                apart, _ = value(backend, graph, False)
                assert sum(made[g] for g in GATED) == 1 and not made[op]
                assert made["mul_mat_gated_quantise"] == (down is not None and not exact)
                assert np.array_equal(one, apart), f"{rows} rows, {n} columns, {threads} threads"
        backend.close()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kinds", [(dt.Q4_K, dt.Q4_K), (dt.Q4_K, dt.Q6_K), (dt.F16, dt.F16)])
def test_experts_units_give_the_bits_of_their_launches(
    kinds: tuple[DType, DType], exact: bool
) -> None:
    """Of few tokens and of many, and the experts that read them, in 8 bits or not."""
    for threads, rows in ((1, 1), (2, 7), (3, 90)):
        backend = open_cpu("cpu", threads=threads, exact=exact)
        graph = experts_unit(rows, *kinds)
        one, made = value(backend, graph, True)
        apart, parts = value(backend, graph, False)
        many = exact and rows * 2 > FEW_ROWS
        assert sum(made[op] for op in GATED) == (not many) and made["mul_mat_id"] == 1 + 2 * many
        in_8_bits = kinds[0].is_block and not exact
        assert made["mul_mat_gated_quantise"] == parts["swiglu_quantise"] == in_8_bits
        assert np.array_equal(one, apart), f"{rows} rows, {threads} threads"
        backend.close()


def test_any_order_of_the_threads_between_two_meetings(programs: list[Flat]) -> None:
    """Nobody waits between the products and the unit of up to eight rows; and what would make
    threads share columns out otherwise is refused, and gives other numbers."""
    backend = open_cpu("cpu", threads=1)
    usual = backend.pool.run
    for rows, meetings in ((1, 1), (8, 1), (9, 2)):
        graph = unit(rows, 224, 64, dt.Q4_0)
        wanted, _ = value(backend, graph, True)
        flat = programs[-1]
        assert flat.names == ("quantise", "matmul_n4z", "matmul_n4z", "swiglu")
        assert sum(bool(word & BARRIER) for word in flat.code[:, 1]) == meetings
        for threads in (2, 3, 7):
            for turn in (range, descending):
                backend.pool.run = lambda f, t=threads, o=turn: run_parts(f, t, o)  # type: ignore[method-assign]
                assert np.array_equal(value(backend, graph, True)[0], wanted)
        backend.pool.run = usual  # type: ignore[method-assign]
    place = HEADER_WORDS + KERNELS["matmul_n4z"].args.index("unit")
    graph = unit(3, 224, 64, dt.Q4_0)
    wanted, _ = value(backend, graph, True)
    flat = programs[-1]
    for i in (1, 2):
        worse = mutated(flat, lambda code, i=i: code.__setitem__((i, place), 1))  # type: ignore[misc]
        with pytest.raises(PlanError, match=r"nothing orders .* and .*swiglu"):
            judge(worse.code, worse.names, flat.kept[0])
        backend.pool.run = lambda f, w=worse.code: (
            usual(f)
            if f.names != flat.names
            else run_parts(  # type: ignore[misc]
                mutated(f, lambda code: code.__setitem__((slice(None), place), w[:, place])),
                3,
                descending,
            )
        )
        assert not np.array_equal(value(backend, graph, True)[0], wanted)
    backend.pool.run = usual  # type: ignore[method-assign]
    backend.close()


def test_what_is_gated_and_what_is_not() -> None:
    spec = DeviceSpec("cpu", "cpu", fused=frozenset(GATED))
    x, z = input("x", (3, 64)), input("z", (3, 64))
    w, v = weight("w", (96, 64)), weight("v", (96, 64))
    gate, up = ops.mul_mat(w, x, name="gate"), ops.mul_mat(v, x, name="up")
    for op in UNITS:
        made = getattr(ops, op)(gate, up)
        (one,) = rewrite(Graph.of({"y": made}), [spec]).nodes
        assert (one.op, one.attrs["unit"]) == ("mul_mat_gated", op)
        assert [s.name for s in one.sources] == ["w", "x", "v"]
    gates, ups = weight("gates", (4, 96, 64)), weight("ups", (4, 96, 64))
    ids, others = (input(name, (3, 2), dt.I32) for name in ("ids", "others"))
    first = ops.mul_mat_id(gates, ops.reshape(x, 3, 1, 64), ids)
    experts = Graph.of({"y": ops.swiglu(first, ops.mul_mat_id(ups, first.sources[1], ids))})
    (one,) = (t for t in rewrite(experts, [spec]).nodes if not t.is_view)
    assert (one.op, one.attrs["has_ids"], one.shape) == ("mul_mat_gated", True, (3, 2, 96))
    assert [s.name for s in one.sources if s.is_leaf] == ["gates", "ups", "ids"]
    long = input("long", (FEW_ROWS + 1, 64))
    left: dict[str, dict[str, Tensor]] = {
        "read by another": {"y": ops.swiglu(gate, up) + gate},
        "an output": {"y": ops.swiglu(gate, up), "gate": gate},
        "of other rows": {"y": ops.swiglu(gate, ops.mul_mat(v, z))},
        "of one product": {"y": ops.swiglu(gate, gate)},
        "of other experts": {
            "y": ops.swiglu(first, ops.mul_mat_id(ups, first.sources[1], others))
        },
    }  # fmt: skip
    for why, outputs in left.items():
        assert "swiglu" in {t.op for t in rewrite(Graph.of(outputs), [spec]).nodes}, why
    many = Graph.of({"y": ops.swiglu(ops.mul_mat(w, long), ops.mul_mat(v, long))})
    for fused, made in (({"mul_mat_gated"}, {"mul_mat", "swiglu"}), (GATED, {"mul_mat_gated"})):
        wide = replace(spec, fused=frozenset(fused))
        assert {t.op for t in rewrite(many, [wide]).nodes} == made, "where it may become 8 bits"
    known = replace(spec, compiled=lambda t: t.op != "mul_mat_gated")
    kept = rewrite(Graph.of({"y": ops.swiglu(gate, up)}), [known])
    assert {t.op for t in kept.nodes} == {"mul_mat", "swiglu"}, "one device has no kernel"
    other = replace(spec, name="sim0", kind="sim", fused=frozenset())
    kept = rewrite(Graph.of({"y": ops.swiglu(gate, up)}), [spec, other])
    assert {t.op for t in kept.nodes} == {"mul_mat", "swiglu"}


TYPES = [dt.dtype(name) for name in kernels.TEMPLATES["tiles"][1]]


@need_driver
@pytest.mark.parametrize("n", [52, 96])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_gives_the_bits_of_three_launches(dtype: DType, n: int) -> None:
    """1 to 64 rows, by eight and by 32; a count that is no whole tile, and one of whole groups;
    more tiles than blocks. The kit compares the parts and codes of the result, too, and both orders
    of threads."""
    k = 2 * max(dtype.block, 32)
    rng = np.random.default_rng(3)
    raws = {name: raw_weight(dtype, n, k, seed) for seed, name in enumerate(("w", "u"))}
    x = rng.normal(size=(FEW_ROWS, k)).astype(np.float32)
    for rows in (1, 3, 8, 9, 33, FEW_ROWS):
        stored = {name: raw.reshape(-1) for name, raw in raws.items()}
        stored["x"] = x[:rows].reshape(-1).view(np.uint8)
        a = input("x", (rows, k))
        w, u = (weight(name, (n, k), dtype) for name in raws)
        gate, up = (run(ops.mul_mat(m, a, name="y"), stored) for m in (w, u))
        for op in UNITS if rows == 3 else ("swiglu",):
            one = run(ops.mul_mat_gated(w, a, u, unit=op, name="y"), stored)
            halves = {"g": gate.reshape(-1).view(np.uint8), "v": up.reshape(-1).view(np.uint8)}
            pair = (input("g", gate.shape), input("v", up.shape))
            apart = run(getattr(ops, op)(*pair, name="y"), halves)
            assert np.array_equal(one, apart), f"{op}, {rows} rows"


@pytest.mark.skipif(bool(DEVICE) or COMPILER is None, reason="of the stand-in, by g++")
@pytest.mark.parametrize(("rows", "own"), [(8, (8, 32)), (64, (32, 32))])
def test_a_block_writes_its_own_alone(
    rows: int, own: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the stand-in run one after another, so that whoever writes what is another's is
    overwritten, or writes the same again. Here the first block of a grid runs alone."""
    n, k = 64, 64
    launch = HostDriver.launch

    def first(self: HostDriver, function: Any, *rest: Any) -> None:
        self.order = FIRST_ALONE if "gated" in function[0] else None
        launch(self, function, *rest)
        self.synchronise()

    monkeypatch.setattr(HostDriver, "launch", first)
    monkeypatch.setattr(HostDriver, "processors", 2)  # a block for each tile
    x, w = input("x", (rows, k)), weight("w", (n, k), dt.Q8_0)
    y = ops.mul_mat_gated(w, x, w, name="y")
    backend = opened(16)
    ones = np.ones((rows, k), np.float32).view(np.uint8).reshape(-1)
    held = [place(backend, w, raw_weight(dt.Q8_0, n, k)), place(backend, x, ones)]
    target = place(backend, y, np.full(y.nbytes, 0xAB, np.uint8))
    beside = {need.key: room(backend, need) for need in backend.spec.needs(y)}
    parts, coded = (need for need in backend.spec.needs(y) if need.is_offered)
    for made in (parts, coded):
        backend.write(beside[made.key].memory, 0, np.full(made.nbytes, 0xAB, np.uint8))
    sources = (Ref(w, held[0], 0), Ref(x, held[1], 0), Ref(w, held[0], 0))
    command = Command(Do.LAUNCH, Actor("cuda0", 0), "y", "y")
    backend.submit(0, backend.lower([Launch(command, Ref(y, target, 0), sources, beside)]))
    backend.synchronise()
    wanted = np.zeros((rows, n), bool)
    wanted[: own[0], : own[1]] = True
    written = [
        backend.read(memory, 0, nbytes).reshape(-1, 4) != 0xAB
        for memory, nbytes in (
            (target, y.nbytes),
            (beside[parts.key].memory, parts.nbytes),
            (beside[coded.key].memory, coded.nbytes),
        )
    ]
    for words in written[:2]:  # a word for each value, row by row
        assert np.array_equal(words.any(axis=1).reshape(rows, n), wanted)
    together = (
        written[2].any(axis=1).reshape(rows // 8, n // 32, -1)
    )  # codes of eight rows and 32 values
    assert np.array_equal(together.all(axis=2), wanted[::8, ::32])
    assert np.array_equal(together.any(axis=2), wanted[::8, ::32])
    backend.close()


def test_a_gpu_refuses_what_its_kernels_do_not_take() -> None:
    x = input("x", (3, 64))
    w, v = weight("w", (8, 64), dt.Q8_0), weight("v", (8, 64), dt.Q4_0)
    assert accepts(ops.mul_mat_gated(w, x, w)) and not accepts(ops.mul_mat_gated(w, x, v))
    assert not accepts(ops.mul_mat_gated(weight("f", (8, 64)), x, weight("g", (8, 64))))
    long = input("long", (matmul.FEW_ROWS + 1, 64))
    assert not accepts(ops.mul_mat_gated(w, long, w))
