"""Order: the list of one stream, streams per branch, fewest events, host steps, replacement."""

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest
from graph_kit import random_graph
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, C, E, T, linear, no_reuse, schedule_of, tiny

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import F32, I32
from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.ops.copies import copy
from ggraph.order import critical_path, speedup
from ggraph.order.streams import copied_bytes
from ggraph.plan import HOST_ACTOR, Access, Certificate, Command, Do, Schedule
from ggraph.tensor import Kind, input, state, weight
from ggraph.verify import examine
from ggraph.verify.clocks import clocks

GRAPH = tiny()


def doing(s: Schedule, *kinds: Do) -> list[str]:
    return [c.label for c in s if c.do in kinds]


def test_one_stream_of_the_cpu_is_the_graphs_own_list() -> None:
    s = schedule_of(GRAPH, [CPU])
    assert [c.label for c in s] == [
        *(f"write:{t.name}" for t in GRAPH.leaves(Kind.INPUT)),
        *(t.name for t in GRAPH.nodes),
        "end of run",
        "read:y",
    ]


def test_a_device_with_its_own_memory_is_fed_through_staging() -> None:
    s = schedule_of(GRAPH, [SIM0])
    assert doing(s, Do.COPY) == ["copy:x", "copy:slots", "copy:y@host"]
    assert [c.do for c in s.commands[:3]] == [Do.HOST_WRITE, Do.HOST_WRITE, Do.COPY]
    write, copy = s.commands[0], s.commands[2]
    assert write.writes == copy.reads == (Access("x@host", 0, T * E * 4),)
    assert copy.writes == (Access("x", 0, T * E * 4),)
    assert s.values["x@host"].device == "host"
    assert s.commands[-1].reads == (Access("y@host", 0, T * E * 4),)


def test_accesses_are_complete() -> None:
    s = schedule_of(GRAPH, [CPU])
    of = {c.label: c for c in s}
    assert set(of["blk.0.q"].reads) == {
        Access("blk.0.q.weight", 0, E * E * 4),
        Access("blk.0.norm", 0, T * E * 4),
    }
    whole = C * E * 4
    assert Access("cache.0", 0, whole) in of["blk.0.cached"].reads
    assert of["blk.0.cached"].writes == (Access("blk.0.cached", 0, whole),)
    assert s.values["blk.0.cached"].same_as == "cache.0"
    seen = [a for c in s for a in c.reads if a.value == "blk.0.cached"]
    assert seen == [Access("blk.0.cached", 0, T * E * 4)], "a view reads its rows only"


def test_states_are_carried_and_kept() -> None:
    s = schedule_of(GRAPH, [CPU])
    assert s.carried == {"cache.0": "blk.0.cached", "cache.1": "blk.1.cached"}
    assert s.values["blk.0.cached"].kept and not s.values["cache.0"].kept
    assert s.values["cache.0"].external and s.values["cache.0"].initial


def test_three_branches_get_three_streams() -> None:
    s = schedule_of(GRAPH, [SIM0], streams=4)
    of = {c.label: c.actor.stream for c in s if c.do is Do.LAUNCH}
    assert len({of["blk.0.q"], of["blk.0.k"], of["blk.0.v"]}) == 3
    assert of["blk.0.k"] == of["blk.0.cached"], "a chain stays on its stream"
    assert speedup(s) > 1.1
    seconds, chain = critical_path(s)
    assert seconds <= sum(c.seconds for c in s) and chain[0].label == "copy:x"


def needed_edges(s: Schedule) -> "nx.DiGraph[int]":
    """Commands that move bytes; edges: producer to reader, reader to overwriter, stream order."""
    g: nx.DiGraph[int] = nx.DiGraph()
    producer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    last: dict[object, int] = {}
    for i, c in enumerate(s):
        if c.do not in (Do.LAUNCH, Do.COPY):
            continue
        g.add_node(i)
        before = [producer[a.value] for a in c.reads if a.value in producer]
        before += [last[c.actor]] if c.actor in last else []
        for a in c.reads:
            readers.setdefault(a.value, []).append(i)
        for a in c.writes:
            producer[a.value] = i
            old = s.values[a.value].same_as
            before += [r for r in readers.get(old or "", []) if r != i]
        last[c.actor] = i
        g.add_edges_from((b, i) for b in before)
    return g


@given(st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_events_are_the_transitive_reduction_of_what_is_needed(
    streams: int, layers: int, peer: bool
) -> None:
    graph = tiny(layers)
    devices = [SIM0, SIM1] if peer else [SIM0]
    split_at = {"sim0": 1, "sim1": layers - 1} if peer else None
    assert_fewest_events(schedule_of(graph, devices, layers=split_at, streams=streams))


@given(st.randoms(use_true_random=False), st.integers(0, 2))
def test_events_are_as_few_on_whatever_streams_a_random_graph_lies(
    r: random.Random, copy_streams: int
) -> None:
    graph = random_graph(r)
    lanes = {t.name: r.randrange(4) for t in graph.nodes}
    device = sim_spec("sim0", streams=4, copy_streams=copy_streams)
    assert_fewest_events(schedule_of(graph, [device], streams=4, on_stream=lanes))


def assert_fewest_events(s: Schedule) -> None:
    needed = nx.transitive_reduction(needed_edges(s))
    crossing = [e for e in needed.edges if s.commands[e[0]].actor != s.commands[e[1]].actor]
    assert len(doing(s, Do.WAIT)) == len(crossing)
    assert len(doing(s, Do.RECORD)) == len({a for a, _ in crossing})
    assert nx.is_directed_acyclic_graph(s.to_networkx())


def test_forced_sync_cuts_a_split_and_makes_the_host_wait() -> None:
    s = schedule_of(GRAPH, [SIM0], streams=2, forced_sync=["blk.0.v", "blk.0.norm"])
    assert [x.nodes[0] for x in s.splits.splits] == ["blk.0.norm", "blk.0.v"]
    syncs = [c for c in s if c.do is Do.HOST_SYNC]
    assert {c.waits_for.device for c in syncs if c.waits_for} == {"sim0"}
    forced = [c.label for c in syncs if c.label.startswith("forced:")]
    last = [x.nodes[-1] for x in s.splits.splits]
    assert list(dict.fromkeys(forced)) == [f"forced:{name}" for name in last]


def test_a_cut_split_keeps_its_copies_apart_from_its_nodes() -> None:
    s = schedule_of(GRAPH, [SIM0, CPU], ["^head=cpu"], forced_sync=["y"])
    plain = schedule_of(GRAPH, [SIM0, CPU], ["^head=cpu"])
    for field in ("copies_in", "nodes"):
        here, there = ([n for x in p.splits.splits for n in getattr(x, field)] for p in (s, plain))
        assert here == there and here


def test_the_host_waits_where_the_cpu_needs_a_device() -> None:
    s = schedule_of(GRAPH, [SIM0, CPU], ["^head=cpu"])
    assert not [c for c in s if c.do is Do.WAIT and c.actor.device == "cpu"]
    sync = next(i for i, c in enumerate(s) if c.do is Do.HOST_SYNC)
    assert s.commands[sync].event == "after:copy:blk.1.out@cpu"
    assert s.commands[sync + 1].label == "y"


def test_a_value_comes_to_the_host_once_for_all_devices_and_the_reader() -> None:
    apart = [sim_spec(f"sim{i}", peer_bytes_per_s=0.0) for i in range(3)]
    x = input("x", (4, 8))
    a = ops.tanh(x, name="a")
    graph = Graph.of([a, ops.tanh(a, name="b"), ops.tanh(a, name="c")])
    s = schedule_of(graph, apart, ("x=sim2", "a=sim0", "b=sim1", "c=sim2"))
    onto_host = [w.value for c in s for w in c.writes if s.values[w.value].device == "host"]
    assert sorted(onto_host) == ["a@host", "b@host", "c@host", "x@host"]
    (up,) = [c for c in s if c.label == "copy:x@sim0"]
    assert up.reads == (Access("x@host", 0, 128),), "an input need not come back from a device"
    assert isinstance(examine(no_reuse(s)), Certificate)


def test_inputs_rotate_and_runs_overlap() -> None:
    s = schedule_of(GRAPH, [SIM0], n_copies=2, overlap=True)
    assert s.values["x"].slots == s.values["x@host"].slots == 2
    assert s.values["blk.0.q"].slots == s.values["y@host"].slots == 1
    assert "end of run" not in [c.label for c in s]
    assert [c.do for c in s if c.actor != HOST_ACTOR][-1] is Do.RECORD


def shares(s: Schedule, c: Command, d: Command) -> bool:
    """Whether `c` writes to what `d` touches."""

    def first(name: str) -> str:
        over = s.values[name].same_as
        return name if over is None else first(over)

    touched = {first(x.value) for x in (*d.reads, *d.writes)}
    return any(first(x.value) in touched for x in c.writes)


@pytest.mark.parametrize("n_copies", [1, 2, 3])
def test_the_host_waits_for_the_run_before_as_late_as_its_slots_allow(n_copies: int) -> None:
    """With one slot before it writes the inputs anew, with more behind all that it enqueues."""
    s = schedule_of(GRAPH, [SIM0], n_copies=n_copies, overlap=True)
    ends = {c.event for c in s if str(c.event).startswith("end:")}
    here = [i for i, c in enumerate(s) if c.do is Do.HOST_SYNC and c.event in ends]
    writes = [i for i, c in enumerate(s) if c.do is Do.HOST_WRITE]
    assert len(here) == len(ends) > 0
    if n_copies == 1:
        assert max(here) < min(writes)
    else:
        rest = [c.do for c in s.commands[min(here) :]]
        assert rest == [Do.HOST_SYNC] * len(ends) + [Do.RECORD] * len(ends)
    assert isinstance(examine(no_reuse(s)), Certificate)


def test_streams_of_overlapping_runs_wait_once_for_each_other_s_end() -> None:
    """Before their first command, but for copies of inputs that rotate; of another device's streams
    for those that touch what a stream of theirs touches, and one of the two writes it."""
    a, b = sim_spec("sim0"), sim_spec("sim1")
    s = schedule_of(GRAPH, [a, b], layers={"sim0": 1, "sim1": 1}, n_copies=2, overlap=True)
    busy = {c.actor for c in s if c.do in (Do.LAUNCH, Do.COPY)}
    waits = [(c.actor, c.event) for c in s if c.do is Do.WAIT and str(c.event).startswith("end:")]
    feeds = {f"copy:{t.name}" for t in GRAPH.leaves(Kind.INPUT)}
    late = {c.actor for c in s if c.do in (Do.LAUNCH, Do.COPY) and c.label not in feeds}
    pairs = [(c, d) for c in s if c.actor in busy for d in s if d.actor in busy]
    meet = {(c.actor.device, d.actor) for c, d in pairs if shares(s, c, d) or shares(s, d, c)}
    own = {(a.device, b) for a in busy for b in busy if a.device == b.device}
    wanted = {(a, f"end:{b}") for a in late for b in busy - {a} if (a.device, b) in meet | own}
    assert len(waits) == len(set(waits)) < len(late) * (len(busy) - 1)
    assert set(waits) == wanted
    for actor in late:
        mine = [c for c in s if c.actor == actor]
        begin = next(i for i, c in enumerate(mine) if (actor, c.event) in waits)
        assert {c.label for c in mine[:begin] if c.do is not Do.RECORD} <= feeds
        count = sum(a == actor for a, _ in waits)
        assert all(c.do is Do.WAIT for c in mine[begin : begin + count])


@pytest.mark.parametrize("reads", [False, True])
def test_a_device_goes_on_while_one_that_it_does_not_meet_is_behind(reads: bool) -> None:
    """The first waits until what it made is copied, not until the second has put that into its
    state: only where it reads that state, too."""
    x, at, held = input("x", (1, E)), input("at", (1,), I32), state("held", (C, E))
    y = ops.tanh(x) + held[:1] if reads else ops.tanh(x)
    kept = ops.set_rows(held, ops.sigmoid(y), at).named("kept")
    graph = Graph.of({"y": y}, also=[kept])
    pins = ("kept|held|at|sigmoid.*=sim1", "y|x|tanh.*=sim0")
    s = schedule_of(graph, [SIM0, SIM1], pins, n_copies=2, overlap=True)
    assert isinstance(examine(no_reuse(s)), Certificate)
    n, place = len(s.commands), {c.label: i for i, c in enumerate(s)}
    known = clocks(s.commands, 2)
    assert known.ordered(place["kept"], n + place["y"]) == reads


def test_what_outlives_a_run_is_kept() -> None:
    s = schedule_of(GRAPH, [CPU])
    weights = {t.name for t in GRAPH.leaves(Kind.WEIGHT)}
    assert {v.name for v in s.values.values() if v.kept} == weights | set(s.carried.values())


def test_the_third_weight_that_is_copied_waits_for_the_readers_of_the_first() -> None:
    h = input("x", (T, E))
    for i in range(4):
        h = ops.mul_mat(weight(f"w{i}", (E, E)), h, name=f"m{i}")
    s = schedule_of(Graph.of([h]), [SIM0, CPU], ("m[0-3]=sim0", "w[0-3]=cpu"))
    of = {c.label: i for i, c in enumerate(s.commands)}
    edges = s.to_networkx()
    for i in range(4):
        for j in range(4):
            before = nx.has_path(edges, of[f"m{i}"], of[f"copy:w{j}@sim0"])
            assert before == (j >= i + 2), (i, j)


def test_the_critical_path_is_the_longest_sum() -> None:
    x = input("x", (16, 64))
    s = schedule_of(Graph.of([ops.exp(ops.tanh(x, name="a"), name="b")]), [CPU])
    took = {c.label: c.seconds for c in s}
    seconds, chain = critical_path(s)
    assert [c.label for c in chain] == ["a", "b"]
    assert seconds == pytest.approx(took["a"] + took["b"]) and speedup(s) == pytest.approx(1)
    nothing = replace(s, commands=())
    assert critical_path(nothing) == (0.0, ()) and speedup(nothing) == 1


def test_estimates_are_the_slower_of_arithmetic_and_memory_and_a_fixed_cost() -> None:
    spec = DeviceSpec("d", "sim", flops_per_s=1e6, bytes_per_s=1e6, launch_s=0.5)
    x, w = input("x", (16, 64)), weight("w", (32, 64))
    s = schedule_of(Graph.of([ops.mul_mat(w, x, name="m"), ops.tanh(x, name="t")]), [spec])
    took = {c.label: c.seconds for c in s}
    assert took["m"] == pytest.approx(0.5 + 2 * 16 * 32 * 64 / 1e6)
    assert took["t"] == pytest.approx(0.5 + 2 * 16 * 64 * 4 / 1e6)


@pytest.mark.parametrize(
    ("peer", "seconds"), [(4e3, [0.5 + 128 / 2e3]), (0.0, [0.25 + 128 / 8e3, 0.5 + 128 / 1e3])]
)
def test_estimates_of_copies_go_by_the_slower_end_of_the_way(
    peer: float, seconds: list[float]
) -> None:
    """Between peers at the slower one's rate; through the host down one link and up the other."""
    one = sim_spec("sim0", peer_bytes_per_s=peer, link_bytes_per_s=8e3, launch_s=0.25)
    two = sim_spec("sim1", peer_bytes_per_s=peer and 2e3, link_bytes_per_s=1e3, launch_s=0.5)
    a = ops.tanh(input("x", (4, 8)), name="a")
    s = schedule_of(Graph.of([ops.tanh(a, name="b")]), [one, two], ("a=sim0", "b=sim1"))
    moved = [c for c in s if c.label in ("copy:a@host", "copy:a@sim1")]
    assert [c.seconds for c in moved] == pytest.approx(seconds)
    assert [c.actor.device for c in moved] == ["sim0", "sim1"][-len(seconds) :]


@pytest.mark.parametrize("rates", [(4e3, 0.0), (0.0, 4e3)])
def test_a_device_that_reaches_no_other_is_nobodys_peer(rates: tuple[float, float]) -> None:
    one, two = (sim_spec(f"sim{i}", peer_bytes_per_s=rate) for i, rate in enumerate(rates))
    a = ops.tanh(input("x", (4, 8)), name="a")
    s = schedule_of(Graph.of([ops.tanh(a, name="b")]), [one, two], ("a=sim0", "b=sim1"))
    assert "copy:a@host" in doing(s, Do.COPY)


def test_estimates_of_copies_from_and_to_the_host_and_the_cpu() -> None:
    """128 bytes: what they take on the link and once to begin, whoever the host's end is. Copies
    out go by the stream for that."""
    far = sim_spec("sim0", link_bytes_per_s=8e3, launch_s=0.25, copy_streams=2)
    a = ops.tanh(input("x", (4, 8)), name="a")
    graph = Graph.of({"y": ops.tanh(ops.tanh(a, name="b"), name="y")})
    took = {"copy:x@sim0": 0, "copy:a@cpu": 1, "copy:b@sim0": 0, "copy:y@host": 1}
    alone = {"copy:x": 0, "copy:y@host": 1}
    for devices, expected in (([far, CPU], took), ([far], alone)):
        s = schedule_of(graph, devices, ("a=sim0", "b=cpu", "y=sim0") if devices[1:] else ())
        copies = {c.label: c for c in s if c.do is Do.COPY}
        assert {n: c.actor.stream - far.streams for n, c in copies.items()} == expected
        assert [c.seconds for c in copies.values()] == pytest.approx([0.266] * len(copies))


@pytest.mark.parametrize(("copy_streams", "onto", "away"), [(0, 0, 0), (1, 3, 3), (2, 3, 4)])
def test_copies_go_by_the_device_s_copy_streams(copy_streams: int, onto: int, away: int) -> None:
    """In, out; one for both; without any, on the first compute stream."""
    ends = [
        sim_spec(f"sim{i}", streams=3, copy_streams=copy_streams, peer_bytes_per_s=0.0)
        for i in range(2)
    ]
    a = ops.tanh(input("x", (4, 8)), name="a")
    s = schedule_of(Graph.of([ops.tanh(a, name="b")]), ends, ("a=sim0", "b=sim1"))
    assert {c.label.removeprefix("copy:"): str(c.actor) for c in s if c.do is Do.COPY} == {
        "x": f"sim0.{onto}",
        "a@host": f"sim0.{away}",
        "a@sim1": f"sim1.{onto}",
        "b@host": f"sim1.{away}",
    }


def test_what_overwrites_waits_for_those_who_read_before() -> None:
    old, rows, at = state("s", (C, E)), input("r", (T, E)), input("i", (T,), I32)
    seen = ops.tanh(old, name="seen")
    new = ops.set_rows(old, rows, at, name="new")
    graph = Graph.of([seen, new])
    s = schedule_of(graph, [SIM0], streams=2, on_stream={"seen": 0, "new": 1})
    of = {c.label: i for i, c in enumerate(s.commands)}
    assert nx.has_path(s.to_networkx(), of["seen"], of["new"])
    assert isinstance(examine(no_reuse(s)), Certificate)


def test_an_op_that_overwrites_reads_only_its_part_of_other_values() -> None:
    wide = ops.tanh(input("x", (2 * T, E)), name="wide")
    part = ops.rows(wide, T, T, name="part")
    new = ops.set_rows(state("s", (C, E)), part, input("i", (T,), I32), name="new")
    (launch,) = [c for c in schedule_of(Graph.of([new]), [CPU]) if c.label == "new"]
    read = {a.value: (a.start, a.stop) for a in launch.reads}
    assert read == {"s": (0, C * E * 4), "wide": (T * E * 4, 2 * T * E * 4), "i": (0, T * 4)}


def test_a_wait_for_a_stream_s_first_command_is_kept_beside_another() -> None:
    x = input("x", (4, 8))
    a, b = ops.tanh(x, name="a"), ops.sigmoid(x, name="b")
    lanes = {"a": 0, "b": 1, "c": 2}
    s = schedule_of(Graph.of([ops.add(a, b, name="c")]), [SIM0], streams=3, on_stream=lanes)
    assert [c.event for c in s if c.do is Do.WAIT and c.actor.stream == 2] == ["after:a", "after:b"]


def test_a_partial_copy_is_priced_by_the_slices_that_chance_would_name() -> None:
    """The mean over all choices of 3 indices among 4 slices."""
    w, ids = weight("w", (4, E)), input("ids", (3,), I32)
    named = [len(set(choice)) for choice in itertools.product(range(4), repeat=3)]
    mean = sum(named) / len(named) * E * 4
    assert copied_bytes(copy(w, "sim0", used=ids)) == round(mean) < w.nbytes
    assert copied_bytes(copy(w, "sim0")) == w.nbytes


def test_only_inputs_and_their_copies_rotate() -> None:
    x = input("x", (T, E))
    m = ops.mul_mat(weight("w", (E, E)), x, name="m")
    graph = Graph.of([ops.add(m, x, name="y")])
    s = schedule_of(graph, [SIM0, CPU], ("m=sim0", "w=cpu", "y=cpu"), n_copies=2, overlap=True)
    slots = {name: v.slots for name, v in s.values.items()}
    assert slots == {"x": 2, "x@sim0": 2, "w": 1, "w@sim0": 1, "m": 1, "m@cpu": 1, "y": 1}


def test_one_stream_and_one_slot_are_used_unless_more_are_asked_for() -> None:
    x = input("x", (T, E))
    s = schedule_of(Graph.of([linear(x, "a"), linear(x, "b")]), [SIM0])
    assert {c.actor.stream for c in s if c.do is Do.LAUNCH} == {0}
    assert {v.slots for v in s.values.values()} == {1}


def test_a_graph_without_nodes_is_written_and_read() -> None:
    s = schedule_of(Graph.of({"y": input("x", (T, E))}), [CPU])
    assert [c.do for c in s] == [Do.HOST_WRITE, Do.HOST_SYNC, Do.HOST_READ]


def test_what_has_no_bytes_is_not_read() -> None:
    new = ops.set_rows(state("s", (C, E)), input("r", (0, E)), input("i", (0,), I32), name="new")
    (launch,) = [c for c in schedule_of(Graph.of([new]), [CPU]) if c.label == "new"]
    assert launch.reads == (Access("s", 0, C * E * 4),)


def test_indices_that_choose_slices_are_looked_at_once() -> None:
    far = sim_spec("sim0", link_bytes_per_s=1e3, launch_s=1e-6)
    x, ids = input("x", (T, 1, E)), ops.cast(input("i", (T, 1), F32), I32, name="ids")
    made = [ops.mul_mat_id(weight(f"w{i}", (64, E, E)), x, ids, name=f"m{i}") for i in range(2)]
    s = schedule_of(Graph.of(made), [far, CPU], (r"^w\d=cpu", "^(m|ids)=sim0"))
    assert doing(s, Do.HOST_READ)[0] == "look:ids"
    assert len([c for c in s if c.chosen_by == "ids"]) == 2
    assert (
        [c.label for c in s].count("look:ids") == [c.label for c in s].count("copy:ids@host") == 1
    )


@given(st.randoms(use_true_random=False))
def test_a_result_may_replace_only_what_it_reads_whole_and_as_large(r: random.Random) -> None:
    s = schedule_of(random_graph(r), [CPU])
    reads = {c.node: c.reads for c in s if c.do is Do.LAUNCH}
    for v in (v for v in s.values.values() if v.nbytes):
        for old in v.may_replace:
            assert Access(old, 0, v.nbytes) in reads[v.name] and s.values[old].nbytes == v.nbytes


def may_replace(name: str, graph: Graph) -> tuple[str, ...]:
    return schedule_of(graph, [CPU]).values[name].may_replace


def test_in_place_looks_through_views_of_the_whole() -> None:
    h = linear(input("h", (T, E)), "m")
    g = Graph.of({"y": ops.scale(ops.rms_norm(h.reshape(E, T), eps=1e-5, name="n"), 2.0)})
    assert may_replace("n", g) == ("m",), "facts A17: ggml never takes a view's root"
    assert may_replace("y", g) == ("n",)


def test_in_place_spares_what_others_want() -> None:
    h = linear(input("h", (T, E)), "m")
    part = ops.rows(h, 0, 1, name="part")
    g = Graph.of({"m": h, "p": ops.scale(part, 2.0, name="p"), "s": ops.scale(h, 3.0)})
    assert may_replace("p", g) == () and may_replace("s", g) == ()
    square = linear(input("q", (E, E)), "square")
    moved = Graph.of({"t": ops.add(square, square.T)})
    assert may_replace("t", moved) == (), "the transposed source would see its bytes change"
    both = linear(input("b", (E, E)), "both")
    other = linear(input("o", (E, E)), "other")
    twice = ops.mul_mat_add(both, both, both, name="product")
    assert may_replace("product", Graph.of({"y": ops.add(twice, other)})) == ()
    same = ops.add(both, both, name="same")
    assert may_replace("same", Graph.of({"y": ops.add(same, other)})) == ("both",)
    beside = ops.add(linear(input("l", (T, E)), "wide"), weight("bias", (E,)), name="beside")
    assert may_replace("beside", Graph.of({"y": ops.scale(beside, 2.0)})) == ("wide",)
    row = linear(input("r", (1, E)), "row")
    spread = ops.add(linear(input("k", (T, E)), "rows"), row, name="spread")
    assert may_replace("spread", Graph.of({"y": ops.scale(spread, 2.0)})) == ("rows",)
    made = linear(input("v", (T, E)), "made")
    shown = made.reshape(E, T)
    of_shown = ops.scale(shown, 2.0, name="of")
    for kept in (made, shown):  # the value that a view shows, or the view, is a result
        assert may_replace("of", Graph.of([kept, ops.scale(of_shown, 2.0)])) == ()
    cache = Graph.of({"c": ops.scale(state("cache", (T, E)), 2.0)})
    assert may_replace("c", cache) == ()


def test_an_output_that_is_overwritten_is_refused() -> None:
    old = state("s", (T, E))
    new = ops.set_rows(old, input("r", (T, E)), input("i", (T,), I32), name="new")
    with pytest.raises(PlanError, match="output %s is overwritten by %new"):
        schedule_of(Graph.of([old, new]), [CPU])


def test_the_same_graph_gives_the_same_text() -> None:
    one, two = (no_reuse(schedule_of(tiny(), [SIM0, SIM1, CPU], streams=4)) for _ in range(2))
    assert [str(c) for c in one.schedule] == [str(c) for c in two.schedule]


def test_chosen_streams_are_kept_and_ordered() -> None:
    s = schedule_of(GRAPH, [SIM0], streams=4, on_stream={"blk.0.q": 3})
    (launch,) = [c for c in s if c.label == "blk.0.q"]
    assert launch.actor.stream == 3
    assert isinstance(examine(no_reuse(s)), Certificate)


@pytest.mark.parametrize("options", [{"on_stream": {"nobody": 0}}, {"forced_sync": ["nobody"]}])
def test_unknown_nodes_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="no node nobody"):
        schedule_of(GRAPH, [SIM0], **options)


def test_streams_that_a_device_lacks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"blk\.0\.q on stream 4: sim0 has 4"):
        schedule_of(GRAPH, [SIM0], on_stream={"blk.0.q": 4})
    with pytest.raises(PlanError, match="expected at least one stream, got 0"):
        schedule_of(GRAPH, [SIM0], streams=0)
