"""Happens-before of the unrolled plan, by vector clocks.

Every actor's commands are totally ordered, so it is enough to know, for each command, how many of
every actor's commands are complete before it: `before[u][a]`. Enqueue order is a linear extension
(every rule points backwards in the list), so one pass computes all clocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ggraph.plan import HOST_ACTOR, Actor, Command, Do

Clock = list[int]


@dataclass(frozen=True)
class Clocks:
    """`actor[u]` and `place[u]` (1, 2, ..) say where command u stands, `before[u]` what it waits
    for: the number of commands of each actor that happen before it, itself included."""

    actor: list[int]
    place: list[int]
    before: list[Clock]

    def ordered(self, u: int, v: int) -> bool:
        """Whether u happens before v (u enqueued earlier), or is v."""
        return self.before[v][self.actor[u]] >= self.place[u]

    def ends_complete(self, runs: int) -> bool:
        """Whether the host knows at the end of each of `runs` runs that all their work is done."""
        if not self.actor:
            return True
        count = len(self.actor) // runs
        per_run = Counter(self.actor[:count])
        if not per_run[0]:
            return False
        host = max(u for u in range(count) if self.actor[u] == 0)
        return all(
            self.before[host + k * count][a] >= (k + 1) * n
            for k in range(runs)
            for a, n in per_run.items()
        )


def clocks(commands: Sequence[Command], runs: int) -> Clocks:
    """Clocks of `runs` consecutive runs of the list; command i of run k is number k * n + i."""
    actors: dict[Actor, int] = {HOST_ACTOR: 0}
    for actor in (a for c in commands for a in (c.actor, c.waits_for) if a is not None):
        actors.setdefault(actor, len(actors))
    found = Clocks([], [], [])
    last: list[Clock] = [[0] * len(actors) for _ in actors]  # clock of each actor's last command
    recorded: dict[str | None, Clock] = {}
    for c in (c for _ in range(runs) for c in commands):
        a = actors[c.actor]
        clock = _joined(last[a], last[0])  # program order, and enqueued by the host
        for other in _awaited(c, actors, last, recorded):
            clock = _joined(clock, other)
        clock[a] += 1
        last[a] = clock
        if c.do is Do.RECORD:
            recorded[c.event] = clock
        found.actor.append(a)
        found.place.append(clock[a])
        found.before.append(clock)
    return found


def _awaited(
    c: Command,
    actors: dict[Actor, int],
    last: list[Clock],
    recorded: dict[str | None, Clock],
) -> list[Clock]:
    """The clocks that a wait or a host synchronisation joins.

    An event that nothing has recorded yet holds nobody up, as in CUDA.
    """
    if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event is not None):
        return [recorded[c.event]] if c.event in recorded else []
    if c.do is Do.HOST_SYNC:
        return last if c.waits_for is None else [last[actors[c.waits_for]]]
    return []


def _joined(a: Clock, b: Clock) -> Clock:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]
