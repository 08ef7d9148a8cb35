"""Operands that share bytes, on every backend, against NumPy on the graph as it was written.

Each pair of sources of every op, fused ones included, is in turn one tensor, a whole and its view,
a value and its transpose, or two windows that overlap. The value that they share is computed, so
that the result may be put in its place. What kernels cannot do must be refused, never be wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest
from cuda_host import COMPILER
from cuda_kit import assert_near, opened

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.protocol import Backend, Launch, Ref
from ggraph.dtype import A8, F16, F32, I32, I64, Q4_0, Q8_0
from ggraph.errors import GraphError, ShapeError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, to_logical, to_storage
from ggraph.ops.rope import DEFAULTS
from ggraph.pipeline import Options
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.session import Session
from ggraph.tensor import OPS, Arg, Array, Example, Kind, OpSpec, Tensor, apply, input, leaf, weight

MANY = 5  # operands from which pairs of one example are enough of them
MANY_WAYS = 40  # in which two sources share bytes, from which on the others are of one kind
SHIFT = 3  # elements between two windows that overlap
TILES = 80  # rows and columns of a product whose tiles several threads compute

# Sizes at which kernels write some results before they have read all operands.
LARGER: dict[str, tuple[Example, ...]] = {
    "mul_mat": (Example((Arg((TILES, TILES)), Arg((TILES, TILES)))),),
    "mul_mat_add": (
        Example((Arg((TILES, TILES)), Arg((5, TILES)), Arg((5, TILES)))),
        Example((Arg((96, 96), Q4_0), Arg((5, 96)), Arg((5, 96))), tolerance=3e-2),
        Example((Arg((96, 96), F16), Arg((1, 96)), Arg((1, 96))), tolerance=2e-3),
    ),
    "set_rows": (Example((Arg((40, 16)), Arg((40, 16)), Arg((40,), I64, "ids:40"))),),
    "rope_set_rows": (
        Example(
            (Arg((40, 2, 8)), Arg((40, 2, 8)), Arg((40,), I32, "ids:40"),
             Arg((40,), I64, "ids:40")),
            {**DEFAULTS, "n_rot": 8, "has_factors": False},
        ),
    ),
    "add": (Example((Arg((64, 70)), Arg((64, 70)))),),
    "soft_max": (
        Example((Arg((40, 70)), Arg((40, 70))),
                {"scale": 0.5, "max_bias": 0.0, "has_mask": True, "has_sinks": False}),
    ),
}  # fmt: skip
BACKENDS = {
    "cpu 1": ("cpu", 1, False), "cpu 4": ("cpu", 4, False),
    "exact": ("cpu", 2, True), "sim": ("sim0", 0, False), "cuda": ("cuda0", 0, False),
}  # fmt: skip


def backends(kind: str) -> dict[str, Backend]:
    """The device asked for, and a CPU for what it has no kernel for."""
    name, threads, exact = BACKENDS[kind]
    if name == "cpu":
        return {"cpu": open_backend("cpu", threads=threads, exact=exact)}
    if name == "cuda0" and COMPILER is None:
        pytest.skip("g++ is not installed")
    device = opened() if name == "cuda0" else open_backend(name)
    return {name: device, "cpu": open_backend("cpu", threads=2, exact=True)}


def shared(
    a: Arg, b: Arg
) -> Iterator[tuple[str, Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]]:
    """How two sources of these shapes may share bytes: a name, the leaf, the two made of it."""
    if a.dtype is not b.dtype or not prod(a.shape) or not prod(b.shape) or a.dtype is A8:
        return
    if a.shape == b.shape:
        yield "same", _leaf(a.shape, a), lambda t: (t, t)
    if a.dtype.is_block:
        return
    if prod(a.shape) == prod(b.shape):
        yield "reshaped", _leaf(a.shape, a), lambda t: (t, ops.view(t, b.shape))
    if (
        len(a.shape) > 1
        and len(b.shape) > 1
        and a.shape == (*b.shape[:-2], b.shape[-1], b.shape[-2])
    ):
        yield "turned", _leaf(a.shape, a), lambda t: (t, ops.transpose(t))
        yield "turned back", _leaf(b.shape, a), lambda t: (ops.transpose(t), t)
    flat = (max(prod(a.shape), prod(b.shape)) + SHIFT,)
    yield "ahead", _leaf(flat, a), lambda t: (ops.view(t, a.shape), ops.view(t, b.shape, start=3))
    yield "behind", _leaf(flat, a), lambda t: (ops.view(t, a.shape, start=3), ops.view(t, b.shape))
    if prod(a.shape) > prod(b.shape):
        yield "a part", _leaf(a.shape, a), lambda t: (t, ops.view(t, b.shape))
    if prod(b.shape) > prod(a.shape):
        yield "part of", _leaf(b.shape, a), lambda t: (ops.view(t, a.shape), t)


def _leaf(shape: tuple[int, ...], like: Arg) -> Tensor:
    return leaf(Kind.INPUT, "both", shape, like.dtype)


def computed(t: Tensor, name: str = "made") -> Tensor:
    """The leaf's value as a result that the plan owns, where an op can make one."""
    return ops.scale(t, 1.5, name=name) if t.dtype is F32 else t


def fill(a: Arg, b: Arg) -> str:
    """How the shared bytes are filled: as the stricter of the two asks."""
    if any(x.fill.startswith(("replay", "parents")) for x in (a, b)):
        return "none"  # which any row may follow
    ids = [x.fill for x in (a, b) if x.fill.startswith("ids:")]
    if ids:
        return min(ids, key=lambda f: int(f[4:]))
    return "positive" if "positive" in (a.fill, b.fill) else "normal"


Case = tuple[str, Graph, dict[str, Array], float]


def cases(spec: OpSpec) -> Iterator[Case]:
    """Every way in which two sources share bytes, with the others as inputs and as weights; where
    there are many ways, as one of both in turn."""
    count, many = 0, len(spec.examples[0].args) > MANY
    taken = (*spec.examples[: 1 if many else None], *LARGER.get(spec.name, ()))
    ways = [
        (example, slots, *way)
        for example in taken
        for slots in combinations(range(len(example.args)), 2)
        for way in shared(*(example.args[i] for i in slots))
    ]
    for n, (example, slots, how, both, pair) in enumerate(ways):
        kinds = (Kind.INPUT, Kind.WEIGHT)[: len(example.args) - 1]
        for kind in kinds if len(ways) <= MANY_WAYS else (kinds[n % len(kinds)],):
            count += 1
            others = _others(example, slots, kind, f"{spec.name}.{count}")
            y = _applied(spec, example, slots, pair, both, others)
            if y is not None:
                rng, (a, b) = np.random.default_rng(count), (example.args[i] for i in slots)
                given = [(both, replace(a, shape=both.shape, fill=fill(a, b))), *others]
                feeds = {t.name: _values(t, x, rng) for t, x in given if t.name}
                where = f"{how} at {slots[0]} and {slots[1]}, others {kind.value}s"
                yield f"{spec.name} {where}: {example}", y, feeds, example.tolerance


def _values(t: Tensor, arg: Arg, rng: np.random.Generator) -> Array:
    return examples.rounded(examples.values(arg, rng), t)


def _others(
    example: Example, pair: tuple[int, int], kind: Kind, title: str
) -> list[tuple[Tensor, Arg]]:
    return [
        (leaf(kind, f"{title}.{n}", x.shape, x.dtype), x)
        for n, x in enumerate(example.args)
        if n not in pair
    ]


def _applied(
    spec: OpSpec,
    example: Example,
    slots: tuple[int, int],
    pair: Callable[[Tensor], tuple[Tensor, Tensor]],
    both: Tensor,
    others: list[tuple[Tensor, Arg]],
) -> Graph | None:
    """The graph, or None where sources are refused: by the op's rule, or since it overwrites."""
    rest = iter(others)
    try:
        placed = dict(zip(slots, pair(computed(both)), strict=True))
        sources = [placed[n] if n in placed else next(rest)[0] for n in range(len(example.args))]
        if spec.overwrites is not None and spec.overwrites not in slots:
            sources[spec.overwrites] = computed(sources[spec.overwrites], "held")
        y = apply(spec.name, *sources, name="y", **example.attrs)
        return Graph.of({"z": ops.scale(y, 1.0, 0.25)} if y.dtype is F32 else {"y": y})
    except ShapeError:
        return None
    except GraphError as e:
        assert spec.overwrites is not None and "overwrites" in str(e), e
        return None


def outputs(session: Session, key: str, graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
    """What the devices make of it, in the second run, which finds used memory."""
    stored = {t.name: to_storage(feeds[t.name], t) for t in graph if t.is_leaf}
    session.prepare(key, lambda: graph, lambda t: stored[t.name])
    session.run(key, inputs(graph, feeds))
    return session.run(key, inputs(graph, feeds))


def inputs(graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
    """What a run is given of the feeds."""
    return {t.name: to_storage(feeds[t.name], t) for t in graph.leaves(Kind.INPUT)}


def elsewhere(graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
    """The feeds with other numbers wherever no source shows the shared bytes."""
    both = feeds["both"].copy()
    if both.dtype == np.float32 and graph["both"].dtype is F32:
        shown = np.zeros(both.size, bool)
        for t in graph.nodes:
            for s in t.sources if t.name != "made" else ():
                for start, stop in s.byte_ranges() if s.root.name in ("made", "both") else ():
                    shown[start // 4 : stop // 4] = True
        both.reshape(-1)[~shown] = 1e3 + np.arange((~shown).sum())
    return {**feeds, "both": both}


def opened_session(kind: str) -> Session:
    """Everything but what the host writes is pinned to the device, where it can run it."""
    held = backends(kind)
    name = next(iter(held))
    return Session(held, Options(pins=(f"^(made|held|y|z)$={name}",)))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", sorted(n for n in OPS if len(OPS[n].examples[0].args) > 1))
def test_shared_bytes_give_what_separate_ones_do(name: str, kind: str) -> None:
    session = opened_session(kind)
    for title, graph, feeds, tolerance in cases(OPS[name]):
        if kind == "cuda" and not all(accepts(t) for t in graph.nodes):
            continue
        wanted = evaluate(graph, feeds)
        got = outputs(session, title, graph, feeds)
        for out in graph.outputs:
            loose = max(tolerance, 3e-2 if kind.startswith("cpu") and "mul_mat" in name else 1e-5)
            found = to_logical(got[out.name], out)
            assert_near(found, wanted[out.name], loose, f"{kind}: {title}")
        for out_name, value in session.run(title, inputs(graph, elsewhere(graph, feeds))).items():
            same = np.array_equal(value, got[out_name], equal_nan=True)
            assert same, f"{kind}: {title} reads what no source shows"
    session.close()


def rows_of(count: int, width: int, name: str) -> Tensor:
    """A result that the plan owns: `count` rows of an input."""
    return ops.scale(input(name, (count, width)), 0.5, name=f"{name}.made")


def experts() -> Graph:
    """Two of many rows, then all of them, against experts in 4 bits: both begin at one byte."""
    x = ops.reshape(rows_of(64, 32, "x"), 64, 1, 32)
    w = weight("w", (4, 24, 32), Q4_0)
    few = ops.view(x, (2, 1, 32))
    first = ops.mul_mat_id(w, few, ops.view(input("ids", (64, 2), I32), (2, 2)))
    return Graph.of({"few": first, "all": ops.mul_mat_id(w, x, input("ids2", (64, 2), I32))})


def masks() -> Graph:
    """Attention of two rows by a mask, then of all rows by all of it, then of fewer slots."""
    q, k, v = (input(n, (16, 2, 16)) for n in "qkv")
    mask = ops.scale(input("mask", (16, 16)), 1.0, 0.5, name="made")
    few = ops.flash_attn(ops.rows(q, 0, 2), k, v, ops.rows(mask, 0, 2), scale=0.25)
    every = ops.flash_attn(q, k, v, mask, scale=0.25)
    short = ops.flash_attn(q, k, v, mask, input("length", (1,), I32), scale=0.25)
    return Graph.of({"few": few, "all": every, "short": short})


def products() -> Graph:
    """Rows of one value in 8 bits: some, all, and in another shape."""
    x, w = rows_of(48, 64, "x"), weight("w", (40, 64), Q4_0)
    narrow = ops.mul_mat(weight("w8", (24, 32), Q8_0), ops.view(x, (48, 32)))
    some, all_rows = ops.mul_mat(w, ops.rows(x, 0, 3)), ops.mul_mat(w, x)
    return Graph.of({"some": some, "all": all_rows, "narrow": narrow})


def residuals() -> Graph:
    """A product and a sum that share their operand, in both orders, from a value and from views."""
    x = rows_of(3, 64, "x")
    h = ops.add(x, ops.mul_mat(weight("w", (64, 64)), x), name="h")
    g = ops.add(ops.mul_mat(weight("w4", (64, 64), Q4_0), h), h, name="g")
    wide = rows_of(5, 64, "wide")
    part, rest = ops.rows(wide, 0, 3), ops.rows(wide, 1, 3)
    return Graph.of(
        {"y": ops.add(g, x), "z": ops.add(ops.mul_mat(weight("v", (64, 64)), part), rest)}
    )


def turned_into_itself() -> Graph:
    """A cache that gets rotated rows of its own: the fused op would read what it overwrites."""
    cache = rows_of(12, 32, "x")
    held = ops.reshape(cache, 12, 2, 16)
    held = ops.scale(held, 1.0, 0.25, name="held")
    turned = ops.rope(ops.rows(held, 2, 9), input("positions", (9,), I32), n_rot=16)
    return Graph.of({"y": ops.scale(ops.set_rows(held, turned, input("to", (9,), I64)), 2.0)})


def kept_copy() -> Graph:
    """A copy made with `cont` of a value that is overwritten later stays a copy."""
    held = rows_of(6, 32, "x")
    copy = ops.cont(held, name="copy")
    new = ops.set_rows(held, ops.rows(copy, 2, 3), input("at", (3,), I64))
    return Graph.of({"y": ops.add(copy, new)})


def caches() -> Graph:
    """One list, and one length, for caches and rows of several numbers: 56 slots of one row take
    as many bytes as ten of two. What one cache has not, another may have."""
    found, listed, length = {}, input("listed", (1, 4), I32), input("length", (1,), I32)
    for i, (rows, slots) in enumerate(((1, 90), (1, 12), (2, 10), (1, 56), (1, 9))):
        q = input(f"q{i}", (rows, 1, 8))
        k, v = (input(f"{n}{i}", (slots, 1, 8)) for n in "kv")
        found[f"long{i}"] = ops.flash_attn(q, k, v, length=length, scale=0.3)
        if rows == 1:
            found[f"listed{i}"] = ops.flash_attn(q, k, v, listed, scale=0.3)
    return Graph.of(found)


def kernels() -> Graph:
    """One value as the kernels of a convolution and as the matrices of a product."""
    found = {}
    for i, shape in enumerate(((16, 1, 16, 2), (48, 1, 48, 2), (4, 2, 3, 3))):
        w = input(f"w{i}", shape)
        found[f"c{i}"] = ops.conv_2d(w, input(f"image{i}", (1, shape[1], 50, 5)))
        found[f"m{i}"] = ops.mul_mat(w, input(f"x{i}", (*shape[:2], 3, shape[3])))
    return Graph.of(found)


def names() -> Graph:
    """Two names, and a third that is written as both."""
    q, k, v = (input(n, (2, 1, 8)) for n in "qkv")
    m, both, length = input("m", (2, 2)), input("m+n", (2, 2)), input("n", (1,), I32)
    some = ops.flash_attn(q, k, v, m, length, scale=0.3)
    return Graph.of({"some": some, "all": ops.flash_attn(q, k, v, both, scale=0.3)})


GRAPHS = (
    experts, masks, products, residuals, turned_into_itself, kept_copy, caches, kernels, names
)  # fmt: skip
FILLS = {
    "listed": "ids:90",
    "n": "ids:2",
    "ids": "ids:4",
    "ids2": "ids:4",
    "length": "ids:9",
    "positions": "ids:30",
    "at": "ids:5",
    "to": "ids:12",
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda m: m.__name__)
def test_what_is_made_of_one_value_is_not_taken_for_another(
    make: Callable[[], Graph], kind: str
) -> None:
    graph, rng = make(), np.random.default_rng(5)
    feeds = {
        t.name: _values(t, Arg(t.shape, t.dtype, FILLS.get(t.name, "normal")), rng)
        for t in graph
        if t.is_leaf
    }
    wanted = evaluate(graph, feeds)
    session = Session(backends(kind))
    got = outputs(session, make.__name__, graph, feeds)
    for out in graph.outputs:
        assert_near(got[out.name], wanted[out.name], 3e-2, f"{kind}: {make.__name__} {out.name}")
    session.close()


def test_one_memory_is_packed_for_each_shape_that_is_read_there() -> None:
    """The packed form is kept by all that decides it, and cannot outlive its memory's identity."""
    backend = open_backend("cpu", threads=1)
    rng = np.random.default_rng(3)
    raw = to_storage(rng.standard_normal((64, 32)).astype(np.float32), weight("w", (64, 32)))
    held = backend.load(Buffer("w", "cpu", raw.nbytes, 64), weight("w", (64, 32)), raw)
    for shape in ((64, 32), (32, 64), (16, 128)):
        w, x = weight("w", shape), input("x", (2, shape[1]))
        y = ops.mul_mat(w, x, name="y")
        given = rng.standard_normal(x.shape).astype(np.float32)
        into, out = (backend.allocate(Buffer(t.name, "cpu", t.nbytes, 64)) for t in (x, y))
        backend.write(into, 0, given)
        launch = Launch(Command(Do.LAUNCH, Actor("cpu"), "y", "y"), Ref(y, out, 0),
                        (Ref(w, held, 0), Ref(x, into, 0)))  # fmt: skip
        backend.submit(0, backend.lower([launch]))
        found = backend.read(out, 0, y.nbytes).view(np.float32).reshape(y.shape)
        assert_near(found, given @ raw.reshape(shape).T, 1e-5, f"{shape}")
    backend.close()
