"""Many races, few causes: a wait that is missing, and the races that it would have prevented.

Races between the same two actors are intervals of the enqueue order: the first access is enqueued
at f, the second at s, and a wait of the second actor for the first, put anywhere between, orders
them. So the smallest set of waits is the smallest set of points that meets all intervals, which
greedy choice by right end finds. The list is walked with its clocks, so that a race which waits of
other actors order by then asks for none; and the repaired plan is proved. Within a run, with two
actors, no set is smaller; with more there may be one that is (3 of 51 random plans of three
streams, held against all sets: one wait too many).

Races between runs are intervals that end in a later one. A wait is put into every run, so it stands
in each of those that are walked; for a command behind it in the list it waits as of the run before.

Legend: n commands of a run, u a number of a command in the unrolled list.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggraph.errors import printable
from ggraph.plan import HOST_ACTOR, Actor, Command, Do, Plan, Schedule
from ggraph.verify import Race, Rejected, examine, races
from ggraph.verify.clocks import Clocks, Mark, Progress, clocks
from ggraph.verify.report import CounterExample, Site
from ggraph.verify.static import period


@dataclass(frozen=True)
class Wait:
    """Command `before` should wait for command `after` (indices of the schedule), as of the run
    before where that stands behind it in the list."""

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

    def lines(self) -> Iterator[str]:
        """Each cause, then each repair with its cost."""
        yield from (printable(str(cause)) for cause in self.causes)
        for name, r in (("fewest waits", self.fewest), ("latest waits", self.latest)):
            proof = "proved" if r.proved else "not proved"
            chain = f"longest chain {self.chain:,} -> {r.chain:,} kernels"
            yield f"repair, {name}: {len(r.waits)}, {chain}, {proof}"

    def to_json(self) -> dict[str, object]:
        """The same as plain data; `chain` without the waits, and with them."""
        return {
            "causes": [{"missing": c.text, "races": len(c.races)} for c in self.causes],
            "repairs": {
                name: {"waits": len(r.waits), "chain": [self.chain, r.chain], "proved": r.proved}
                for name, r in (("fewest", self.fewest), ("latest", self.latest))
            },
        }


def diagnose(plan: Plan) -> Diagnosis | None:
    """Why a plan has races, within a run and between runs; None where it has none, or more than
    `races` lists."""
    try:
        found = races(plan)
    except Rejected:
        return None
    if not found:
        return None
    waits = _Waits(found, plan.schedule.commands)
    clocks(plan.schedule.commands, 2 * period(plan), waits.before)
    causes = [Cause(w, tuple(of), _text(plan, w)) for w, of in waits.by_cause().items()]
    return Diagnosis(
        tuple(causes),
        longest_chain(plan.schedule.commands),
        _repair(plan, list(waits.made)),
        _repair(plan, _one_by_one(found, plan.schedule.commands)),
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


class _Waits:
    """Waits that are put in while the list is walked, each with the races that it prevents."""

    def __init__(self, found: Iterable[Race], commands: Sequence[Command]) -> None:
        self.made: dict[Wait, list[Race]] = {}
        self._ends: list[int] = []  # of each wait, the u before which it was put in
        self._put: dict[int, list[Wait]] = {}  # by what waits
        self._at: dict[int, list[Race]] = {}  # by second access
        self._between: dict[tuple[Actor, Actor], deque[Race]] = {}  # by first access
        self._commands = commands
        for r in sorted(found, key=lambda r: self._number(r.first)):
            self._at.setdefault(self._number(r.second), []).append(r)
            self._between.setdefault(self._actors(r), deque()).append(r)

    def _number(self, s: Site) -> int:
        return s.iteration * len(self._commands) + s.index

    def _actors(self, r: Race) -> tuple[Actor, Actor]:
        return self._commands[r.first.index].actor, self._commands[r.second.index].actor

    def before(self, known: Clocks, now: Progress) -> Iterator[Mark]:
        """What the next command must wait for besides, and knows then."""
        here, n = len(known.actor), len(self._commands)
        for w in self._put.get(here % n, ()):
            yield from self._mark(w, known)
        for r in self._at.get(here, ()):
            first, mine = self._number(r.first), now.actors[self._commands[here % n].actor]
            if now.heard[mine][known.actor[first]] < known.place[first]:
                yield from self._mark(self._prevented(r, here), known)

    def _mark(self, w: Wait, known: Clocks) -> Iterator[Mark]:
        """What a wait hears of behind `known`: the latest command `after`, if there is one."""
        here, n = len(known.actor), len(self._commands)
        u = here - 1 - (here - 1 - w.after) % n
        if u >= 0:
            yield known.actor[u], known.place[u], known.others[u]

    def by_cause(self) -> dict[Wait, list[Race]]:
        """All races; one that several waits together prevent counts with the last of them."""
        made = list(self.made)
        for r in (r for left in self._between.values() for r in left):
            last = bisect_right(self._ends, self._number(r.second)) - 1
            self.made[made[max(last, 0)]].append(r)
        self._between.clear()
        return self.made

    def _prevented(self, r: Race, here: int) -> Wait:
        """For the last first access of races that a wait here can prevent."""
        queue, group = self._between[self._actors(r)], list[Race]()
        while queue and self._number(queue[0].first) < here:
            group.append(queue.popleft())
        last = max(self._number(g.first) for g in group if self._number(g.second) >= here)
        wait = Wait(last % len(self._commands), here % len(self._commands))
        self.made[wait] = group
        self._ends.append(here)
        self._put.setdefault(wait.before, []).append(wait)
        return wait


def _one_by_one(found: Iterable[Race], commands: Sequence[Command]) -> list[Wait]:
    """One wait for each second access and actor that it races with: more of them, and nobody waits
    longer than it must."""
    last: dict[tuple[int, Actor], int] = {}
    for r in found:
        key, after = (r.second.index, commands[r.first.index].actor), r.first.index
        after -= len(commands) if after > r.second.index else 0  # of the run before
        last[key] = max(last.get(key, after), after)
    return [Wait(after % len(commands), before) for (before, _), after in last.items()]


def _repair(plan: Plan, waits: Sequence[Wait]) -> Repair:
    repaired = with_waits(plan, waits)
    proved = not isinstance(examine(repaired), CounterExample)
    return Repair(tuple(waits), longest_chain(repaired.schedule.commands), proved)


def _text(plan: Plan, wait: Wait) -> str:
    first, second = (plan.schedule.commands[i] for i in (wait.after, wait.before))
    run = " of the run before" if wait.after > wait.before else ""
    return f"{second.label!r} on {second.actor} after {first.label!r} on {first.actor}{run}"
