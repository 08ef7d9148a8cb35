"""Happens-before of the unrolled plan, by vector clocks.

Every actor's commands are totally ordered, so it is enough to know, for each command, how many of
every other actor's commands are complete before it. Enqueue order is a linear extension (every rule
points backwards in the list), so one pass computes all clocks. A clock changes only where an actor
hears of another one: the commands between share one list.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ggraph.plan import HOST_ACTOR, Actor, Command, Do

Clock = list[int]  # by actor; the entry of the actor whose clock it is means nothing


@dataclass(frozen=True)
class Clocks:
    """`actor[u]` and `place[u]` (1, 2, ..) say where command u stands, `others[u]` what it waits
    for: the number of commands of each other actor that happen before it."""

    actor: list[int]
    place: list[int]
    others: list[Clock]

    def ordered(self, u: int, v: int) -> bool:
        """Whether u happens before v (u enqueued earlier), or is v."""
        a = self.actor[u]
        return a == self.actor[v] or self.others[v][a] >= self.place[u]

    def ends_complete(self, runs: int) -> bool:
        """Whether the host knows at the end of each of `runs` runs that all their work is done."""
        if not self.actor:
            return True
        count = len(self.actor) // runs
        per_run = Counter(self.actor[:count])
        host = max((u for u in range(count) if self.actor[u] == 0), default=None)
        return host is not None and all(
            self.others[host + k * count][a] >= (k + 1) * n
            for k in range(runs)
            for a, n in per_run.items()
            if a
        )


@dataclass
class Progress:
    """How far every actor is: its commands so far, and what it has heard of the others."""

    actors: dict[Actor, int]
    count: list[int]
    heard: list[Clock]

    def hear(self, a: int, b: int, count: int, heard: Clock) -> None:
        """Actor a goes on when b's first `count` commands are done, with what b knew by then.

        Who has heard of these commands, from whomever, has heard with them what b knew.
        """
        mine = self.heard[a]
        if a == b or mine[b] >= count:
            return
        joined = [x if x > y else y for x, y in zip(mine, heard, strict=True)]
        joined[b] = count
        self.heard[a] = joined


Mark = tuple[int, int, Clock]  # an actor, its commands so far, what it had heard


Also = Callable[[Clocks, Progress], Iterable[Mark]]


def clocks(commands: Sequence[Command], runs: int, also: Also | None = None) -> Clocks:
    """Clocks of `runs` consecutive runs of the list; command i of run k is number k * n + i.

    `also` is asked before each command what else it is to wait for: what would that order?
    """
    actors: dict[Actor, int] = {HOST_ACTOR: 0}
    for actor in (a for c in commands for a in (c.actor, c.waits_for) if a is not None):
        actors.setdefault(actor, len(actors))
    now = Progress(actors, [0] * len(actors), [[0] * len(actors) for _ in actors])
    found = Clocks([], [], [])
    recorded: dict[str | None, Mark] = {}
    for c in (c for _ in range(runs) for c in commands):
        a = actors[c.actor]
        if now.count[0]:
            now.hear(a, 0, now.count[0], now.heard[0])  # enqueued by the host
        for mark in _awaited(c, now, recorded):
            now.hear(a, *mark)
        for mark in also(found, now) if also is not None else ():
            now.hear(a, *mark)
        now.count[a] += 1
        if c.do is Do.RECORD:
            recorded[c.event] = (a, now.count[a], now.heard[a])
        found.actor.append(a)
        found.place.append(now.count[a])
        found.others.append(now.heard[a])
    return found


def _awaited(c: Command, now: Progress, recorded: dict[str | None, Mark]) -> Iterator[Mark]:
    """What a wait or a host synchronisation hears of.

    An event that nothing has recorded yet holds nobody up, as in CUDA.
    """
    if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event is not None):
        if c.event in recorded:
            yield recorded[c.event]
    elif c.do is Do.HOST_SYNC:
        meant = now.actors.values() if c.waits_for is None else [now.actors[c.waits_for]]
        yield from [(b, now.count[b], now.heard[b]) for b in meant]
