"""Graphs and schedules as ggml node lists: the two ways to list a graph give the same offsets."""

from dataclasses import replace

import pytest
from alloc_kit import act, schedule

from ggraph import ops
from ggraph.alloc import allocate
from ggraph.alloc.dyn import DynAllocator
from ggraph.alloc.ggml import Node, NodeList, plan_list
from ggraph.alloc.listing import buffer_order, ggml_op, layout, list_schedule
from ggraph.device import DeviceSpec
from ggraph.dtype import I32, I64
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import HOST_ACTOR, Actor, Command, Do, MemoryMap, Schedule, Value
from ggraph.split import split
from ggraph.tensor import Kind, Tensor, input, state, weight

CPU = DeviceSpec("cpu", "cpu", alignment=32, host_visible=True)


def norm(x: Tensor, name: str) -> Tensor:
    return ops.mul(ops.rms_norm(x, eps=1e-6, name=f"{name}_rms"), weight(f"{name}_w", (64,)))


def two_norms() -> Graph:
    """G3 in the DSL."""
    x = input("x", (4, 64))
    return Graph.of({"out": norm(x, "a") + norm(x, "b")})


def heads() -> Graph:
    """A product seen as heads through a view, normed, scaled and written to a cache."""
    x = input("x", (4, 64))
    cache = state("cache", (16, 64))
    rows = input("rows", (4,), I64)
    k = ops.mul_mat(weight("wk", (64, 64)), norm(x, "n"), name="k")
    k = ops.silu(ops.rms_norm(k.reshape(4, 2, 32), eps=1e-6, name="k_rms"), name="k_act")
    flat = k.reshape(4, 64)
    filled = ops.set_rows(cache, flat, rows, name="filled")
    y = ops.mul_mat(filled, x + flat, name="scores")
    return Graph.of({"out": ops.soft_max(y * 0.5, name="probs")})


def node_of(t: Tensor, at: dict[str, int]) -> Node:
    """The list entry of a graph tensor whose sources stand at the indices `at`."""
    sources = tuple(at[s.name] for s in t.sources)
    return Node(
        name=t.name,
        op=ggml_op(t),
        nbytes=t.nbytes,
        sources=sources,
        view_of=None if t.storage is t else at[t.storage.name],
        layout=layout(t),
        is_input=t.kind is Kind.INPUT,
        is_output=t.is_output,
        external=t.kind in (Kind.WEIGHT, Kind.STATE),
    )


def list_graph(graph: Graph) -> NodeList:
    """`graph` as ggml would build it: leaves first met first, weights and states with data."""
    at: dict[str, int] = {}
    tensors: list[Node] = []
    for t in graph:
        tensors.append(node_of(t, at))
        at[t.name] = len(tensors) - 1
    leafs = tuple(at[t.name] for t in graph if t.is_leaf)
    return NodeList(tuple(tensors), tuple(at[t.name] for t in graph if not t.is_leaf), leafs)


def scheduled(graph: Graph, *devices: DeviceSpec, copies: int = 1) -> Schedule:
    return order(split(place(graph, devices)), n_copies=copies)


@pytest.mark.parametrize("build", [two_norms, heads])
def test_a_graph_and_its_schedule_get_the_same_offsets(build: object) -> None:
    graph: Graph = build()  # type: ignore[operator]
    listing = list_graph(graph)
    buffer = DynAllocator(32)
    spots = zip(listing.tensors, plan_list(listing, [buffer]), strict=True)
    expected = {t.name: s.at.offset for t, s in spots if s.buffer >= 0}
    m = allocate(scheduled(graph, CPU), mode="ggml")
    assert {n: m.regions[n].offset for n in expected} == expected
    assert m.buffers["arena@cpu"].nbytes == buffer.size


def test_g3_in_the_dsl_is_raced_by_ggml_and_not_by_hb() -> None:
    m = allocate(scheduled(two_norms(), CPU), mode="ggml")
    assert m.regions["b_rms"].offset == m.regions["x"].offset == 0
    assert m.causes["b_rms"] == "in place of %x (A16)"
    assert m.arena_bytes == 2048


def test_hb_takes_the_view_parents_that_ggml_leaves() -> None:
    s = scheduled(heads(), CPU)
    ggml, hb = allocate(s, mode="ggml"), allocate(s)
    assert ggml.regions["k_rms"].offset != ggml.regions["k"].offset  # A17
    assert hb.causes["k_rms"] == "in place of %k"
    assert hb.arena_bytes <= ggml.arena_bytes


def test_axes_of_one_row_do_not_keep_a_result_from_the_place_of_its_source() -> None:
    """To ggml [4, 64] and [1, 4, 64] are both ne = 64, 4, 1, 1 with the same strides (A16)."""
    shapes = [(256,), (1, 256), (4, 64), (1, 4, 64), (1, 1, 4, 64), (4, 1, 64)]
    keys = [layout(input("x", shape)) for shape in shapes]
    assert [[a == b for b in keys].count(True) for a in keys] == [2, 2, 3, 3, 3, 1]
    assert layout(input("x", (4, 64))) != layout(ops.columns(input("x", (4, 65)), 0, 64))
    flat = ops.scale(input("x", (4, 64)), 2.0, name="flat")
    deep = ops.scale(input("z", (1, 4, 64)), 2.0, name="deep")  # read twice: it stays
    both = ops.add(deep, flat, name="sum")
    m = allocate(scheduled(Graph.of({"y": ops.mul(both, deep)}), CPU), mode="ggml")
    assert m.regions["sum"].offset == m.regions["flat"].offset


def test_names_of_ops() -> None:
    x = input("x", (4, 64))
    cases = {
        x: "NONE",
        ops.silu(x): "UNARY",
        ops.swiglu(x): "GLU",
        x.reshape(2, 128): "RESHAPE",
        x.T: "TRANSPOSE",
        x + x: "ADD",
        ops.get_rows(x, input("i", (2,), I32)): "GET_ROWS",
    }
    assert {t.op: ggml_op(t) for t in cases} == {t.op: n for t, n in cases.items()}
    odd = ops.silu(x)
    assert odd.spec is not None
    assert ggml_op(replace(odd, spec=replace(odd.spec, ggml=None, name="mystery"))) == "MYSTERY"
    assert ggml_op(replace(odd, view_src=x)) == "VIEW"


def test_copies_between_devices_and_rotating_inputs() -> None:
    far = DeviceSpec("sim0", "sim", alignment=128)
    x = input("x", (4, 64))
    y = ops.mul_mat(weight("blk.0.w", (64, 64)), x, name="y")
    z = ops.mul_mat(weight("blk.1.w", (64, 64)), y, name="z")
    graph = Graph.of({"out": ops.scale(z, 2.0)})
    s = order(split(place(graph, (far, CPU), ["blk.1.*=cpu", "y=sim0"])), n_copies=2)
    m = allocate(s, mode="ggml")
    rotating = [v for v in s.values.values() if v.slots == 2 and not v.external]
    assert rotating
    for v in rotating:
        first, second = m.regions[v.name].offsets
        assert second - first >= v.nbytes
        here = range(first, second + v.nbytes)
        for name, r in m.regions.items():  # never recycled (S8), none of its slots
            if name != v.name and r.buffer == m.regions[v.name].buffer:
                assert all(o >= here.stop or o + r.nbytes <= here.start for o in r.offsets), name
    assert sorted(b.name for b in m.buffers.values() if not b.external) == sorted(
        {m.regions[v.name].buffer for v in s.values.values() if m.regions[v.name].nbytes}
        - {b.name for b in m.buffers.values() if b.external}
    )


def test_s9_the_copies_of_a_split_are_placed_at_its_start() -> None:
    """Offsets and size as ggml 0.3.36 gave them for this graph on two backends: x2, which the last
    node alone reads, stands behind x1 before the first one has its place."""
    x1, x2, w = input("x1", (4, 64)), input("x2", (4, 64)), weight("w", (64, 64))
    a = ops.mul_mat(w, x1, name="a")
    b = ops.mul_mat(w, a, name="b")
    graph = Graph.of({"y": ops.concat([b, x2], axis=0, name="y")})
    far = DeviceSpec("sim0", "sim", alignment=128)
    s = scheduled(graph, far, CPU)
    listing, _ = list_schedule(s, buffer_order(s))
    listed = [listing.tensors[i].name for i in listing.nodes]
    assert listed[:5] == ["x1 (dep)", "x1@sim0", "x2 (dep)", "x2@sim0", "a"]
    assert listed[5:] == ["b", "y", "y (dep)", "y@host"]
    m = allocate(s, mode="ggml")
    got = {n: m.regions[n].offset for n in ("x1@sim0", "x2@sim0", "a", "b", "y")}
    assert got == {"x1@sim0": 0, "x2@sim0": 1024, "a": 2048, "b": 0, "y": 2048}
    assert m.buffers["arena@sim0"].nbytes == 4096


def test_what_a_schedule_without_a_graph_is_listed_as() -> None:
    """Rule by rule: what is told of each value, and what stands in the order of execution."""
    x, scratch = Value("x", "d", 64, slots=2), Value("scratch", "d", 8)
    held, before = Value("held", "d", 32, kept=True), Value("before", "d", 32, initial=True)
    a, b = Value("a", "d", 64), Value("b", "d", 64, same_as="a")
    copied, c, p = Value("b@e", "e", 64, slots=2), Value("c", "e", 64), Value("p", "e", 64)
    devices = [DeviceSpec("d", "sim", alignment=64), DeviceSpec("e", "sim", alignment=128)]
    d, e = Actor("d"), Actor("e")
    s = schedule(
        devices,
        [x, scratch, held, before, a, b, copied, c, p],
        [
            act(Do.HOST_WRITE, HOST_ACTOR, (), [x]),
            act(Do.LAUNCH, d, [x], [a, scratch, held, before]),
            act(Do.LAUNCH, d, [a], [b]),
            act(Do.COPY, e, [b], [copied]),
            act(Do.LAUNCH, e, [copied], []),
            act(Do.LAUNCH, e, [copied], [c]),
            act(Do.LAUNCH, e, [c], [p]),
            act(Do.HOST_READ, HOST_ACTOR, [c]),
        ],
    )
    listing, at = list_schedule(s, buffer_order(s))
    names = [node.name for node in listing.tensors]
    found = {
        node.name: (
            node.nbytes,
            [names[i] for i in node.sources],
            None if node.view_of is None else names[node.view_of],
            "input" * node.is_input + " output" * node.is_output,
            node.buffer,
        )
        for node in listing.tensors
    }
    assert found == {
        "x": (128, [], None, "input output", 0),  # S8
        "a": (64, ["x", "scratch", "held", "before"], None, "", 0),
        "scratch": (8, [], None, "", 0),
        "held": (32, [], None, "input output", 0),
        "before": (32, [], None, "input output", 0),
        "b": (64, ["a"], "a", "", 0),
        "b (dep)": (0, ["b"], "a", "", 0),  # S9, A23: a view of what owns the bytes
        "b@e": (256, [], None, "input output", 1),  # S8
        "c": (64, ["b@e"], None, " output", 1),  # A13
        "p": (64, ["c"], None, "", 1),
    }
    assert [names[i] for i in listing.nodes] == ["a", "b", "b (dep)", "b@e", "c", "p"]
    assert [names[i] for i in listing.leafs] == ["x"]
    assert at == {name: names.index(name) for name in s.values}


def test_scratch_lives_only_while_its_command_runs() -> None:
    x, y, z = (Value(n, "d", 64) for n in "xyz")
    scratch = Value("y#scratch", "d", 256)
    kept = Value("kept", "d", 32, kept=True)
    late = Value("late", "d", 32)
    where = Actor("d")
    s = schedule(
        [DeviceSpec("d", "sim", alignment=32)],
        [x, y, z, scratch, kept, late],
        [
            act(Do.HOST_WRITE, HOST_ACTOR, (), [x]),
            act(Do.LAUNCH, where, [x], [y, scratch]),
            act(Do.LAUNCH, where, [y, late], [z]),
            act(Do.LAUNCH, where, [z], [kept]),
            act(Do.LAUNCH, where, [kept], []),
            act(Do.LAUNCH, where, [z], [kept]),
            Command(Do.RECORD, where, "r", event="e"),
            act(Do.HOST_READ, HOST_ACTOR, [kept]),
        ],
    )
    m: MemoryMap = allocate(s, mode="ggml")
    assert m.regions["z"].offset in range(320)
    assert set(m.regions) == set(s.values)
    taken = range(m.regions["kept"].offset, m.regions["kept"].offset + 32)
    others = [r for n, r in m.regions.items() if n != "kept"]
    assert all(r.offset + r.nbytes <= taken.start or r.offset >= taken.stop for r in others)
