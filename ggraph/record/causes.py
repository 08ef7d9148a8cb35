"""Many races, few causes: a wait that is missing, and the races that it would have prevented.

Races between the same two actors are intervals of the enqueue order: the first access is enqueued
at f, the second at s, and a wait of the second actor for the first, put anywhere between, orders
them. So the smallest set of waits is the smallest set of points that meets all intervals, which
greedy choice by right end finds. What is left over once waits work together is taken away again,
and the repaired plan is proved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ggraph.plan import HOST_ACTOR, Actor, Command, Do, Plan, Schedule
from ggraph.verify import Race, examine, races
from ggraph.verify.report import CounterExample


@dataclass(frozen=True)
class Wait:
    """Command `before` should wait for command `after` (indices of the schedule)."""

    after: int
    before: int


@dataclass(frozen=True)
class Cause:
    """A missing wait and the races that it prevents."""

    wait: Wait
    races: tuple[Race, ...]
    text: str

    def __str__(self) -> str:
        count = len(self.races)
        return f"{count} race{'s' if count != 1 else ''}, one missing wait: {self.text}"


@dataclass(frozen=True)
class Repair:
    """Waits that order every race of a plan, and the longest chain of kernels and copies with them.

    `proved`: the plan with these waits passes `verify`.
    """

    waits: tuple[Wait, ...]
    chain: int
    proved: bool


@dataclass(frozen=True)
class Diagnosis:
    """All races of a plan by cause; `fewest` waits, or `latest`: each as late as it may be."""

    causes: tuple[Cause, ...]
    chain: int  # kernels and copies that must run one after another, as the plan stands
    fewest: Repair
    latest: Repair


def diagnose(plan: Plan) -> Diagnosis | None:
    """Why a plan has races; None where it has none that a wait can prevent."""
    found = [r for r in races(plan) if r.first.iteration == r.second.iteration]
    if not found:
        return None
    groups = _groups(found, plan.schedule.commands)
    needed = _needed(plan, [_wait(g) for g in groups])
    causes = [
        Cause(wait, tuple(g), _text(plan, wait))
        for g in groups
        if (wait := _wait(g)) in needed or len(needed) == len(groups)
    ]
    latest = _one_by_one(found)
    return Diagnosis(
        tuple(causes),
        longest_chain(plan.schedule.commands),
        _repair(plan, needed),
        _repair(plan, latest),
    )


def with_waits(plan: Plan, waits: Iterable[Wait]) -> Plan:
    """The plan with a record-and-wait pair, or a host wait, for each of `waits`."""
    commands = plan.schedule.commands
    after: dict[int, list[Command]] = {}
    before: dict[int, list[Command]] = {}
    for i, w in enumerate(waits):
        source, target, event = commands[w.after].actor, commands[w.before].actor, f"repair {i}"
        after.setdefault(w.after, []).append(Command(Do.RECORD, source, event, event=event))
        do = Do.HOST_SYNC if target == HOST_ACTOR else Do.WAIT
        before.setdefault(w.before, []).append(Command(do, target, event, event=event))
    repaired: list[Command] = []
    for i, c in enumerate(commands):
        repaired += [*before.get(i, ()), c, *after.get(i, ())]
    schedule = plan.schedule
    changed = Schedule(schedule.splits, schedule.values, tuple(repaired), schedule.carried)
    return replace(plan, schedule=changed)


def longest_chain(commands: Sequence[Command]) -> int:
    """Kernels and copies that must run one after another: what the plan takes at one unit each."""
    times: dict[Actor, int] = {}
    events: dict[str | None, int] = {}
    for c in commands:
        now = max(times.get(c.actor, 0), times.get(HOST_ACTOR, 0))
        if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event):
            now = max(now, events.get(c.event, 0))
        elif c.do is Do.HOST_SYNC:
            now = max([now, *(t for a, t in times.items() if c.waits_for in (None, a))])
        times[c.actor] = now + (c.do in (Do.LAUNCH, Do.COPY))
        if c.do is Do.RECORD:
            events[c.event] = times[c.actor]
    return max(times.values(), default=0)


def _groups(found: Iterable[Race], commands: Sequence[Command]) -> list[list[Race]]:
    """Races that one wait can prevent, per pair of actors, from the earliest second access on."""
    pairs: dict[tuple[Actor, Actor], list[Race]] = {}
    for r in found:
        pair = (commands[r.first.index].actor, commands[r.second.index].actor)
        pairs.setdefault(pair, []).append(r)
    groups = []
    for left in pairs.values():
        while left:
            point = min(r.second.index for r in left)
            groups.append([r for r in left if r.first.index < point])
            left = [r for r in left if r.first.index >= point]
    return groups


def _wait(group: Sequence[Race]) -> Wait:
    """The wait of a group: as early in the first stream, as late in the second, as will do."""
    return Wait(max(r.first.index for r in group), min(r.second.index for r in group))


def _one_by_one(found: Iterable[Race]) -> list[Wait]:
    """One wait for each second access: more of them, and nobody waits longer than it must."""
    last: dict[int, int] = {}
    for r in found:
        last[r.second.index] = max(last.get(r.second.index, -1), r.first.index)
    return [Wait(after, before) for before, after in last.items()]


def _needed(plan: Plan, waits: list[Wait]) -> list[Wait]:
    """Those that the others do not make superfluous."""
    for w in list(waits):
        others = [x for x in waits if x != w]
        if others and not races(with_waits(plan, others)):
            waits = others
    return waits


def _repair(plan: Plan, waits: Sequence[Wait]) -> Repair:
    repaired = with_waits(plan, waits)
    proved = not isinstance(examine(repaired), CounterExample)
    return Repair(tuple(waits), longest_chain(repaired.schedule.commands), proved)


def _text(plan: Plan, wait: Wait) -> str:
    first, second = (plan.schedule.commands[i] for i in (wait.after, wait.before))
    return f"{second.label!r} on {second.actor} after {first.label!r} on {first.actor}"
