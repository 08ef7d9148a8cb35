"""Rewrites keep every output's value and make the graph smaller."""

from hypothesis import given
from hypothesis import strategies as st

from ggraph import ops
from ggraph.graph import Graph
from ggraph.rewrite import drop_identities, merge_duplicates
from ggraph.tensor import Tensor, input


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
