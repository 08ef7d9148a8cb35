"""The DSL's values: naming, ordering, views, overwrites, and what is refused."""

import pytest

import ggraph.ops.elementwise as ops
from ggraph.dtype import F32, Q4_0
from ggraph.errors import GraphError, ShapeError
from ggraph.graph import Graph
from ggraph.tensor import Kind, contiguous, input, leaf


def test_operators_build_ops_and_a_graph_names_them() -> None:
    x = input("x", (2, 3))
    g = Graph.of({"y": (x + x) * 2.0})
    assert [t.name for t in g] == ["x", "add_1", "y"]
    assert g["y"].is_output and not g["add_1"].is_output
    assert repr(g["add_1"]) == "%add_1: f32[2, 3] = add(%x, %x)"
    assert g.to_networkx().number_of_edges("x", "add_1") == 2


def test_strides_are_bytes_and_block_rows_are_whole_blocks() -> None:
    assert contiguous((2, 3, 4), F32) == (48, 16, 4)
    assert contiguous((3, 64), Q4_0) == (36, 18)
    with pytest.raises(ShapeError, match="33 elements"):
        contiguous((3, 33), Q4_0)
    with pytest.raises(ShapeError, match="more than"):
        contiguous((1 << 40, 1 << 40), F32)


def test_duplicate_names_and_nameless_leaves_are_refused() -> None:
    x = input("x", (2,))
    with pytest.raises(GraphError, match="two tensors are called 'x'"):
        Graph.of([ops.add(x, input("x", (2,)))])
    with pytest.raises(GraphError, match="needs a name"):
        leaf(Kind.INPUT, "", (2,), F32)


def test_broadcast_names_the_culprit() -> None:
    with pytest.raises(ShapeError, match=r"\[3\] of %b into \[2\]"):
        ops.add(input("a", (2,)), input("b", (3,)))
