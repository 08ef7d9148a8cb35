"""The pipeline: limits of memory, what is tried, what it costs, and what concurrency costs."""

import inspect
import random
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from graph_kit import random_devices, random_graph, random_options
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, tiny

from ggraph import Graph, input, ops
from ggraph.alloc import fitting_edges, lower_bounds, ordering_offers, peak_bytes
from ggraph.backends import open_backend
from ggraph.errors import AllocError, BackendError, InputError, PlaceError, PlanError
from ggraph.face import scope
from ggraph.order import order
from ggraph.orderings import wait_count, with_orderings
from ggraph.pipeline import Options, begin, make_plan, run_passes_until
from ggraph.place import place
from ggraph.plan import Do, Plan, Schedule, VerifiedPlan
from ggraph.session import Session
from ggraph.split import split
from ggraph.trade import trade_table
from ggraph.verify import verify

GRAPH = tiny(3)


def arenas(verified: VerifiedPlan) -> dict[str, int]:
    """Bytes of the plan's own buffers per device."""
    found: dict[str, int] = {}
    for b in verified.plan.memory.buffers.values():
        if not b.external:
            found[b.device] = found.get(b.device, 0) + b.nbytes
    return found


def forked(streams: int = 3) -> Schedule:
    return order(split(place(GRAPH, [SIM0])), streams=streams)


def test_a_scope_names_nothing_that_passes_make() -> None:
    """Neither in a whole plan nor in the passes up to one."""
    device = replace(SIM0, fused=frozenset({"mul_mat_add", "mul_mats"}))
    begun = begin(GRAPH, [device], Options(rewrites=True))
    plain = run_passes_until(begun, "verify").plan
    with scope("s"):
        again, whole = run_passes_until(begun, "verify").plan, make_plan(GRAPH, [device]).plan
    assert {t.op for t in plain.graph} > {"mul_mat_add", "mul_mats"}
    for plan in (again, whole):
        assert repr(plan.graph) == repr(plain.graph)
        assert plan.memory.regions == plain.memory.regions


def test_a_plan_that_fits_is_left_alone() -> None:
    free = make_plan(GRAPH, [SIM0], Options(streams=3))
    same = make_plan(GRAPH, [SIM0], Options(streams=3, capacity={"sim0": arenas(free)["sim0"]}))
    assert same.plan.schedule.commands == free.plan.schedule.commands
    assert not any("trying" in line for line in same.plan.log)


def test_orderings_are_bought_where_no_layout_fits() -> None:
    free = make_plan(GRAPH, [SIM0], Options(streams=3))
    limit = arenas(free)["sim0"] - 128
    tight = make_plan(GRAPH, [SIM0], Options(streams=3, capacity={"sim0": limit}))
    assert arenas(tight)["sim0"] <= limit
    log = "\n".join(tight.plan.log)
    assert "skipped, since sim0 has 640 bytes and no plan of this order needs less than 768" in log
    assert "(16 waits, critical path 96.0 us); trying: search offsets for longer" in log
    assert "fit: 3 orderings save 128 bytes of sim0 (768 -> 640)" in log
    assert "16 waits, critical path 96.0 us -> 19 waits, critical path 100.0 us" in log
    assert wait_count(tight.plan.schedule) == wait_count(free.plan.schedule) + 3
    assert {c.actor.stream for c in tight.plan.schedule if c.do is Do.LAUNCH} > {0}


def test_a_longer_search_is_tried_where_no_bound_forbids_it() -> None:
    """With just the bytes that a bound asks for, of graphs for which ggml's way takes more."""
    tried = 0
    for seed in range(12):
        graph = random_graph(random.Random(seed), 24)
        plan = make_plan(graph, [CPU], Options(memory="ggml")).plan
        need = lower_bounds(plan.schedule)["cpu"].nbytes
        if need < plan.memory.buffers["arena@cpu"].nbytes:
            options = Options(memory="ggml", capacity={"cpu": need})
            found = make_plan(graph, [CPU], options)
            assert arenas(found)["cpu"] == need
            log = "\n".join(found.plan.log)
            assert "trying: search offsets for longer" in log and "skipped" not in log
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("spare", [2, 3])
def test_no_more_orderings_are_bought_than_may_be_spared(spare: int) -> None:
    options = Options(streams=3, capacity={"sim0": 640}, spare_waits=spare)
    log = "\n".join(make_plan(GRAPH, [SIM0], options).plan.log)
    assert ("fit: 3 orderings save" in log) == (spare == 3)
    assert ("trying: one stream per device" in log) == (spare == 2)


def test_devices_share_what_may_be_spared() -> None:
    """Of two that need orderings, one gets them where there are enough for one alone."""
    devices, layers = [SIM0, SIM1], {"sim0": 1, "sim1": 2}
    free = make_plan(GRAPH, devices, Options(layers=layers, streams=3)).plan
    room = {d: peak - 128 for d, peak in peak_bytes(free.schedule).items() if d != "host"}
    needed = {d: len(fitting_edges(free.schedule, d, n) or ()) for d, n in room.items()}
    assert needed == {"sim0": 1, "sim1": 2}
    both = Options(layers=layers, streams=3, capacity=room)
    for spare, expected in ((3, ["1 of sim0", "2 of sim1"]), (2, ["1 of sim0"])):
        log = "\n".join(make_plan(GRAPH, devices, replace(both, spare_waits=spare)).plan.log)
        found = re.findall(r"fit: (\d+) orderings save \d+ bytes (of \w+)", log)
        assert [" ".join(x) for x in found] == expected
        assert ("trying: one stream per device" in log) == (spare == 2)


def test_without_spare_waits_one_stream_is_the_last_resort() -> None:
    limit = {"sim0": 640}
    tight = make_plan(GRAPH, [SIM0], Options(streams=3, capacity=limit, spare_waits=0))
    assert arenas(tight)["sim0"] <= 640
    assert {c.actor.stream for c in tight.plan.schedule if c.do is Do.LAUNCH} == {0}
    assert any("trying: one stream per device" in line for line in tight.plan.log)


def test_slots_are_given_up_last() -> None:
    two = arenas(make_plan(GRAPH, [SIM0], Options(copies=2)))["sim0"]
    one = arenas(make_plan(GRAPH, [SIM0]))["sim0"]
    assert one < two
    tight = make_plan(GRAPH, [SIM0], Options(copies=2, capacity={"sim0": one}))
    assert arenas(tight)["sim0"] <= one
    assert any("trying: one slot per input" in line for line in tight.plan.log)


def test_runs_are_taken_apart_where_overlap_does_not_fit() -> None:
    """What a run leaves behind may not be recycled while the next one writes early."""
    wide = arenas(make_plan(GRAPH, [SIM0], Options(overlap=True, copies=2)))["sim0"]
    apart = arenas(make_plan(GRAPH, [SIM0], Options(copies=2)))["sim0"]
    assert apart <= wide
    tight = make_plan(GRAPH, [SIM0], Options(overlap=True, capacity={"sim0": apart - 1}, copies=2))
    log = "\n".join(tight.plan.log)
    assert log.index("trying: runs apart") < log.index("trying: one slot per input")


def test_an_overlapping_plan_lets_the_host_go_early() -> None:
    """The next run's input may be written while this run computes, in steady state."""
    commands = make_plan(GRAPH, [SIM0], Options(overlap=True, copies=2)).plan.schedule.commands
    waits = [c for c in commands if c.do is Do.HOST_SYNC]
    assert waits and all(c.event is not None for c in waits), "never for everything"


def test_an_error_tells_the_lines_that_made_what_it_names() -> None:
    """Where Python keeps lines: `python -X tracemalloc=20`. The cast has a name only in the graph,
    where it is another object."""
    tracemalloc.start(20)
    try:
        first = inspect.currentframe().f_lineno  # type: ignore[union-attr]  # CPython has one
        x = input("x", (3, 64))
        graph = Graph.of({"y": ops.cast(x * 2, "q8_0"), "z": x + 1})
        with pytest.raises(PlaceError, match="without a kernel: %y") as error:
            make_plan(graph, [open_backend("cpu").spec], Options(strict=True))
        assert error.value.__notes__ == [
            f"%y was made at {__file__}:{first + 2}", f"%scale_1 was made at {__file__}:{first + 2}"
        ]  # fmt: skip
    finally:
        tracemalloc.stop()
    with pytest.raises(PlaceError) as error:
        make_plan(graph, [open_backend("cpu").spec], Options(strict=True))
    assert not hasattr(error.value, "__notes__")


def test_the_error_states_the_bound() -> None:
    with pytest.raises(
        AllocError, match=r"sim0 has 512 bytes and no plan of this order needs less than 640"
    ):
        make_plan(GRAPH, [SIM0], Options(streams=3, capacity={"sim0": 512}))
    with pytest.raises(AllocError, match=r"placed on sim0: 27 values, the largest %x 96, ") as told:
        make_plan(GRAPH, [SIM0], Options(streams=3, capacity={"sim0": 512}))
    assert len(re.findall(r"%[\w.]+ \d+", str(told.value).split("the largest")[1])) == 6
    with pytest.raises(AllocError, match=r"%x needs 128 bytes, sim0 has 64"):
        make_plan(GRAPH, [SIM0], Options(capacity={"sim0": 64}))


def test_the_error_lists_what_is_on_the_device_that_is_too_small() -> None:
    """Not on one that has just what it needs."""
    devices, layers = [SIM0, SIM1], {"sim0": 1, "sim1": 2}
    free = make_plan(GRAPH, devices, Options(layers=layers))
    need = {d: b.nbytes for d, b in lower_bounds(free.plan.schedule).items() if d != "host"}
    assert set(need) == {"sim0", "sim1"}
    for small in need:
        room = {d: n - (d == small) for d, n in need.items()}
        with pytest.raises(AllocError) as caught:
            make_plan(GRAPH, devices, Options(layers=layers, capacity=room))
        assert re.findall(r"placed on (\w+)", str(caught.value)) == [small]


def test_what_numpy_computes_is_logged_with_the_bytes_that_it_moves() -> None:
    x = input("x", (4, 8))
    plain = replace(CPU, compiled=lambda t: t.op != "add")
    plan = make_plan(Graph.of([ops.add(ops.tanh(x), x)]), [plain]).plan
    assert "without a kernel, in NumPy: add (1 times, 384 bytes)" in plan.log


def test_bad_limits_are_refused() -> None:
    with pytest.raises(AllocError, match=r"unknown device 'sim7'; known: sim0, host"):
        make_plan(GRAPH, [SIM0], Options(capacity={"sim7": 1}))
    with pytest.raises(AllocError, match=r"capacity of sim0 is -1 bytes"):
        make_plan(GRAPH, [SIM0], Options(capacity={"sim0": -1}))
    with pytest.raises(InputError, match=r"spare_waits: expected 0 or more, got -1"):
        make_plan(GRAPH, [SIM0], Options(spare_waits=-1))
    with pytest.raises(PlaceError, match=r"at least one device"):
        make_plan(GRAPH, [])
    with pytest.raises(InputError, match=r"memory: expected one of hb, offline, ggml, got"):
        make_plan(GRAPH, [SIM0], Options(memory="best"))


def test_an_ordering_must_point_down_the_list() -> None:
    schedule = forked()
    for edge in ((3, 3), (4, 2), (-1, 2), (0, len(schedule.commands))):
        with pytest.raises(PlanError, match=r"does not point down a list"):
            with_orderings(schedule, [edge])


def test_an_ordering_becomes_one_record_and_one_wait() -> None:
    schedule = forked()
    at = {c.label: i for i, c in enumerate(schedule)}
    i, j, k = at["blk.0.q"], at["blk.0.mix"], at["blk.0.out"]
    found = with_orderings(schedule, [(i, j), (i, k), (i, j)])
    added = [c for c in found if c not in schedule.commands]
    assert [c.do for c in added] == [Do.RECORD, Do.WAIT, Do.WAIT]
    assert len({c.event for c in added}) == 1
    labels = [c.label for c in found]
    assert labels.index(added[0].label) == labels.index("blk.0.q") + 1
    assert labels[labels.index("blk.0.mix") - 1] == added[1].label


def test_fewest_orderings_on_a_small_plan() -> None:
    """No smaller set of the offered orderings makes the plan fit."""
    schedule = forked()
    limit = 704
    edges = fitting_edges(schedule, "sim0", limit)
    assert edges is not None
    assert peak_bytes(schedule, edges)["sim0"] <= limit
    offers = [(o.before, o.after) for o in ordering_offers(schedule, device="sim0")]
    for fewer in combinations(offers, len(edges) - 1):
        assert peak_bytes(schedule, fewer)["sim0"] > limit


def limits(verified: VerifiedPlan, r: random.Random) -> Iterator[dict[str, int]]:
    """Tighter and tighter limits for one device."""
    sizes = arenas(verified)
    if sizes:
        device = r.choice(sorted(sizes))
        for percent in (100, 85, 70, 40):
            yield {device: sizes[device] * percent // 100}


@given(st.randoms(use_true_random=False))
def test_a_limit_is_kept_or_excluded_by_a_bound(r: random.Random) -> None:
    graph, devices = random_graph(r), random_devices(r)
    given_ = random_options(r, graph, devices)
    free = make_plan(graph, devices, given_)
    verify(Plan(free.plan.schedule, free.plan.memory))
    for limit in limits(free, r):
        options = Options(**{**vars(given_), "capacity": limit, "offline_seconds": 0.01})
        try:
            found = make_plan(graph, devices, options)
        except AllocError as error:
            assert "no plan of this order needs less" in str(error) or " bytes, " in str(error)
            return
        verify(found.plan)
        assert all(arenas(found).get(d, 0) <= n for d, n in limit.items())


def test_concurrency_has_a_price() -> None:
    rows = trade_table(GRAPH, [SIM0])
    assert {r.streams for r in rows} == {1, 2, 3, 4}
    first = {s: next(r for r in rows if r.streams == s) for s in (1, 2, 3)}
    assert (first[1].lost_bytes, first[3].lost_bytes) == (0, 128)
    assert first[2].critical_path_s < first[1].critical_path_s
    assert first[1].waits < first[2].waits < first[3].waits
    for r in rows:
        assert r.added == 0 or r.nbytes < first.get(r.streams, rows[-2]).nbytes
    assert max(r.added for r in trade_table(GRAPH, [SIM0, SIM1], most=0)) == 0


def test_the_table_matches_the_plans() -> None:
    for row in (r for r in trade_table(GRAPH, [SIM0]) if not r.added):
        verified = make_plan(GRAPH, [SIM0], Options(streams=row.streams))
        assert row.nbytes == verified.plan.memory.arena_bytes
        assert row.waits == wait_count(verified.plan.schedule)
        least = sum(b.nbytes for b in lower_bounds(verified.plan.schedule).values())
        assert least <= row.nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams": 0}, {"streams": 1.5}, {"streams": "2"}, {"streams": True}, {"streams": None},
        {"copies": 0}, {"copies": -1}, {"offline_seconds": -0.1}, {"offline_seconds": float("nan")},
        {"offline_seconds": float("inf")},
        {"spare_waits": -1}, {"spare_waits": None}, {"pins": "w=cpu"}, {"pins": (1,)},
        {"pins": None}, {"layers": 3}, {"layers": {"cpu": "3"}}, {"layers": ["cpu"]},
        {"capacity": {"cpu": None}}, {"capacity": 5}, {"overlap": 1}, {"rewrites": "no"},
        {"forced_sync": "x"}, {"forced_sync": 1}, {"exact": 1}, {"strict": None}, {"memory": 3},
    ],
)  # fmt: skip
def test_an_option_that_is_none_is_told(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=rf"^Options\.{name}(\[.*\])?: expected .*, got "):
        Options(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "sim0"])
@pytest.mark.parametrize("option", ["thread", "cache", "streams_", "kind"])
def test_a_backend_names_its_options(device: str, option: str) -> None:
    with pytest.raises(InputError, match=f"^{device[:3]} has no option '{option}'; it has: "):
        open_backend(device, **{option: 1})


@pytest.mark.parametrize(
    "wrong", [{"threads": 0}, {"threads": "2"}, {"threads": True}, {"exact": "no"}, {"profile": 1}]
)
def test_a_cpu_option_of_the_wrong_kind_is_told(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^(threads|exact|profile) = .*: expected "):
        open_backend("cpu", **wrong)


@pytest.mark.parametrize("device", [None, 3, "", "cpu ", "CPU", "gpu", "cpu-1"])
def test_an_unknown_device_is_told(device: object) -> None:
    with pytest.raises(BackendError, match=r"^unknown device "):
        open_backend(device)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [None, "cpu", {"cpu": None}, {"gpu": "real"}, ["cpu"]])
def test_a_session_wants_backends_by_their_names(devices: object) -> None:
    given = devices
    if isinstance(devices, dict) and devices.get("gpu"):
        given = {"gpu": open_backend("cpu", threads=1)}
    with pytest.raises(InputError, match=r"^(expected device names|device '.pu': expected its)"):
        Session(given)  # type: ignore[arg-type]
