"""Split plans give the unsplit values in every legal order; the machine's orders are legal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, SIM2, feeds, no_reuse, schedule_of, tiny, weights

from ggraph.backends.sim import (
    Adversarial,
    InOrder,
    Machine,
    Order,
    Random,
    Simulated,
    Simulator,
    Timed,
    every_order,
)
from ggraph.device import DeviceSpec
from ggraph.errors import BackendError
from ggraph.plan import Actor, Do, Plan

WAYS: dict[str, tuple[tuple[DeviceSpec, ...], tuple[str, ...], dict[str, int]]] = {
    "one sim": ((SIM0,), (), {}),
    "layers": ((SIM0, SIM1, CPU), (), {"sim0": 1, "sim1": 1}),
    "through the host": ((SIM0, SIM2), (), {"sim0": 1, "sim2": 1}),
    "pins": ((SIM0, SIM1, CPU), (r"blk\.1\.(q|v)\.weight=sim1", r"^head=cpu"), {}),
    "cache elsewhere": ((SIM0, SIM1, CPU), (r"cache\.0=sim1", r"cache\.1=cpu"), {}),
}
GRAPH = tiny()
WEIGHTS = weights(GRAPH)
FEEDS = feeds(GRAPH, 3)


def truth() -> Simulated:
    """The unsplit run, one command after another."""
    return Simulator(no_reuse(schedule_of(GRAPH, [CPU])), WEIGHTS).run(FEEDS)


def same(a: Simulated, b: Simulated) -> bool:
    """Whether outputs and states agree bit for bit."""
    outputs = zip(a.outputs, b.outputs, strict=True)
    states = ((a.states[s], b.states[s]) for s in a.states)
    pairs = [(x["y"], y["y"]) for x, y in outputs] + list(states)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"streams": 4}, {"streams": 2, "n_copies": 2, "overlap": True}]
)
def test_split_plans_are_bit_equal_to_the_unsplit_run(
    way: str, options: dict[str, int | bool]
) -> None:
    devices, pins, layers = WAYS[way]
    plan = no_reuse(schedule_of(GRAPH, devices, pins, layers, **options))
    simulator, wanted = Simulator(plan, WEIGHTS), truth()
    for chosen in (InOrder(), Timed(), *map(Random, range(20))):
        got = simulator.run(FEEDS, chosen)
        assert not got.faults, (way, options, got.faults[0])
        assert same(got, wanted), (way, options, chosen)


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(WAYS)), st.integers(1, 4))
def test_any_seed_agrees(seed: int, way: str, streams: int) -> None:
    devices, pins, layers = WAYS[way]
    plan = no_reuse(schedule_of(GRAPH, devices, pins, layers, streams=streams))
    got = Simulator(plan, WEIGHTS).run(FEEDS, Random(seed))
    assert not got.faults and same(got, truth())


def without(plan: Plan, label: str) -> Plan:
    """The plan whose schedule lost the commands of that label."""
    kept = tuple(c for c in plan.schedule if c.label != label)
    assert len(kept) < len(plan.schedule.commands), label
    schedule = plan.schedule
    lost = type(schedule)(schedule.splits, schedule.values, kept, schedule.carried)
    return Plan(lost, plan.memory)


def test_every_wait_is_needed_and_its_loss_is_seen() -> None:
    """The fewest events: without any one wait, some legal order reads a wrong value."""
    plan = no_reuse(schedule_of(GRAPH, [SIM0], streams=4))
    waits = [c for c in plan.schedule if c.do is Do.WAIT]
    assert len(waits) > 4
    for wait in waits:
        kept = tuple(c for c in plan.schedule if c is not wait)
        s = plan.schedule
        broken = Simulator(Plan(type(s)(s.splits, s.values, kept, s.carried), plan.memory), WEIGHTS)
        first = (wait.event or "").removeprefix("after:")
        assert broken.run(FEEDS[:1], Adversarial(first, "")).faults, f"nobody needs {wait}"


def test_unsynchronised_host_read_is_seen_by_the_adversary() -> None:
    broken = Simulator(without(no_reuse(schedule_of(GRAPH, [SIM0])), "end of run"), WEIGHTS)
    order = Adversarial("copy:y@host", "read:y")
    got = broken.run(FEEDS[:1], order)
    assert order.succeeded
    assert [f.found for f in got.faults] == ["bytes that nobody wrote"]
    assert np.isnan(got.outputs[0]["y"]).all(), "poison is NaN"
    assert not broken.run(FEEDS[:1], InOrder()).faults, "in order nothing is wrong: that is luck"


def test_every_order_counts_the_interleavings_of_two_streams() -> None:
    """Two streams of 2 and 3 commands have 5! / (2! 3!) = 10 interleavings."""

    def run(order: Order) -> str:
        seen: list[str] = []
        machine = Machine(order)
        for stream, count in ((0, 2), (1, 3)):
            for i in range(count):
                label = f"{'ab'[stream]}{i}"
                machine.enqueue(Actor("sim0", stream), label, 1.0, lambda x=label: seen.append(x))
        machine.synchronise()
        return " ".join(seen)

    found = list(every_order(run))
    assert len(found) == len(set(found)) == 10
    assert all(f.index("a0") < f.index("a1") for f in found)


def test_a_wait_refers_to_the_latest_record_enqueued_so_far() -> None:
    seen: list[str] = []
    machine = Machine(Adversarial("late", "free"))
    one, two = Actor("sim0", 0), Actor("sim0", 1)
    machine.wait(two, "e")  # never recorded: waits for nothing
    machine.enqueue(two, "free", 1.0, lambda: seen.append("free"))
    machine.enqueue(one, "early", 1.0, lambda: seen.append("early"))
    machine.record(one, "e")
    machine.wait(two, "e")
    machine.enqueue(two, "after", 1.0, lambda: seen.append("after"))
    machine.enqueue(one, "late", 1.0, lambda: seen.append("late"))
    machine.record(one, "e")
    machine.synchronise()
    assert seen == ["free", "early", "after", "late"]


def test_virtual_clock_overlaps_streams_and_honours_events() -> None:
    machine = Machine(Timed())
    one, two = Actor("sim0", 0), Actor("sim0", 1)
    machine.enqueue(one, "a", 3.0, lambda: None)
    machine.record(one, "e")
    machine.enqueue(two, "b", 1.0, lambda: None)
    machine.wait(two, "e")
    machine.enqueue(two, "c", 1.0, lambda: None)
    machine.synchronise()
    spans = {s.label: (s.start, s.stop) for s in machine.timeline}
    assert spans == {"a": (0.0, 3.0), "b": (0.0, 1.0), "c": (3.0, 4.0)}
    assert machine.host_time == 4.0


def test_a_machine_that_cannot_go_on_names_what_waits() -> None:
    machine = Machine()
    machine.enqueue(Actor("sim0", 0), "a", 1.0, lambda: None)
    machine.record(Actor("sim0", 0), "e")
    machine.wait(Actor("sim0", 1), "e")
    entry = machine.enqueue(Actor("sim0", 1), "stuck", 1.0, lambda: None)
    entry.record = entry  # waits for itself
    entry.run = None
    with pytest.raises(BackendError, match=r"sim0\.1: stuck"):
        machine.synchronise()
