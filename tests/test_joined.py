"""Products of the same rows as one launch: the bits of each alone, on every backend."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from cuda_host import COMPILER
from cuda_kit import DEVICE, need_driver, opened, run
from program_kit import run_parts
from stored_weights import raw_weight

from ggraph import dtype as dt
from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.codegen.simd import BARRIER
from ggraph.backends.cpu.kernels.tiles import LAYOUTS
from ggraph.backends.cpu.runtime.program import Flat
from ggraph.backends.cuda import kernels
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.protocol import Backend
from ggraph.device import DeviceSpec
from ggraph.dtype import DType
from ggraph.errors import ShapeError
from ggraph.graph import Graph
from ggraph.ops.fused import FEW_ROWS, MOST_MATRICES
from ggraph.pipeline import Options
from ggraph.place import place
from ggraph.rewrite import rewrite
from ggraph.session import Session
from ggraph.tensor import Array, Kind, Tensor, input, state, weight

KNOWN = DeviceSpec("cpu", "cpu", fused=frozenset({"mul_mats"}))
COUNTS = (40, 17, 32, 5)  # outputs: of several tiles and blocks, and no whole ones
HEADS = {"q": 4, "k": 2, "v": 2}
FORMS = ("plain", "biased", "normed")
SAME = dict.fromkeys(HEADS, dt.Q8_0)


def layer(rows: int, types: dict[str, DType], form: str = "plain") -> Graph:
    """Queries, keys and values as models have them: with biases (Qwen2) or norms of heads (Qwen3),
    and a rotation of the queries that lies before the keys' product."""
    x, place = input("x", (rows, 256)), input("place", (rows,), dt.I32)
    made: dict[str, Tensor] = {}
    for role, heads in HEADS.items():
        y = ops.mul_mat(weight(f"w{role}", (heads * 16, 256), types[role]), x, name=role)
        if form == "biased":
            y = y + weight(f"b{role}", (heads * 16,))
        y = y.reshape(rows, heads, 16)
        if form == "normed" and role != "v":
            y = ops.mul(ops.rms_norm(y, eps=1e-6), weight(f"n{role}", (16,)))
        made[role] = y if role == "v" else ops.rope(y, place, n_rot=16)
    cache = ops.set_rows(state("c", (70, 2, 16)), made["k"], input("at", (rows,), dt.I64))
    return Graph.of({"asked": made["q"] * 2.0, "held": made["v"] * 2.0, "kept": ops.cont(cache)})


def fed(t: Tensor, seed: int) -> Array:
    """Storage of a weight or an input."""
    if not t.dtype.is_float:
        return np.arange(t.size, dtype=t.dtype.np)
    if t.kind is Kind.WEIGHT and len(t.shape) > 1:
        raw = raw_weight(t.dtype, *t.shape, seed=seed)
        return raw if t.dtype.is_block else raw.view(t.dtype.np)
    return np.random.default_rng(seed).normal(size=t.shape).astype(np.float32)


def values(
    opens: Callable[[], dict[str, Backend]], graph: Graph, joined: bool = True
) -> tuple[dict[str, Array], Counter[str]]:
    """The outputs, and how often each op ran."""
    backends = opens()
    for b in backends.values():
        kept = b.spec.fused if joined else b.spec.fused - {"mul_mats"}
        b.spec = replace(b.spec, fused=kept)
    leaves = [t for t in graph.tensors if t.is_leaf]
    given = {t.name: fed(t, seed) for seed, t in enumerate(leaves)}
    session = Session(backends, Options())
    session.prepare("it", graph, lambda t: given[t.name])
    found = session.run("it", {t.name: given[t.name] for t in leaves if t.kind is Kind.INPUT})
    made = Counter(t.op for t in session.plan("it").plan.graph.nodes)
    for b in backends.values():
        b.close()
    return found, made


def cpu(threads: int = 2, exact: bool = False) -> Callable[[], dict[str, Backend]]:
    return lambda: {"cpu": open_cpu("cpu", threads=threads, exact=exact)}


def cuda() -> dict[str, Backend]:
    return {"cuda0": opened(), "cpu": open_backend("cpu", threads=1, exact=True)}


def same(opens: Callable[[], dict[str, Backend]], graph: Graph, launches: int, kept: int) -> None:
    """Joined and apart are alike; `launches` joined ones, and `kept` products beside them."""
    one, made = values(opens, graph)
    apart, single = values(opens, graph, joined=False)
    assert (made["mul_mats"], made["mul_mat"]) == (launches, kept)
    assert single["mul_mats"] == 0 and single["mul_mat"] > kept
    for name, wanted in apart.items():
        assert np.array_equal(one[name], wanted) and np.isfinite(wanted).all(), name


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_every_weight_type_gives_the_bits_of_single_products(dtype: DType, exact: bool) -> None:
    """On the CPU, by many threads."""
    for threads, rows in ((1, 1), (3, 5), (2, 11), (2, FEW_ROWS)):
        same(cpu(threads, exact), layer(rows, dict.fromkeys(HEADS, dtype)), 1, 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1])
def test_layers_of_models(rows: int, form: str) -> None:
    """With biases, norms of heads, values of another type; a prompt has its own products."""
    few = rows <= FEW_ROWS
    other = {**SAME, "v": dt.Q6_K}
    for opens in (cpu(), cuda) if COMPILER is not None or DEVICE else (cpu(),):
        for types, left in ((SAME, 0), (other, 1)):
            graph = layer(rows, types, form)
            if few:
                same(opens, graph, 1, left)
            else:
                assert values(opens, graph)[1]["mul_mat"] == 3


def test_nobody_waits_between_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads meet once less for each product, and may run in any order."""
    backend = open_cpu("cpu", threads=1)
    ran: list[Flat] = []
    usual = backend.pool.run
    graph = layer(3, SAME)
    monkeypatch.setattr(backend.pool, "run", lambda f: (ran.append(f), usual(f)))
    monkeypatch.setattr(backend, "close", lambda: None)

    def opens() -> dict[str, Backend]:
        return {"cpu": backend}

    wanted, _ = values(opens, graph)
    (flat,) = (f for f in ran if any(n.startswith("matmul") for n in f.names))
    at = [i for i, name in enumerate(flat.names) if name.startswith("matmul")]
    assert len(at) == 3 and at == list(range(at[0], at[0] + 3)), flat.names
    assert [bool(flat.code[i, 1] & BARRIER) for i in at] == [False, False, True]
    for threads in (2, 3, 7):
        for turn in (range, lambda n: range(n - 1, -1, -1)):
            monkeypatch.setattr(
                backend.pool, "run", lambda f, n=threads, o=turn: run_parts(f, n, o)
            )
            found, _ = values(opens, graph)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    monkeypatch.undo()
    backend.close()


def test_what_is_joined_and_what_is_not() -> None:
    x, z = input("x", (3, 64)), input("z", (3, 64))
    w = [weight(f"w{i}", (8 * (i + 1), 64)) for i in range(6)]

    def made(*products: Tensor, spec: DeviceSpec = KNOWN) -> list[str]:
        graph = Graph.of({f"y{i}": y * 2.0 for i, y in enumerate(products)})
        return sorted(t.op for t in rewrite(graph, [spec]).nodes if t.op != "scale")

    for count, wanted in ((1, [1]), (2, [2]), (4, [4]), (5, [1, 4]), (6, [2, 4])):
        graph = Graph.of({f"y{i}": ops.mul_mat(v, x) * 2.0 for i, v in enumerate(w[:count])})
        joined = rewrite(graph, [KNOWN])
        taken = sorted(len(t.sources) - 1 for t in joined.nodes if t.op != "scale")
        assert taken == wanted and max(taken) <= MOST_MATRICES
        views = [t for t in joined if t.is_view]
        assert all(t.is_contiguous for t in views) and len(views) == sum(n for n in taken if n > 1)

    first, second = ops.mul_mat(w[0], x), ops.mul_mat(w[1], x)
    long = input("long", (FEW_ROWS + 1, 64))
    half, held = weight("half", (8, 64), dt.F16), state("held", (8, 64))
    behind = ops.mul_mat(weight("u", (64, 3)), ops.cont(first.T))  # what the first makes
    wide, experts = x.reshape(1, 3, 64), [weight(n, (1, 8, 64)) for n in "ef"]
    left: dict[str, tuple[Tensor, ...]] = {
        "other rows": (first, ops.mul_mat(w[1], z)),
        "another type": (first, ops.mul_mat(half, x)),
        "many rows": tuple(ops.mul_mat(v, long) for v in w[:2]),
        "a matrix that may change": (first, ops.mul_mat(held, x)),
        "a matrix that is computed": (first, ops.mul_mat(behind, x)),
        "matrices in layers": tuple(ops.mul_mat(v, wide) for v in experts),
    }  # fmt: skip
    for why, products in left.items():
        assert "mul_mats" not in made(*products), why
    outputs = rewrite(Graph.of({"a": first, "b": second}), [KNOWN])
    assert [t.op for t in outputs.nodes] == ["mul_mat", "mul_mat"]
    lacking = replace(KNOWN, compiled=lambda t: t.op != "mul_mats")
    assert made(first, second, spec=lacking) == ["mul_mat", "mul_mat"]
    both = [KNOWN, replace(KNOWN, name="sim0", kind="sim", fused=frozenset())]
    graph = Graph.of({"a": first * 2.0, "b": second * 2.0})
    assert "mul_mats" not in {t.op for t in rewrite(graph, both).nodes}
    homes = {"mul_mat_2": "cpu"}
    apart = Graph.of({"a": ops.mul_mat(w[0], x, name="mul_mat_2") * 2.0, "b": second * 2.0})
    assert "mul_mats" not in {t.op for t in rewrite(apart, [KNOWN], homes=homes).nodes}


def test_a_product_that_is_overwritten_stays() -> None:
    x = input("x", (3, 64))
    first, second = (ops.mul_mat(weight(n, (8, 64)), x) for n in "wv")
    changed = ops.set_rows(first, input("r", (1, 8)), input("at", (1,), dt.I64))
    graph = Graph.of({"a": changed * 2.0, "b": second * 2.0})
    assert "mul_mats" not in {t.op for t in rewrite(graph, [KNOWN]).nodes}


TYPES = [dt.dtype(name) for name in kernels.TEMPLATES["tiles"][1]]


@need_driver
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_gives_the_bits_of_single_products(dtype: DType) -> None:
    """Two to four matrices, 1 to 64 rows, by 16 and by 64 outputs; in both orders of threads."""
    k = 2 * max(dtype.block, 32)
    raws = {f"w{i}": raw_weight(dtype, n, k, i) for i, n in enumerate(COUNTS)}
    matrices = [weight(name, (len(raw), k), dtype) for name, raw in raws.items()]
    x = np.random.default_rng(3).normal(size=(FEW_ROWS, k)).astype(np.float32)
    for rows, count in ((1, 3), (3, 4), (8, 2), (9, 2), (64, 4)):
        stored = {name: raw.reshape(-1) for name, raw in raws.items()}
        stored["x"] = x[:rows].reshape(-1).view(np.uint8)
        a, (w, *more) = input("x", (rows, k)), matrices[:count]
        one = run(ops.mul_mats(w, a, *more, name="y"), stored)
        apart = [run(ops.mul_mat(v, a, name="y"), stored).reshape(-1) for v in (w, *more)]
        assert np.array_equal(one, np.concatenate(apart)), f"{rows} rows of {count}"


def test_what_is_refused() -> None:
    x = input("x", (3, 64))
    w, v = weight("w", (8, 64), dt.Q8_0), weight("v", (8, 64), dt.Q4_0)
    assert accepts(ops.mul_mats(w, x, w)) and not accepts(ops.mul_mats(w, x, v))
    assert not accepts(ops.mul_mats(weight("f", (8, 64)), x, weight("g", (8, 64))))
    assert not accepts(ops.mul_mats(w, input("long", (FEW_ROWS + 1, 64)), w))
    for wrong in ([], [w] * MOST_MATRICES, [weight("n", (8, 32))], [weight("e", (1, 8, 64))]):
        with pytest.raises(ShapeError, match=r"^mul_mats\("):
            ops.mul_mats(w, x, *wrong)


def unit(rows: int, types: dict[str, DType]) -> Graph:
    """A gated unit of two products."""
    x = input("x", (rows, 256))
    gate, up = (ops.mul_mat(weight(f"w{n}", (96, 256), types["q"]), x) for n in ("gate", "up"))
    return Graph.of({"y": ops.swiglu(gate, up)})


@pytest.mark.parametrize(("made", "op"), [(layer, "mul_mats"), (unit, "mul_mat_gated")])
@pytest.mark.parametrize("rows", [(FEW_ROWS + 1, 3), (3, FEW_ROWS + 1)])
def test_no_weight_of_a_launch_is_copied_where_memory_ends(
    rows: tuple[int, int], made: Callable[[int, dict[str, DType]], Graph], op: str
) -> None:
    """A device's memory ends behind any weight, and first comes the plan of a prompt, whose
    products are apart, or that of few rows; the second finds the weights where the first put them,
    as in a session."""
    matrices = {t.name: t for t in made(3, SAME).leaves(Kind.WEIGHT)}
    cpu = replace(KNOWN, host_visible=True, fused=frozenset({op}))
    homes = set()
    for room in accumulate((t.nbytes for t in matrices.values()), initial=0):
        devices = [replace(cpu, name="near", host_visible=False, memory_bytes=room), cpu]
        pins: list[str] = []
        for n in rows:
            graph = rewrite(made(n, SAME), devices)
            placed = place(graph, devices, pins).of
            pins = [f"^{name}$={placed[name].device}" for name in matrices]
            homes.add(there := frozenset(placed[name].device for name in matrices))
            assert len(there) == 1, (room, n)
            readers = [t for t in graph.nodes if not matrices.keys().isdisjoint(_names(t))]
            assert {placed[t.name].device for t in readers} == there
            assert (op in {t.op for t in readers}) == (n == 3)
    assert homes == {frozenset({"cpu"}), frozenset({"near"})}


def _names(t: Tensor) -> set[str]:
    return {s.name for s in t.sources}
