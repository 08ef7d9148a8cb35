"""Kernels by rule: traced meanings, loop nests over any layout, and what has no kernel."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cpu_calls import call, call_with, variants
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, Options, Session, Tensor, input, open_backend, ops, weight
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.kernels.nest import register
from ggraph.backends.cpu.kernels.nest_form import Nest, Operand
from ggraph.backends.cpu.kernels.tiles import packed_bytes
from ggraph.backends.cpu.lowering.loops import plan_nests
from ggraph.dtype import BY_NAME, F32, as_dtype
from ggraph.errors import GraphError, InputError, PlaceError, ShapeError
from ggraph.formats.checkpoint import storage_shape
from ggraph.ops import examples
from ggraph.ops.evaluate import decode, evaluate, to_storage
from ggraph.ops.trace import trace
from ggraph.tensor import OPS, Array, Example, Kind, apply, leaf

SPEC = cpu_spec("cpu")
RNG = np.random.default_rng(5)


def run(graph: Graph, feeds: dict[str, Array], threads: int = 2) -> dict[str, Array]:
    """Outputs from the CPU; every op must have a kernel."""
    session = Session(
        {"cpu": open_backend("cpu", threads=threads, exact=True)}, Options(strict=True)
    )
    given = {n: a for n, a in feeds.items() if graph[n].kind is Kind.INPUT}
    held = {n: a for n, a in feeds.items() if graph[n].kind is Kind.WEIGHT}
    session.prepare("k", graph, {n: to_storage(a, graph[n]) for n, a in held.items()})
    found = session.run("k", given)
    session.close()
    return found


def agrees(y: Tensor, bound: float = 1e-5, **feeds: Array) -> None:
    graph = Graph.of({"y": y})
    want = evaluate(graph, feeds)["y"]
    got = run(graph, feeds)["y"]
    scale = np.abs(want[np.isfinite(want)]).max(initial=1e-30)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        assert (same | (np.abs(got - want) <= bound * scale)).all()


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def as_weights(name: str) -> list[Tensor]:
    """The examples of an op with matrices and tables as a model has them: as weights."""
    spec, found = OPS[name], []
    for e in spec.examples:
        leaves = list(examples.leaves(spec, e))
        if name.startswith(("mul_mat", "get_rows", "conv_2d")) and leaves:
            leaves[0] = leaf(Kind.WEIGHT, "a", e.args[0].shape, e.args[0].dtype)
        found.append(apply(name, *leaves, name="y", **e.attrs))
    return found


WITHOUT = {
    "cast",
    "cpy",
    "delta_net",
    "delta_net_next",
    "draw",
    "mul_mat_gated",
    "mul_mat_gated_quantise",
    "mul_mats",
    "rope",
    "set_rows",
}  # NumPy computes some


def test_every_example_is_compiled_but_for_a_short_list() -> None:
    ours = {n for n in OPS if OPS[n].view_of is None and n not in ("copy",)}
    lacking = {n for n in ours if not all(map(SPEC.compiled, as_weights(n)))}
    assert lacking == WITHOUT
    page = (Path(__file__).parent.parent / "docs" / "library.md").read_text()
    assert all(f"`{n}`" in page for n in WITHOUT)


OTHER_TYPES = {"f16": 2e-3, "bf16": 2e-2}  # with how near their results are


def in_another_type(name: str, kind: str) -> Iterator[tuple[Tensor, Example]]:
    """The examples of an op with numbers of another type, as far as it takes them."""
    for e in OPS[name].examples:
        args = [replace(a, dtype=BY_NAME[kind] if a.dtype is F32 else a.dtype) for a in e.args]
        other = replace(e, args=tuple(args))
        if other != e and OPS[name].overwrites is None:
            with suppress(GraphError, ShapeError):
                yield apply(name, *examples.leaves(OPS[name], other), name="y", **e.attrs), other


@pytest.mark.parametrize("kind", OTHER_TYPES)
@pytest.mark.parametrize("name", sorted(set(OPS) - {"copy"}))  # which planning alone makes
def test_every_op_of_another_float_type(name: str, kind: str) -> None:
    """Most of bf16 ended in LLVM's errors, and two signs and squares were those of the bits."""
    for y, example in in_another_type(name, kind):
        if not y.size or y.dtype.is_block or not SPEC.compiled(y):
            continue
        graph, feeds = Graph.of({"y": y}), examples.feeds(OPS[name], example, 3)
        want = evaluate(graph, feeds)["y"]
        got = decode(
            run(graph, {n: to_storage(a, graph[n]) for n, a in feeds.items()})["y"], y.dtype
        )
        span = np.abs(want[np.isfinite(want)]).max(initial=1e-30)
        with np.errstate(all="ignore"):
            near = np.abs(got - want) <= OTHER_TYPES[kind] * span
        assert ((got == want) | near | (np.isnan(got) & np.isnan(want))).all(), example


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(shape=SHAPES, order=st.randoms(use_true_random=False), last=st.integers(1, 40))
def test_any_layout_of_any_shape(shape: tuple[int, ...], order: object, last: int) -> None:
    """Permuted, sliced and repeated sources of several types, in one expression."""
    shape = (*shape, last)
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    wide = tuple(n + 2 for n in shape)
    a = input("a", tuple(wide[axes.index(i)] for i in range(len(wide)))).permute(*axes)
    box = a[tuple(slice(1, 1 + n) for n in shape)]
    some = tuple(n if i % 2 else 1 for i, n in enumerate(shape))
    b, c = input("b", some, "f16"), input("c", (last,), "bf16")
    y = ops.mul(ops.add(ops.cont(box), b), c)
    feeds = {t.name: examples.rounded(normal(*t.shape), t) for t in (a.root, b, c)}
    want = evaluate(Graph.of({"y": y}), feeds)["y"]
    stored = {t.name: to_storage(feeds[t.name], t) for t in (a.root, b, c)}
    got = run(Graph.of({"y": y}), stored)["y"]
    assert np.array_equal(got, want)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 40)),
    axes=st.sets(st.integers(0, 2), min_size=1),
    kind=st.sampled_from(["sum", "mean", "max", "min"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_reductions_over_any_axes(
    shape: tuple[int, ...], axes: set[int], kind: str, seed: int
) -> None:
    """Of numbers whose sum is not small beside them: an error is relative to what was added."""
    given = np.random.default_rng(seed).normal(2, 1, shape).astype(np.float32)
    x = input("x", shape)
    agrees(ops.reduce(x, kind, tuple(axes)), x=given)
    turned = x.permute(2, 0, 1)
    agrees(ops.reduce(turned, kind, tuple(axes)), x=given)


EMPTY: dict[str, tuple[Tensor, ...]] = {
    "repeated": (input("w", (1, 5, 0)), input("x", (2, 3, 0))),
    "each its own": (input("w", (2, 5, 0)), input("x", (4, 3, 0))),
    "stored": (weight("w", (2, 5, 0)), input("x", (2, 3, 0))),
    "one": (input("w", (5, 0)), input("x", (3, 0))),
    "no outputs": (input("w", (2, 0, 4)), input("x", (2, 3, 4))),
    "no rows": (input("w", (1, 5, 4)), input("x", (2, 0, 4))),
}


@pytest.mark.parametrize("case", EMPTY)
def test_products_of_nothing(case: str) -> None:
    """A sum over nothing is written and reads nothing: it was refused as a race."""
    w, x = EMPTY[case]
    agrees(ops.mul_mat(w, x), w=normal(*w.shape), x=normal(*x.shape))
    if len(w.shape) > 2 and w.kind is Kind.INPUT:
        agrees(ops.out_prod(w.T, x.T), w=normal(*w.shape), x=normal(*x.shape))


def test_reductions_of_nothing_beside_what_is_read() -> None:
    x, b = input("x", (3, 0, 4)), input("b", (3,))
    agrees(x.sum((1, 2)) + b, x=normal(3, 0, 4), b=normal(3))
    agrees(x.sum(1).sum(1) * b, x=normal(3, 0, 4), b=normal(3))


@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (0, 64), (0, 3, 4)])
@pytest.mark.parametrize("name", ["f32", "f16", "q8_0"])
def test_a_table_of_no_rows_refuses_every_index(shape: tuple[int, ...], name: str) -> None:
    dtype = as_dtype(name)
    if shape[-1] % dtype.block:
        return
    table, ids = weight("table", shape, dtype), input("ids", (2,), "i32")
    held = np.zeros(storage_shape(shape, dtype), dtype.np)
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", Graph.of({"y": ops.get_rows(table, ids)}), {"table": held})
        with pytest.raises(InputError, match=r"leave \[0, 0\)"):
            session.run("k", {"ids": np.zeros(2, np.int32)})
        session.prepare("n", Graph.of({"y": ops.get_rows(table, ids[:0])}), {"table": held})
        assert session.run("n", {"ids": np.zeros(2, np.int32)})["y"].shape == (0, *shape[1:])


@pytest.mark.parametrize(
    "name", [n for n in sorted(OPS) if "InputError" in str(getattr(ops, n, None).__doc__)]
)
def test_an_index_that_an_op_promises_to_refuse_is_refused(name: str) -> None:
    """By kernels too, wherever the reference refuses it."""
    spec, exact, refused = OPS[name], cpu_spec("cpu", exact=True), 0
    for y, e in zip(as_weights(name), spec.examples, strict=True):
        graph, feeds = Graph.of({"y": y}), examples.feeds(spec, e)
        which = [n for n, a in feeds.items() if graph[n].dtype.name in ("i32", "i64") and a.size]
        for n, index in product(which if exact.compiled(y) else (), (10**6, -1)):
            wrong = {**feeds, n: np.full_like(feeds[n], index)}
            try:
                evaluate(graph, {k: a.copy() for k, a in wrong.items()})
            except InputError:
                refused += 1
                inputs = {t.name: t for t in graph if t.kind is Kind.INPUT}
                fed = wrong | {k: to_storage(wrong[k], t) for k, t in inputs.items()}
                with pytest.raises(InputError, match=r"leave \[0, "):
                    run(graph, fed)
    assert refused


@pytest.mark.parametrize("op", ["exp", "log", "tanh", "expm1", "softplus", "gelu_erf"])
def test_functions_over_their_whole_range(op: str) -> None:
    """To a few units in the last place of NumPy's float64, NaN and infinities included; 1 + erf(x)
    of large negative x to units in the last place of 1."""
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)
    dense = np.concatenate([np.linspace(-80, 80, 40_001), np.geomspace(1e-30, 1e30, 5_001), ends])
    x = input("x", dense.shape)
    given = dense.astype(np.float32)
    graph = Graph.of({"y": getattr(ops, op)(x)})
    want, got = evaluate(graph, {"x": given})["y"], run(graph, {"x": given})["y"]
    with np.errstate(all="ignore"):
        least = np.abs(given) if op == "gelu_erf" else 1e-3
        off = np.abs(got.astype(np.float64) - want) / np.maximum(np.abs(want), least)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    assert (same | (off < 2e-6) | (np.abs(want) < 1e-37)).all(), given[~same][np.argmax(off[~same])]


def test_rounding_is_exact() -> None:
    """Beside halves, and where float32 has odd integers and nothing between them."""
    ends = np.float32([0.5, 1.5, 2.5, 1, 2**22 + 0.5, 2**23 - 0.5, 2**23 + 1, 2**24, 3e38, np.inf])
    near = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.float32(np.inf))])
    given = np.concatenate([near, -near, normal(1000) * 100, np.float32([0, np.nan])])
    wide = given.astype(np.float64)
    graph = Graph.of({"y": ops.round(input("x", given.shape))})
    want = np.sign(wide) * np.floor(np.abs(wide) + 0.5)
    assert np.array_equal(run(graph, {"x": given})["y"], want, equal_nan=True)
    assert np.array_equal(evaluate(graph, {"x": given})["y"], want, equal_nan=True)


def test_exponentials_have_the_same_bits_on_every_processor(tmp_path: Path) -> None:
    """Floats of every size, and all those beside the two ends of what has a value."""
    some = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ends = [np.float32(v).view(np.uint32) for v in (-87.3, 88.3, 88.7228, 89.0, 0.0)]
    beside = [np.arange(e - 3000 if e else 0, e + 3000, dtype=np.uint32) for e in ends]
    x = np.concatenate([some, *(b.view(np.float32) for b in beside)])
    nest = Nest(1, 0, "kept", (Operand("f32", "v"),) * 2, (("load", (1,)), ("exp", (0,))), "f32",
                False)  # fmt: skip
    found = {}
    for name, isa in variants().items():
        y = np.zeros_like(x)
        call_with(Jit(isa, tmp_path), register(nest).name, k0=x.size, y=y, yk0=4, a=x, ak0=4)
        found[name] = np.where(np.isnan(y), np.uint32(1), y.view(np.uint32))
    assert all(np.array_equal(bits, found["plain"]) for bits in found.values())
    assert np.array_equal(np.isnan(x), found["plain"] == 1)


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_angles_of_any_size(op: str) -> None:
    """Every magnitude of float32, and the floats beside multiples of pi / 2: as float64 rounded."""
    some = RNG.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    turns = np.floor(2.0 ** RNG.uniform(0, 90, 50_000)) * (np.pi / 2)
    worst = np.float32(16367173 * 2.0**72)  # 4e-9 of a quarter from a multiple
    ends = np.array([0, np.inf, -np.inf, np.nan, 2**20, 2**25, 3.4e38, worst], np.float32)
    given = np.concatenate([some, turns.astype(np.float32), ends])
    graph = Graph.of({"y": getattr(ops, op)(input("x", given.shape))})
    with np.errstate(all="ignore"):
        want = evaluate(graph, {"x": given})["y"]
    assert np.array_equal(run(graph, {"x": given})["y"], want, equal_nan=True)


def test_powers_are_those_of_numpy() -> None:
    """Of every pair of numbers at which something changes, and of many between, signs of zeros
    and subnormal results included: a base of 1 has the power 1, whatever the exponent."""
    near = [np.nextafter(np.float32(1), np.float32(to)) for to in (0, 2)]
    ends = [0, 1, 0.5, 1.5, 2, 3, 7, 1e-45, 1e-38, 3e38, 1e10, 2**24, 2**24 + 2, 2**25, np.inf]
    some = np.array([*ends, *(-np.array(ends)), *near, np.nan], np.float32)
    a, b = (x.ravel() for x in np.meshgrid(some, some))
    wide = np.exp(RNG.uniform(-88, 88, 100_000)), RNG.normal(0, 3, 100_000)
    flat = np.exp(RNG.normal(0, 1e-3, 50_000)), RNG.normal(0, 3e4, 50_000)
    a, b = (np.concatenate(x).astype(np.float32) for x in zip((a, b), wide, flat, strict=True))
    graph = Graph.of({"y": ops.pow(input("a", a.shape), input("b", b.shape))})
    want, got = evaluate(graph, {"a": a, "b": b})["y"], run(graph, {"a": a, "b": b})["y"]
    assert np.array_equal(np.isnan(got), np.isnan(want))
    there = ~np.isnan(want)
    bits, right = got[there].view(np.int32), want[there].view(np.int32)
    off = np.abs(bits.astype(np.int64) - right)
    assert off.max() <= 1 and np.mean(off == 0) > 0.9999
    known = (b == 0) | (a == 1) | ((a == -1) & np.isinf(b))
    assert np.array_equal(np.isnan(want), np.isnan(np.where(known, 1, want))), "NumPy knows better"
    assert (got[known] == 1).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (0, 2), (2,)])
def test_sums_are_those_of_float64(axes: tuple[int, ...]) -> None:
    """Along vectors and across them: of many alike, and of what float32 cannot add."""
    alike = np.full((96, 40, 2048), 0.1, np.float32)
    huge = np.tile(np.array([3e38, 3e38, -3e38], np.float32), 13 * 64 * 15).reshape(13 * 5, 64, 9)
    x, y = input("x", alike.shape), input("y", huge.shape)
    got = run(Graph.of({"sum": x.sum(axes), "mean": y.mean(axes)}), {"x": alike, "y": huge})
    for name, want in (
        ("sum", alike.astype(np.float64).sum(axes)),
        ("mean", huge.astype(np.float64).mean(axes)),
    ):
        assert np.allclose(got[name], want, 1e-7, 0), name


def test_a_chain_rounds_a_sum_as_the_ops_do_by_themselves() -> None:
    far = RNG.normal(1e4, 1, (64, 130)).astype(np.float32)
    x = input("x", far.shape)
    middle = x.mean(1, keepdims=True)
    alone = run(Graph.of({"y": x - middle, "middle": middle}), {"x": far})
    assert np.array_equal(alone["y"], far - alone["middle"])
    assert np.array_equal(run(Graph.of({"y": x - middle}), {"x": far})["y"], alone["y"])


def test_a_norm_of_what_is_far_from_0_is_one() -> None:
    far = RNG.normal(1e4, 1, (5, 4096)).astype(np.float32)
    wide = far - far.astype(np.float64).mean(-1, keepdims=True)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    x = input("x", far.shape)
    assert np.abs(run(Graph.of({"y": ops.norm(x)}), {"x": far})["y"] - want).max() < 2e-6
    both = far.reshape(5, 8, 16, 32)
    found = run(Graph.of({"y": ops.group_norm(input("x", both.shape), 1)}), {"x": both})["y"]
    assert np.abs(found.reshape(want.shape) - want).max() < 2e-6


def test_sums_that_are_infinite_or_none_stay_so() -> None:
    rows = np.array([[np.inf, 1, 2], [np.inf, -np.inf, 0], [np.nan, 1, 2], [3e38, 3e38, 3e38]])
    x = input("x", rows.shape)
    for y in (x - x.sum(1, keepdims=True), x.sum(1), x.mean(1, keepdims=True) + x, x.mean(1)):
        agrees(y, x=rows.astype(np.float32))


def test_a_rows_bits_do_not_depend_on_its_neighbours_or_on_threads() -> None:
    x, w = normal(40, 77), normal(77)

    def normed(rows: Array, threads: int) -> Array:
        t = input("x", rows.shape)
        y = ops.norm(t) * input("w", (77,))
        graph = Graph.of({"y": ops.add(y, ops.soft_max(t))})
        return run(graph, {"x": rows, "w": w}, threads)["y"]

    together = normed(x, 2)
    assert np.array_equal(together, normed(x, 1))
    for i in (0, 17, 39):
        assert np.array_equal(together[i], normed(x[i : i + 1], 1)[0])


def test_transposed_and_reshaped_weights_are_packed() -> None:
    """x @ w with w [in, out], and a convolution's kernel, by the products of stored matrices."""
    x, w = input("x", (5, 24)), weight("w", (24, 40), "f16")
    y = x @ w
    assert SPEC.held_bytes(w, (y,)) > 0 and not SPEC.needs(y)
    held = examples.rounded(normal(24, 40), w)
    agrees(y, 1e-5, x=normal(5, 24), w=held)


@pytest.mark.parametrize(
    ("x", "w", "stride", "padding", "dilation"),
    [
        ((2, 3, 9, 8), (6, 3, 3, 3), (2, 1), (1, 1), (1, 1)),
        ((1, 4, 30, 31), (70, 4, 3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 5, 7, 11), (37, 5, 2, 3), (1, 2), (0, 2), (2, 1)),
        ((1, 8, 13, 5), (20, 8, 1, 1), (2, 2), (0, 0), (1, 1)),
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)  # fmt: skip
def test_convolutions_of_stored_kernels(
    x: tuple[int, ...], w: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:  # fmt: skip
    """Over images as they lie and over turned ones; depthwise; by rows of one image."""
    image = input("x", x)
    for dtype in ("f32", "f16"):
        kernels = weight("w", w, dtype)
        values = {"x": normal(*x), "w": examples.rounded(normal(*w), kernels)}
        y = ops.conv_2d(kernels, image, stride, padding, dilation)
        assert SPEC.held_bytes(kernels, (y,)) > 0
        agrees(y, 1e-5, **values)
    turned = input("x", (x[0], x[2], x[3], x[1])).permute(0, 3, 1, 2)
    flat = values | {"x": np.ascontiguousarray(values["x"].transpose(0, 2, 3, 1))}
    agrees(ops.conv_2d(kernels, turned, stride, (0, 0), dilation), 1e-5, **flat)
    own = weight("w", (x[1], 1, *w[2:]))
    kept = {"x": values["x"], "w": normal(x[1], 1, *w[2:])}
    agrees(ops.conv_2d_dw(own, image, stride, padding, dilation), 1e-5, **kept)


@pytest.mark.parametrize(
    ("w", "x", "orders"),
    [
        ((37, 19), (5, 19), (None, None)),
        ((19, 37), (9, 19), ((1, 0), None)),
        ((2, 5, 8), (4, 3, 8), (None, None)),
        ((2, 40, 33), (6, 7, 40), ((0, 2, 1), None)),
        ((3, 33, 9), (2, 6, 5, 9), (None, None)),
        ((2, 3, 4, 9), (4, 3, 5, 9), (None, (0, 1, 2, 3))),
        ((40, 16), (6, 3, 16), (None, (1, 0, 2))),
        ((64, 2, 70), (34, 6, 70), ((1, 0, 2), (1, 0, 2))),
    ],
)  # fmt: skip
def test_products_of_two_activations(
    w: tuple[int, ...], x: tuple[int, ...], orders: tuple[tuple[int, ...] | None, ...]
) -> None:
    """In any layout, with matrices that repeat over leading axes, and a residual."""
    for dtype in ("f32", "f16", "bf16"):
        a, b = input("a", w, dtype), input("b", x)
        shown = [t if o is None else t.permute(*o) for t, o in zip((a, b), orders, strict=True)]
        y = ops.mul_mat(*shown)
        rest = input("c", y.shape)
        feeds = {"a": to_storage(normal(*w), a), "b": normal(*x), "c": normal(*y.shape)}
        values = feeds | {"a": decode(feeds["a"], a.dtype).reshape(w)}
        graph = Graph.of({"y": y, "z": ops.add(rest, ops.mul_mat(*shown))})
        want, got = evaluate(graph, values), run(graph, feeds)
        for name, found in got.items():
            assert np.abs(found - want[name]).max() <= 1e-5 * np.abs(want[name]).max()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_stored_matrices_that_repeat_are_packed_once(dtype: str) -> None:
    """One matrix per leading index, and rows that do not lie one after the other."""
    heads, x = weight("w", (2, 37, 24), dtype), input("x", (7, 6, 24))
    each = ops.mul_mat(heads, x.permute(1, 0, 2))  # [6, 7, 37]
    wide = ops.mul_mat(heads[0], x[:, 2:4])  # [7, 2, 37]
    for y in (each, wide):
        assert not SPEC.needs(y) and SPEC.held_bytes(heads, (y,)) > 0
    graph = Graph.of({"each": each, "wide": wide})
    values = {"w": examples.rounded(normal(2, 37, 24), heads), "x": normal(7, 6, 24)}
    want, got = evaluate(graph, values), run(graph, values)
    for name, found in got.items():
        assert np.abs(found - want[name]).max() <= 1e-5 * np.abs(want[name]).max()


def test_a_row_of_a_product_of_activations_has_its_bits_alone_too() -> None:
    w, x = normal(70, 45), normal(40, 45)

    def rows(x: Array, threads: int) -> Array:
        y = ops.mul_mat(input("w", (70, 45)), input("x", x.shape))
        return run(Graph.of({"y": y}), {"w": w, "x": x}, threads)["y"]

    together = rows(x, 2)
    for i in (0, 7, 39):
        assert np.array_equal(rows(x[i : i + 1], 1)[0], together[i])


def test_convolutions_of_computed_kernels() -> None:
    for dtype in ("f32", "f16"):
        kernels, image = input("w", (37, 3, 3, 2), dtype), input("x", (2, 3, 9, 8))
        y = ops.conv_2d(kernels, image, (2, 1), (1, 1))
        (room,) = SPEC.needs(y)
        assert room.name == "tiles" and SPEC.compiled(y)
        held = to_storage(normal(37, 3, 3, 2), kernels)
        graph, x = Graph.of({"y": y}), normal(2, 3, 9, 8)
        want = evaluate(graph, {"w": held.astype(np.float32), "x": x})["y"]
        got = run(graph, {"w": held, "x": x})["y"]
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("variant", variants())
def test_every_variant_lays_out_multiplies_and_convolves_alike(
    variant: str, tmp_path: Path
) -> None:
    """Tiles of a computed matrix, products and convolutions with them: the bits of this host's."""
    n, k, m, count = 37, 18, 14, 2
    raw, x = normal(count, n, k), normal(count, m, k)
    size = packed_bytes(F32, n, k)
    jit = Jit(variants()[variant], tmp_path)
    found = []
    for kernel in (call, partial(call_with, jit)):
        tiles = np.zeros(count * size, np.uint8)
        kernel("lay_f32", raw=raw, out=tiles, n=n, k=k, count=count, sb=n * k * 4, sn=k * 4, sk=4,
               ob=size)  # fmt: skip
        y, z = np.zeros((count, m, n), np.float32), np.zeros((n, 4, 2), np.float32)
        kernel("matmul_each_f32", w=tiles, x=x, y=y, n=n, k=k, m=m, xs=k * 4, ys=n * 4, add=0,
               adds=0, count=count, ws=size, group=1, xb=m * k * 4)  # fmt: skip
        kernel("convolve_f32", w=tiles, x=x, y=z, n=n, k=k, images=1, m=8, across=2, i=2, h=3,
               width=3, xn=0, xr=40, xc=8, si=120, sh=40, sw=4)  # fmt: skip
        found.append((y, z))
    right = np.einsum("bmk,bnk->bmn", x.astype(np.float64), raw)
    assert np.abs(found[0][0] - right).max() < 1e-4
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_attention_without_a_mask_with_a_cap_and_of_odd_heads() -> None:
    for dim, capped in ((64, 0.0), (64, 20.0), (10, 20.0)):
        shapes = {"q": (3, 4, dim), "k": (150, 2, dim), "v": (150, 2, dim)}
        q, k, v = (input(n, s) for n, s in shapes.items())
        y = ops.flash_attn(q, k, v, scale=dim**-0.5, softcap=capped)
        agrees(y, 2e-5, **{n: normal(*s) * 3 for n, s in shapes.items()})


def test_what_has_no_kernel_is_told_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    x = input("x", (3, 64))
    graph = Graph.of({"y": ops.cast(ops.cast(x, "q4_0"), "f32")})
    session = Session({"cpu": open_backend("cpu", threads=1)})
    for key in ("first", "again"):
        plan = session.prepare(key, graph).plan
    assert [r.getMessage().count("cast (2 times") for r in caplog.records] == [1]
    assert any("without a kernel, in NumPy: cast (2 times" in entry for entry in plan.log)
    session.close()
    strict = Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True))
    with pytest.raises(PlaceError, match=r"strict, and without a kernel: .*= cast\(%x\)"):
        strict.prepare("k", graph)
    strict.close()


def test_a_trace_is_what_the_reference_says() -> None:
    x = input("x", (4, 6))
    found = trace(ops.norm(x))
    assert [s.op for s in found.steps].count("mean") == 2
    assert all(s.shape in ((4, 6), (4, 1), ()) for s in found.steps)
    planned = plan_nests(ops.norm(x))
    assert planned is not None and len(planned.result) == 1
    nest = planned.result[0].nest
    assert (nest.kept, nest.reduced, nest.along, nest.whole) == (1, 1, "reduced", True)
