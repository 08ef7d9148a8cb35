"""Repairs are data: carried out, they remove the fault that they are offered for."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import UNIT, random_plan, with_commands
from verify_kit import S0, S1, fault, plan, record, run, sync, wait

from ggraph.plan import HOST_ACTOR, HOST_STEPS, Buffer, Command, Do, Plan
from ggraph.verify import CounterExample, Repair, examine


def ordered(p: Plan, after: int, before: int) -> Plan:
    """Record behind one command, wait in front of the other; the producer's work is moved up
    where it is enqueued too late."""
    commands, late = list(p.schedule.commands), p.schedule.commands[before]
    event = f"repair{after}.{before}.{len(commands)}"
    mark = Command(Do.RECORD, commands[after].actor, event, event=event)
    host = late.do in HOST_STEPS
    hold = Command(Do.HOST_SYNC if host else Do.WAIT, late.actor, event, event=event)
    for at, c in sorted(((before, hold), (after + 1, mark)), key=lambda x: -x[0]):
        commands.insert(at, c)
    return with_commands(p, commands)


def apart(p: Plan, name: str) -> Plan:
    """A buffer of its own for a value and for what lies on it by declaration."""
    values, memory = p.schedule.values, p.memory
    ground = name
    while (below := values[ground].same_as) is not None:
        ground = below
    family = {ground}
    while more := {v.name for v in values.values() if v.same_as in family} - family:
        family |= more
    slots = len(memory.regions[ground].offsets)
    step = -(-values[ground].nbytes // UNIT) * UNIT
    title = f"own {ground}"
    home = Buffer(title, values[ground].device, step * slots, UNIT)
    offsets = tuple(step * i for i in range(slots))
    regions = {n: replace(memory.regions[n], buffer=title, offsets=offsets) for n in family}
    buffers, regions = {**memory.buffers, title: home}, {**memory.regions, **regions}
    return replace(p, memory=replace(memory, buffers=buffers, regions=regions))


def repaired(p: Plan, repair: Repair) -> Plan:
    if repair.apart is not None:
        return apart(p, repair.apart)
    assert repair.after is not None and repair.before is not None
    return ordered(p, repair.after, repair.before)


def test_bytes_of_its_own_are_offered_where_they_part_the_two() -> None:
    """y lies in place of x: wherever y goes, it still reads what the next run's x overwrites."""
    body = (run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"))
    f = fault(plan({"x": 0, "y": 0}, *body, y={"may_replace": ("x",)}))
    assert [r.apart for r in f.repairs] == [None]
    f = fault(plan({"x": 0, "y": 32, "z": 0}, *body, run(S0, "z")))
    assert f.values == ("x", "z") and {r.apart for r in f.repairs} == {None, "x"}


def where(f: CounterExample, p: Plan) -> tuple[object, ...]:
    """What makes a fault the same after a repair has moved indices. Of one command that writes two
    results over one operand each is a fault of its own, repaired apart."""
    texts = tuple(s.text if s else "" for s in (f.first, f.second))
    results = f.values if f.kind == "alias" else ()
    return (f.kind, texts, f.buffer, f.start, f.stop, results)


@given(st.randoms(use_true_random=False))
def test_every_repair_of_a_race_removes_it(r: random.Random) -> None:
    p = random_plan(r)
    verdict = examine(p)
    if not isinstance(verdict, CounterExample) or verdict.kind not in ("race", "alias"):
        return
    assert verdict.repairs, str(verdict)
    for repair in verdict.repairs:
        again = examine(repaired(p, repair))
        assert not isinstance(again, CounterExample) or where(again, p) != where(verdict, p)


@given(st.randoms(use_true_random=False))
def test_races_are_repaired_one_by_one(r: random.Random) -> None:
    """Taking the cheapest repair each time ends: with a sound plan, or one that is merely wrong."""
    p = random_plan(r)
    for _ in range(60):
        verdict = examine(p)
        if not isinstance(verdict, CounterExample) or verdict.kind != "race":
            return
        assert verdict.cheapest is not None
        p = repaired(p, verdict.cheapest)
    raise AssertionError(f"still a race after 60 repairs: {examine(p)}")


def test_the_cheaper_repair_comes_first() -> None:
    """A wait costs microseconds, memory costs bytes: which is cheaper depends on both."""
    body = (run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"), run(S0, "z"), sync())
    small = fault(plan({"x": 0, "y": 32, "z": 0}, *body))
    assert small.cheapest and small.cheapest.apart == "x" and small.repairs[1].waits == 1
    slow = (*body[:3], run(S1, "y", "x", seconds=1.0), *body[4:])
    assert fault(plan({"x": 0, "y": 32, "z": 0}, *slow)).repairs[1].cost_s > 1.0
    assert [r.cost_s for r in small.repairs] == sorted(r.cost_s for r in small.repairs)


@pytest.mark.parametrize(("x", "y"), [(32, 16), (16, 32)])
def test_the_smaller_of_two_values_is_moved_away(x: int, y: int) -> None:
    sizes = {"x": {"nbytes": x}, "y": {"nbytes": y}}
    f = fault(plan({"x": 0, "y": 0}, run(S0, f"x:0:{x}"), run(S1, f"y:0:{y}"), sync(), **sizes))
    (moved,) = [r for r in f.repairs if r.apart is not None]
    assert (moved.apart, moved.nbytes) == ("y" if y < x else "x", 16)


def test_commands_that_fight_over_one_value_need_an_edge() -> None:
    f = fault(plan({"x": 0, "y": 32}, run(S0, "x"), run(S1, "y", "x"), sync()))
    assert len(f.repairs) == 1 and f.cheapest and f.cheapest.apart is None
    assert (f.cheapest.after, f.cheapest.before) == (0, 1)
    assert str(f.cheapest) == "record after 'x' on d.0, wait before 'y' on d.1 (1 wait)"


def test_a_late_producer_comes_first() -> None:
    f = fault(plan({"x": 0, "y": 32}, run(S0, "y", "x"), run(S0, "x"), sync()))
    assert f.cheapest and (f.cheapest.waits, f.cheapest.after, f.cheapest.before) == (0, 1, 0)
    assert str(f.cheapest) == "enqueue 'x' before 'y' (0 waits)"
    assert f.cheapest and f.first is None and HOST_ACTOR not in (S0, S1)
