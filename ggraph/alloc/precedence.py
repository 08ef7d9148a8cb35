"""Happens-before of a schedule in its steady state, as vector clocks.

The schedule is unrolled twice: command i of run k is row i, of run k + 1 row n + i. Every actor
(the host, each stream) is a queue, so one number per actor says all that precedes a command.

Legend: n = commands of one run, A = actors, V = values, i j = rows of the unrolled list.
`clock[i, a]` = 1 + the last row of actor a that happens before row i (0: none).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ggraph.plan import HOST_ACTOR, HOST_STEPS, Actor, Command, Do, Schedule

Ints = np.ndarray[Any, np.dtype[np.int64]]
Edge = tuple[int, int]
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Precedence:
    """Happens-before of two consecutive runs; `direct[i]` are the rows that order row i."""

    n: int
    actors: tuple[Actor, ...]
    actor_of: tuple[int, ...]  # per row
    direct: tuple[tuple[int, ...], ...]
    clock: Ints  # [2 n, A]

    @cached_property
    def who(self) -> Ints:
        """`actor_of` as an array [2 n]."""
        return np.asarray(self.actor_of, dtype=np.int64)

    @cached_property
    def rows_of(self) -> tuple[Ints, ...]:
        """For each actor its rows of run k, ascending."""
        return tuple(np.flatnonzero(self.who[: self.n] == a) for a in range(len(self.actors)))

    def count_before(self, actor: int, knows: Ints) -> Ints:
        """[R, A]: how many of `actor`'s rows come before it knows of `knows` [R, A] rows of each
        actor. An actor only ever learns, so that this is a search, not a walk."""
        known = self.clock[self.rows_of[actor]]
        ranks = (np.searchsorted(known[:, b], knows[:, b]) for b in range(len(self.actors)))
        return np.stack(tuple(ranks), axis=1)

    def before(self, i: int, j: int) -> bool:
        """Whether row i happens before row j (strictly)."""
        return bool(self.clock[j, self.actor_of[i]] > i)

    def path(self, i: int, j: int) -> tuple[int, ...]:
        """A shortest chain of directly ordered rows from i to j, both included; () if none."""
        if not self.before(i, j):
            return ()
        came = {j: j}
        queue = [j]
        while i not in came:
            row = queue.pop(0)
            for p in self.direct[row]:
                if p not in came and (p == i or self.before(i, p)):
                    came[p] = row
                    queue.append(p)
        chain = [i]
        while chain[-1] != j:
            chain.append(came[chain[-1]])
        return tuple(chain)


def actor_of(c: Command) -> Actor:
    """Who executes `c`: host steps run on the host whatever they name."""
    return HOST_ACTOR if c.do in HOST_STEPS else c.actor


def precedence(schedule: Schedule, extra: Iterable[Edge] = ()) -> Precedence:
    """Vector clocks of `schedule` unrolled twice.

    `extra` adds orderings (before, after) between commands of one run, to ask what they would buy.
    """
    n = len(schedule.commands)
    rows = schedule.commands * 2
    by = [*map(actor_of, schedule.commands)]
    actors = tuple(dict.fromkeys((HOST_ACTOR, *by)))
    number = {a: k for k, a in enumerate(actors)}
    who = tuple([number[a] for a in by]) * 2
    direct = _direct(rows, who, number)
    for before, after in extra:
        for run in (0, n):
            direct[run + after] = (*direct[run + after], run + before)
    clock: list[list[int]] = []
    for preds in direct:
        known = list(clock[preds[0]]) if preds else [0] * len(actors)
        for p in preds:
            known = list(map(max, known, clock[p])) if p != preds[0] else known
            known[who[p]] = max(known[who[p]], p + 1)
        clock.append(known)
    table = np.array(clock, dtype=np.int64).reshape(2 * n, len(actors))
    return Precedence(n, actors, who, tuple(direct), table)


def _direct(
    rows: Sequence[Command], who: Sequence[int], number: Mapping[Actor, int]
) -> list[tuple[int, ...]]:
    """The rows that order each row directly."""
    last: dict[int, int] = {}  # actor -> its latest row
    recorded: dict[str, int] = {}
    out: list[tuple[int, ...]] = []
    for i, c in enumerate(rows):
        # Program order of the actor, and enqueueing: host steps precede what comes after them.
        before = {last.get(who[i]), last.get(number[HOST_ACTOR])}
        if c.event is not None and c.do in (Do.WAIT, Do.HOST_SYNC):
            before.add(recorded.get(c.event))  # the latest record enqueued before
        elif c.do is Do.HOST_SYNC:
            waits = last if c.waits_for is None else [number.get(c.waits_for, -1)]
            before.update(last.get(a) for a in waits)
        if c.do is Do.RECORD and c.event is not None:
            recorded[c.event] = i
        last[who[i]] = i
        out.append(tuple(sorted([p for p in before if p is not None])))
    return out


@dataclass(frozen=True, eq=False)
class Spans:
    """When sets of accesses (of values or blocks) happen; row r describes set r. All [R, A].

    first, last: 1 + first and last access per actor in run k (NEVER and 0: none). meet: what
    happens before every access in run k, meet2 the same in run k + 1; reach: before some access.
    """

    first: Ints
    last: Ints
    meet: Ints
    meet2: Ints
    reach: Ints

    def of(self, sets: Ints) -> "Spans":
        """Those of the given sets, in that order."""
        return Spans(*(part[sets] for part in vars(self).values()))


def accesses(schedule: Schedule) -> dict[str, list[int]]:
    """For each value the commands that read or write it, in list order."""
    found: dict[str, list[int]] = {name: [] for name in schedule.values}
    for i, c in enumerate(schedule.commands):
        for name in dict.fromkeys([a.value for a in (*c.reads, *c.writes) if a.stop > a.start]):
            found[name].append(i)
    return found


def spans(order: Precedence, sets: Sequence[Sequence[int]]) -> Spans:
    """Spans of the given sets of commands (rows of run k)."""
    shape = (len(sets), len(order.actors))
    first, meet, meet2 = (np.full(shape, NEVER, dtype=np.int64) for _ in range(3))
    last, reach = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    count = np.array([len(rows) for rows in sets], dtype=np.int64)
    used = np.flatnonzero(count)
    if len(used):
        row = np.fromiter(chain.from_iterable(sets), np.int64, count.sum())
        where = (np.repeat(np.arange(len(sets)), count), order.who[row])
        np.minimum.at(first, where, row + 1)
        np.maximum.at(last, where, row + 1)
        begin = (np.cumsum(count) - count)[used]
        meet[used] = np.minimum.reduceat(order.clock[row], begin)
        meet2[used] = np.minimum.reduceat(order.clock[row + order.n], begin)
        reach[used] = np.maximum.reduceat(order.clock[row], begin)
    return Spans(first, last, meet, meet2, reach)
