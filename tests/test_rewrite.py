"""Rewrites keep every output's value and make the graph smaller."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ggraph import ops
from ggraph.device import DeviceSpec
from ggraph.dtype import Q4_0
from ggraph.formats.quants import quantize
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.rewrite import drop_identities, merge_duplicates, rewrite
from ggraph.tensor import Kind, Tensor, input, weight


def names(g: Graph) -> list[str]:
    return [t.name for t in g]


def test_equal_results_are_computed_once() -> None:
    x, y = input("x", (4,)), input("y", (4,))
    g = merge_duplicates(Graph.of({"out": ops.mul(x + y, x + y)}))
    assert names(g) == ["x", "y", "add_2", "out"]
    assert g["out"].sources[0] is g["out"].sources[1]


def test_different_attributes_stay_apart() -> None:
    x = input("x", (4,))
    g = Graph.of({"out": ops.scale(x, 2.0) + ops.scale(x, 3.0)})
    assert len(merge_duplicates(g).nodes) == 3


def test_outputs_are_never_merged_away() -> None:
    x = input("x", (4,))
    g = merge_duplicates(Graph.of({"a": x + x, "b": x + x}))
    assert {t.name for t in g.outputs} == {"a", "b"}


def test_a_scale_that_changes_nothing_goes() -> None:
    x = input("x", (4,))
    g = drop_identities(Graph.of({"out": ops.scale(x + x, 1.0) + x}))
    assert [t.op for t in g.nodes] == ["add", "add"]


@given(
    st.lists(st.tuples(st.sampled_from("asm"), st.integers(0, 9), st.integers(0, 9)), max_size=8)
)
def test_rewriting_keeps_the_meaning(steps: list[tuple[str, int, int]]) -> None:
    """Evaluate the graph as a polynomial in x at two points, before and after."""
    x = input("x", (2,))
    made: list[Tensor] = [x]
    for kind, i, j in steps:
        a, b = made[i % len(made)], made[j % len(made)]
        made.append({"a": ops.add, "s": ops.sub, "m": ops.mul}[kind](a, b))
    g = Graph.of({"out": ops.add(made[-1], x)})
    after = drop_identities(merge_duplicates(g))
    for point in (2, 3):
        assert value(g["out"], point) == value(after["out"], point)
    assert len(after.nodes) <= len(g.nodes)


def value(t: Tensor, x: int) -> int:
    if t.is_leaf:
        return x
    a, b = (value(s, x) for s in t.sources)
    return {"add": a + b, "sub": a - b, "mul": a * b}[t.op]


def quantised_block(rows: int = 3) -> Graph:
    """A norm read by two products, a gated unit, and a residual that is read twice."""
    x = input("x", (rows, 64))
    w = [weight(f"w{i}", (64, 64), Q4_0) for i in range(4)]
    h = ops.mul_mat(w[0], x) + x
    n = ops.mul(ops.rms_norm(h, eps=1e-5), weight("scale", (64,)), name="n")
    gate, up = ops.mul_mat(w[1], n, name="gate"), ops.mul_mat(w[2], n, name="up")
    out = h + ops.mul_mat(w[3], ops.swiglu(gate, up, name="act"))
    return Graph.of({"out": out})


EIGHT = frozenset(
    {"rms_norm_mul", "mul_mat_add", "quantise", "rms_norm_quantise", "swiglu_quantise"}
)


def test_rows_become_8_bits_once_for_all_their_products() -> None:
    spec = DeviceSpec("cpu", "cpu", fused=EIGHT)
    graph = rewrite(quantised_block(), [spec])
    assert [t.op for t in graph.nodes] == [
        "quantise", "mul_mat_add", "rms_norm_quantise", "mul_mat", "mul_mat", "swiglu_quantise",
        "mul_mat_add",
    ]  # fmt: skip
    assert graph["gate"].sources[1] is graph["up"].sources[1]
    data = {t.name: np.random.default_rng(3).normal(size=t.shape) for t in graph.leaves(Kind.INPUT)}
    values = {n: v.astype(np.float32) for n, v in data.items()}
    for t in graph.leaves(Kind.WEIGHT):
        numbers = np.random.default_rng(len(t.name)).normal(size=t.shape).astype(np.float32)
        values[t.name] = quantize(numbers, Q4_0) if t.dtype is Q4_0 else numbers
    before, after = (evaluate(g, values)["out"] for g in (quantised_block(), graph))
    assert np.abs(before - after).max() < 2e-2 * np.ptp(before)


def test_what_others_read_keeps_its_32_bits() -> None:
    x = input("x", (3, 64))
    n = ops.mul(ops.rms_norm(x, eps=1e-5), weight("scale", (64,)), name="n")
    wide = ops.mul_mat(weight("f", (8, 64)), n)
    narrow = ops.mul_mat(weight("q", (8, 64), Q4_0), n)
    spec = DeviceSpec("cpu", "cpu", fused=EIGHT)
    graph = rewrite(Graph.of({"a": wide, "b": narrow}), [spec])
    assert sorted(t.op for t in graph.nodes) == ["mul_mat", "mul_mat", "quantise", "rms_norm_mul"]
    assert graph["n.a8"].sources[0] is graph["n"]


def test_one_device_that_knows_no_8_bits_is_enough() -> None:
    both = [DeviceSpec("cpu", "cpu", fused=EIGHT), DeviceSpec("sim0", "sim")]
    ops_left = {t.op for t in rewrite(quantised_block(), both).nodes}
    assert ops_left == {"mul_mat", "add", "rms_norm", "mul", "swiglu"}
