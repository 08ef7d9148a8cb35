"""Splits: copies once per device, views over copies, longest runs, lost writes refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, E, T, linear, tiny

from ggraph import ops
from ggraph.dtype import I32
from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.place import place
from ggraph.plan import Placed, Placement, Splits
from ggraph.split import split
from ggraph.tensor import Tensor, input, state

GRAPH = tiny()


def by_layers(devices: int = 2) -> Splits:
    return split(place(GRAPH, [SIM0, SIM1, CPU], layers={"sim0": 1, "sim1": devices - 1}))


def check(s: Splits) -> None:
    """What every split list must satisfy."""
    graph, of = s.placement.graph, s.placement.of
    seen: set[str] = set()
    for t in graph:
        assert all(x.name in seen for x in t.sources), f"{t} comes before a source"
        seen.add(t.name)
        if not t.is_leaf and t.op != "copy":
            assert all(of[x.root.name].device == of[t.root.name].device for x in t.sources), t
    listed = [n for one in s.splits for n in (*one.copies_in, *one.nodes)]
    assert sorted(listed) == sorted(t.name for t in graph.nodes)
    for one in s.splits:
        assert {of[n].device for n in one.nodes} == {one.device}
    assert all(a.device != b.device for a, b in zip(s.splits, s.splits[1:], strict=False))


def test_one_device_keeps_the_graphs_order() -> None:
    s = split(place(GRAPH, [CPU]))
    assert s.placement.graph is not None
    assert [t.name for t in s.placement.graph] == [t.name for t in GRAPH]
    assert [x.nodes for x in s.splits] == [tuple(t.name for t in GRAPH.nodes)]


def test_a_layer_split_has_one_run_per_device_and_copies_once() -> None:
    s = by_layers()
    check(s)
    assert [x.device for x in s.splits] == ["sim0", "sim1"]
    assert s.splits[1].copies_in == ("blk.0.out@sim1", "slots@sim1")
    assert s.placement.graph["blk.0.out@sim1"].attrs["device"] == "sim1"
    assert s.placement.of["blk.0.out@sim1"].cause == "copy from sim0"


def test_runs_are_lengthened_over_the_graph_not_the_list() -> None:
    """a0 b0 a1 b1 on two devices, listed alternately, are two runs, not four."""
    x = input("x", (T, E))
    a, b = x, x
    for i in range(3):
        a, b = linear(a, f"a{i}"), linear(b, f"b{i}")
    g = Graph.of({"y": ops.add(a, b)})
    s = split(place(g, [SIM0, SIM1, CPU], [r"^a\d\.=sim0", r"^b\d\.=sim1", "y=sim1"]))
    check(s)
    assert [x.device for x in s.splits] == ["sim0", "sim1"]


def test_a_strided_view_is_taken_again_over_a_copy_of_what_it_views() -> None:
    x = linear(input("x", (T, E)), "a")
    g = Graph.of({"y": ops.mul_mat(x.T, linear(x, "b").T)})
    s = split(place(g, [SIM0, SIM1, CPU], ["^a=sim0", "^b=sim1", "^y=sim1"]))
    check(s)
    copies = [t.name for t in s.placement.graph if t.op == "copy"]
    assert copies == ["x@sim0", "a@sim1"], "the view a.T is rebuilt over the copy of a"


def test_weights_are_copied_just_before_their_reader() -> None:
    fast = replace(SIM0, offload_rows=1)
    s = split(place(GRAPH, [fast, CPU], layers={"cpu": 2}))
    check(s)
    names = [t.name for t in s.placement.graph.nodes]
    for i, n in enumerate(names):
        if n.endswith(".weight@sim0"):
            assert n in [x.name for x in s.placement.graph[names[i + 1]].sources], n


def test_a_copy_of_old_bytes_comes_before_what_overwrites_them() -> None:
    old, rows, ids = state("s", (T, E)), input("r", (T, E)), input("i", (T,), I32)
    before = ops.scale(old, 2.0, name="before")
    g = Graph.of({"b": before, "new": ops.set_rows(old, rows, ids)})
    s = split(place(g, [SIM0, SIM1, CPU], ["^s$=sim0", "^b$=sim1"]))
    check(s)
    names = [t.name for t in s.placement.graph.nodes]
    assert names.index("s@sim1") < names.index("new")


def test_a_lost_write_cannot_happen() -> None:
    placed = place(GRAPH, [SIM0, SIM1, CPU])
    moved = Placement(GRAPH, placed.devices, {**placed.of, "blk.0.cached": Placed("sim1", "test")})
    with pytest.raises(
        PlaceError, match=r"blk.0.cached.* runs on sim1 but overwrites %cache.0 on sim0"
    ):
        split(moved)


def test_a_graph_with_copies_of_its_own_is_refused() -> None:
    g = Graph.of({"y": ops.copy(input("x", (T, E)), "sim1")})
    with pytest.raises(PlaceError, match=r"%y: .* planning makes the copies"):
        split(place(g, [SIM0, SIM1, CPU]))


def random_graph(draw: st.DrawFn, size: int) -> Graph:
    """A random DAG of adds and products over an input."""
    made: list[Tensor] = [input("x", (T, E))]
    for i in range(size):
        a, b = (made[draw(st.integers(0, len(made) - 1))] for _ in range(2))
        made.append(linear(a, f"n{i}") if draw(st.booleans()) else ops.add(a, b, name=f"n{i}"))
    return Graph.of(made[-3:])


@given(st.data())
def test_any_placement_splits_well(data: st.DataObject) -> None:
    graph = random_graph(data.draw, data.draw(st.integers(3, 20)))
    devices = ["sim0", "sim1", "cpu"]
    pins = [
        f"^{t.name.replace('.', '[.]')}$={data.draw(st.sampled_from(devices))}" for t in graph.nodes
    ]
    check(split(place(graph, [SIM0, SIM1, CPU], pins)))
