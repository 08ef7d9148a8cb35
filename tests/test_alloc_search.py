"""Search, bounds, explanations and offers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
from alloc_kit import act, judge, random_schedule, schedule
from hypothesis import given
from hypothesis import strategies as st
from packing_kit import intervals, sound

from ggraph.alloc import (
    allocate,
    fit,
    lower_bounds,
    ordering_offers,
    packing,
    rooms,
    tenants,
)
from ggraph.alloc.arena_blocks import make_blocks
from ggraph.alloc.bounds import antichain_bytes, live_bytes, live_table, lower_bound
from ggraph.alloc.fit import NO_LIMIT, Ints, Packing
from ggraph.alloc.offers import fitting_edges, peak_bytes
from ggraph.alloc.precedence import precedence
from ggraph.alloc.search import anneal as annealing
from ggraph.alloc.search import canon, jit, offline
from ggraph.alloc.search import climb as climbing
from ggraph.alloc.tenants import overlap
from ggraph.device import DeviceSpec
from ggraph.errors import AllocError
from ggraph.plan import HOST_ACTOR, Actor, Command, Do, MemoryMap, Region, Schedule, Value

SIM = DeviceSpec("d", "sim", alignment=32, streams=2)
S0, S1 = Actor("d", 0), Actor("d", 1)
END = Command(Do.HOST_SYNC, HOST_ACTOR, "end")


@given(st.integers(0, 10_000))
def test_the_search_is_sound_never_worse_and_repeatable(seed: int) -> None:
    p, cliques, bound = intervals(seed)
    order = np.argsort(-p.size)
    top, at = fit.packed(p, order)
    found = offline.search(p, order, at, bound, cliques, 0.002)
    assert sound(p, at) and sound(p, found)
    assert bound <= (found + p.size).max() <= top
    again = offline.search(p, order, at, bound, cliques, 0.002)
    assert (found == again).all()
    alone = offline.search(p, order, at, bound, None, 0.002)
    assert sound(p, alone) and (alone + p.size).max() <= top


def test_the_search_reaches_the_bound_where_greedy_does_not() -> None:
    won = proven = 0
    for seed in range(12):
        p, cliques, bound = intervals(seed, 40)
        order = np.argsort(-p.size)
        top, at = fit.packed(p, order)
        found = int((offline.search(p, order, at, bound, cliques, 0.05) + p.size).max())
        won += found < top
        proven += found == bound
    assert won >= 8 and proven >= 8, (won, proven)


def placed_by_loops(p: Packing, order: Ints, best: bool) -> list[int]:
    """A second meaning of placing: look at the gaps one after another."""
    at: dict[int, int] = {}
    for b in order.tolist():
        near = [n for n in p.near[p.start[b] : p.start[b + 1]].tolist() if n in at]
        low, need, found, tight = 0, int(p.size[b]), None, NO_LIMIT
        for n in [*sorted(near, key=at.__getitem__), None]:
            if low % p.limit + need > p.limit:
                low = (low // p.limit + 1) * p.limit
            room = (NO_LIMIT if n is None else at[n]) - low
            if room >= need and (found is None or (best and n is not None and room < tight)):
                found, tight = low, room
            low = low if n is None else max(low, at[n] + int(p.size[n]))
        assert found is not None
        at[b] = found
    return [at[b] for b in range(len(p))]


@pytest.mark.parametrize("limit", [NO_LIMIT, 1600])
@pytest.mark.parametrize("best", [False, True])
def test_placing_agrees_with_a_second_meaning(best: bool, limit: int) -> None:
    rng = np.random.default_rng(1)
    for seed in range(30):
        p = replace(intervals(seed, 25)[0], limit=limit)
        order = rng.permutation(len(p))
        total, at = fit.packed(p, order, best=best)
        assert at.tolist() == placed_by_loops(p, order, best)
        ends: dict[int, int] = {}
        for a, n in zip(at.tolist(), p.size.tolist(), strict=True):
            ends[a // limit] = max(ends.get(a // limit, 0), a % limit + n)
        assert total == sum(ends.values())


def test_interpreted_and_compiled_search_agree() -> None:
    p, cliques, bound = intervals(3, 12)
    order = np.argsort(-p.size)
    tree = climbing.Tree(p, cliques)
    room, total_bytes = tree.room, tree.total
    results = []
    for solve in (canon.solve, canon.solve.plain):
        state = canon.begun(room, total_bytes, 10**6, 10**6)
        assert solve(room, state, np.arange(len(p)), 0, cliques.count, 0, -1, int(bound * 1.2))
        results.append(state.at)
    assert (results[0] == results[1]).all() and sound(p, results[0])
    height, at = annealing.anneal(p, order, bound, 10**6, 0)
    assert sound(p, at) and height == (at + p.size).max()


def test_a_block_without_conflicts_does_not_stop_the_annealing() -> None:
    p = Packing(np.array([64, 32, 32]), np.array([0, 0, 1, 2]), np.array([2, 1]))
    height, at = annealing.anneal(p, np.arange(3), 32, 10**5, 0)
    assert height == 64 and sound(p, at)


def test_a_partial_order_is_searched_too() -> None:
    for seed in range(40):
        s = random_schedule(random.Random(seed))
        m = allocate(s, mode="offline", offline_seconds=0.01)
        judge(s, m)
        assert m.arena_bytes <= allocate(s).arena_bytes


def test_several_buffers_are_not_searched() -> None:
    p, cliques, bound = intervals(1)
    tight = replace(p, limit=1280)
    total, at = fit.packed(tight, np.argsort(-p.size))
    assert (at // 1280 == (at + p.size - 1) // 1280).all() and total > 1280
    assert offline.search(tight, np.argsort(-p.size), at, bound, cliques, 1.0) is at


def branches(width: int, streams: bool, nbytes: int = 64) -> Schedule:
    """`width` chains of two results that join; on streams of their own, or all on one."""
    device = DeviceSpec("d", "sim", alignment=32, streams=max(width, 1))
    x, out = Value("x", "d", nbytes), Value("out", "d", nbytes)
    values, commands = [x], [act(Do.HOST_WRITE, HOST_ACTOR, (), [x])]
    ends = []
    for k in range(width):
        where = Actor("d", k if streams else 0)
        a, b = Value(f"a{k}", "d", nbytes * 4), Value(f"b{k}", "d", nbytes)
        commands += [act(Do.LAUNCH, where, [x], [a]), act(Do.LAUNCH, where, [a], [b])]
        commands.append(Command(Do.RECORD, where, "done", event=f"e{k}"))
        values += [a, b]
        ends.append(b)
    commands += [Command(Do.WAIT, S0, "join", event=f"e{k}") for k in range(width)]
    commands += [act(Do.LAUNCH, S0, ends, [out]), END, act(Do.HOST_READ, HOST_ACTOR, [out])]
    return schedule([device], [*values, out], commands)


def test_the_antichain_bound_is_met_on_concurrent_branches() -> None:
    for width in (2, 3):
        apart, together = branches(width, True), branches(width, False)
        wide, narrow = lower_bounds(apart)["d"], lower_bounds(together)["d"]
        assert (wide.method, narrow.method) == ("antichain", "antichain")
        assert wide.nbytes == allocate(apart).arena_bytes
        assert narrow.nbytes == allocate(together).arena_bytes
        assert (wide.nbytes, narrow.nbytes) == (64 + width * 320, 320 + (width - 1) * 64)


@given(st.randoms(use_true_random=False))
def test_the_antichain_bound_equals_brute_force(r: random.Random) -> None:
    s = random_schedule(r)
    blocks = make_blocks(s, precedence(s))
    of = [i for i, b in enumerate(blocks.blocks) if b.nbytes and b.device == "d0" and b.rows]
    of = of[:9]
    g = nx.Graph()
    g.add_nodes_from(of)
    spans = blocks.spans
    for i in of:
        for j in of:
            ordered = (spans.last[i] <= spans.meet[j]).all() or (
                spans.last[j] <= spans.meet[i]
            ).all()
            if i < j and (blocks.blocks[i].pinned or blocks.blocks[j].pinned or not ordered):
                g.add_edge(i, j)
    cliques = nx.find_cliques(g) if of else []
    heaviest = max((sum(blocks.blocks[i].nbytes for i in c) for c in cliques), default=0)
    assert antichain_bytes(blocks, of) == heaviest
    assert live_bytes(blocks, of) <= heaviest <= sum(blocks.blocks[i].nbytes for i in of)


def test_a_large_plan_gets_the_weaker_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    s = branches(3, True)
    blocks = make_blocks(s, precedence(s))
    of = blocks.of_device("d")
    strong = lower_bound(blocks, of)
    monkeypatch.setattr("ggraph.alloc.bounds.EXACT_BLOCKS", len(of) - 1)
    weak = lower_bound(blocks, of)
    assert (weak.method, strong.method) == ("live bytes", "antichain")
    assert weak.nbytes <= strong.nbytes


def test_one_queue_needs_no_flow() -> None:
    x, y = Value("x", "d", 64), Value("y", "d", 64)
    s = schedule([SIM], [x, y], [act(Do.LAUNCH, S0, [], [x]), act(Do.LAUNCH, S0, [x], [y])])
    assert lower_bounds(s)["d"].method == "live bytes" and ordering_offers(s) == []
    assert lower_bounds(schedule([SIM], [], [])) == {}


def test_a_live_table_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    s = branches(2, True)
    blocks = make_blocks(s, precedence(s))
    table = live_table(blocks, blocks.of_device("d"))
    assert table is not None and table.shape == (len(s.commands), 6)
    monkeypatch.setattr("ggraph.alloc.bounds.MAX_TABLE", 3)
    assert live_table(blocks, blocks.of_device("d")) is None
    assert allocate(s, mode="offline", offline_seconds=0.001).mode == "offline"


def test_offers_save_what_they_promise() -> None:
    s = branches(2, True)
    offers = ordering_offers(s)
    best = offers[0]
    now = peak_bytes(s)["d"]
    assert best.bytes_saved == now - 384 and best.device == "d"
    assert peak_bytes(s, [(best.before, best.after)])["d"] == now - best.bytes_saved
    assert ordering_offers(s, device="host") == []
    assert ordering_offers(branches(2, False)) == []


def test_few_edges_make_a_plan_fit() -> None:
    s = branches(3, True)
    now = peak_bytes(s)["d"]
    assert fitting_edges(s, "d", now) == ()
    some = fitting_edges(s, "d", now - 192)
    all_of = fitting_edges(s, "d", lower_bounds(branches(3, False))["d"].nbytes)
    assert some is not None and len(some) == 1
    assert all_of is not None and len(all_of) == 2
    assert peak_bytes(s, all_of)["d"] == lower_bounds(branches(3, False))["d"].nbytes
    assert fitting_edges(s, "d", 128) is None
    assert peak_bytes(schedule([SIM], [Value("e", "d", 0)], [])) == {"d": 0}


def test_tenants_shows_the_path_that_orders_two_tenants() -> None:
    s = branches(2, False)
    m = allocate(s)
    assert m.regions["a1"].nbytes == 256 and m.mode == "hb"
    text = "\n".join(tenants(s, m, "a1"))
    assert "after %a0: commands 2 launch launch -> 3 record e0 -> 4 launch launch" in text
    assert "and the next run's %a1" in "\n".join(tenants(s, m, "a0")) or "then %" in text
    assert "then %b1, and the next run's %x: commands 9 launch" in "\n".join(tenants(s, m, "x"))


def test_tenants_says_what_is_in_place() -> None:
    x, y = Value("x", "d", 64), Value("y", "d", 64, None, ("x",))
    w = Value("w", "d", 64, external=True)
    run = [act(Do.LAUNCH, S0, [w], [x]), act(Do.LAUNCH, S0, [x], [y]), END]
    s = schedule([SIM], [w, x, y], run)
    m = allocate(s)
    assert m.causes["y"] == "in place of %x"
    assert "after %x: command 1 reads the one and writes the other" in tenants(s, m, "y")[0]


def test_tenants_finds_what_list_order_leaves_open() -> None:
    s = branches(2, True)
    m = allocate(s, mode="ggml")
    text = "\n".join("\n".join(tenants(s, m, v)) for v in s.values)
    assert "UNORDERED with %" in text
    unused = replace(s, commands=())
    assert "no other tenant" in tenants(unused, m, "a0")[0]


def test_tenants_a_next_run_without_order() -> None:
    x, y = Value("x", "d", 64), Value("y", "d", 64)
    s = schedule([SIM], [x, y], [
        act(Do.HOST_WRITE, HOST_ACTOR, (), [x]),
        act(Do.LAUNCH, S0, [x], []),
        act(Do.LAUNCH, S0, [], [y]),
    ])  # fmt: skip
    m = allocate(s)
    here = Region("arena@d", (0,), 64)
    raced = MemoryMap("hb", m.buffers, {"x": here, "y": here})
    assert "the next run's %x: UNORDERED 2 and 0 (next) host_write" in tenants(s, raced, "x")[0]


def test_a_path_between_unordered_commands_is_empty() -> None:
    s = branches(2, True)
    order = precedence(s)
    assert order.path(1, 4) == ()
    assert order.path(0, 4) == (0, 4)


def test_packing_of_blocks() -> None:
    s = branches(2, True)
    blocks = make_blocks(s, precedence(s))
    p = packing(blocks, blocks.of_device("d"), NO_LIMIT)
    assert len(p) == 6 and p.start[-1] == len(p.near)
    assert packing(blocks, [], NO_LIMIT).near.size == 0


def test_a_device_whose_values_have_no_bytes_does_not_hide_the_next_one() -> None:
    empty, full = (DeviceSpec(name, "sim", alignment=32) for name in ("e", "f"))
    none, x = Value("none", "e", 0), Value("x", "f", 64)
    run = [act(Do.LAUNCH, Actor("e", 0), [], [none]), act(Do.LAUNCH, Actor("f", 0), [], [x]), END]
    m = allocate(schedule([empty, full], [none, x], run))
    assert m.buffers["arena@f"].nbytes == 64 and m.regions["x"].offsets == (0,)


@pytest.mark.parametrize("traits", [{"initial": True}, {"kept": True}])
def test_list_order_gives_no_bytes_away_that_outlive_the_run(traits: dict[str, bool]) -> None:
    """As `ggml` mode keeps an output: either trait alone is enough."""
    s = replace(Value("s", "d", 64), **traits)
    x, y, z = (Value(name, "d", 64) for name in "xyz")
    run = [
        act(Do.LAUNCH, S0, [], [s]) if s.kept else act(Do.LAUNCH, S0, [s], [x]),
        act(Do.LAUNCH, S0, [s], [x]) if s.kept else act(Do.LAUNCH, S0, [x], [y]),
        act(Do.LAUNCH, S0, [x], [y]) if s.kept else act(Do.LAUNCH, S0, [y], [z]),
        act(Do.LAUNCH, S0, [y], [z]),
        END,
    ]
    m = allocate(schedule([SIM], [s, x, y, z], run), mode="ggml")
    assert all(m.regions[v].offsets != m.regions["s"].offsets for v in "xyz")


def test_a_rotating_buffer_of_the_callers_takes_room_for_every_slot() -> None:
    w = Value("w", "d", 64, external=True, slots=3)
    s = schedule([DeviceSpec("d", "sim", memory_bytes=1000, alignment=32)], [w], [END])
    assert rooms(s, None)["d"] == 1000 - 3 * 64


def test_a_region_without_bytes_overlaps_nothing() -> None:
    inside, whole = Region("b", (32,), 0), Region("b", (0,), 64)
    assert not overlap(inside, whole) and not overlap(whole, inside)
    assert overlap(whole, Region("b", (63,), 1)) and not overlap(whole, Region("b", (64,), 1))


def test_without_numba_planning_works_and_the_search_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(**_: object) -> None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=gone))
    p, cliques, _ = intervals(3, 12)
    assert sound(p, fit.packed(p, np.argsort(-p.size))[1])
    fresh = jit.compiled(canon.solve.source)
    with pytest.raises(AllocError, match=r"needs numba, .*pip install 'ggraph-runtime\[search\]'"):
        fresh(climbing.Tree(p, cliques).room)
