"""Events between actors: the fewest that give every step what it needs.

Each step carries a vector clock: for each actor, how many of its steps are known to be complete
when this one is. A need that the clocks already imply costs nothing; of the others only those that
no other need implies get an event. With the streams fixed this is the transitive reduction of the
cross-stream edges. A need of a host-visible device or of the host becomes a wait of the host.
"""

from dataclasses import dataclass, field

from ggraph.order.steps import Ordering, Step
from ggraph.plan import HOST_ACTOR, Actor, Command, Do
from ggraph.tensor import Kind

Clock = dict[Actor, int]


@dataclass(eq=False)
class _Clocks:
    """The clock after each step (`known`), its own place (`place`), and each actor's last clock."""

    known: list[Clock] = field(default_factory=list)
    place: list[tuple[Actor, int]] = field(default_factory=list)
    tail: dict[Actor, Clock] = field(default_factory=dict)

    def begin(self, actor: Actor) -> Clock:
        """What a step of `actor` that is enqueued now knows: its stream's past, and the host's."""
        return _join(self.tail.get(actor, {}), self.tail.get(HOST_ACTOR, {}))

    def end(self, actor: Actor, clock: Clock) -> None:
        """Append the step that knows `clock` when it begins."""
        count = self.tail.get(actor, {}).get(actor, 0) + 1
        clock[actor] = count
        self.known.append(clock)
        self.place.append((actor, count))
        self.tail[actor] = clock


def _join(a: Clock, b: Clock) -> Clock:
    found = dict(a)
    for actor, count in b.items():
        if count > found.get(actor, 0):
            found[actor] = count
    return found


def synchronised(steps: list[Step], o: Ordering) -> tuple[Command, ...]:
    """The commands with RECORD, WAIT and HOST_SYNC put in where steps need one another."""
    clocks = _Clocks()
    before: list[list[Command]] = []
    marks: dict[int, str] = {}
    for step in steps:
        actor = step.command.actor
        clock = clocks.begin(actor)
        waits: list[Command] = []
        for i in _needs(step, clock, clocks):
            event = marks.setdefault(i, f"after:{steps[i].command.label}")
            waits.append(_wait(actor, event, o))
            clock = _join(clock, clocks.known[i])
            if waits[-1].do is Do.HOST_SYNC:
                _host_knows(clocks, clocks.known[i])
        if step.command.do is Do.HOST_SYNC:
            clock = _synced(step.command, clock, clocks)
        before.append(waits)
        clocks.end(actor, clock)
    body = _merged(steps, before, marks)
    return tuple(_overlapping(body, o) if o.overlap else body)


def _needs(step: Step, clock: Clock, clocks: _Clocks) -> list[int]:
    """The steps to wait for: per actor the latest one, unless known already or through another."""
    latest: dict[Actor, int] = {}
    for i in step.after:
        actor, count = clocks.place[i]
        if count > clock.get(actor, 0) and i > latest.get(actor, -1):
            latest[actor] = i
    return [
        i
        for actor, i in latest.items()
        if not any(
            j != i and clocks.known[j].get(actor, 0) >= clocks.place[i][1] for j in latest.values()
        )
    ]


def _wait(actor: Actor, event: str, o: Ordering) -> Command:
    if actor == HOST_ACTOR or o.streams.spec(actor.device).host_visible:
        return Command(Do.HOST_SYNC, HOST_ACTOR, f"sync:{event}", event=event)
    return Command(Do.WAIT, actor, f"wait:{event}", event=event)


def _host_knows(clocks: _Clocks, clock: Clock) -> None:
    clocks.tail[HOST_ACTOR] = _join(clocks.tail.get(HOST_ACTOR, {}), clock)


def _synced(c: Command, clock: Clock, clocks: _Clocks) -> Clock:
    """What the host knows after it waited for a stream, or for all of them."""
    for actor, tail in clocks.tail.items():
        if c.waits_for in (None, actor):
            clock = _join(clock, tail)
    return clock


def _merged(steps: list[Step], before: list[list[Command]], marks: dict[int, str]) -> list[Command]:
    found: list[Command] = []
    for i, step in enumerate(steps):
        found += [*before[i], step.command]
        if i in marks:
            event = marks[i]
            found.append(Command(Do.RECORD, step.command.actor, f"record:{event}", event=event))
    return found


def _overlapping(body: list[Command], o: Ordering) -> list[Command]:
    """Let run k+1 be enqueued while run k computes.

    Each stream begins by waiting for the end of the run before on its device's other streams and on
    those that its device meets (copies of rotating inputs need not: their slot was given up two
    runs ago). The host, before it leaves run k, waits for the end of run k-1, so that the slot it
    writes next is free; with one slot it waits for the run before at once.
    """
    ends = {a: f"end:{a}" for a in sorted({c.actor for c in body if c.actor != HOST_ACTOR})}
    syncs = [_wait(HOST_ACTOR, event, o) for event in ends.values()]
    records = [Command(Do.RECORD, a, f"record:{e}", event=e) for a, e in ends.items()]
    rotates = o.n_copies > 1
    feeds = {f"copy:{t.name}" for t in o.graph.leaves(Kind.INPUT)} if rotates else set()
    found = [] if rotates else list(syncs)
    waited, met = {HOST_ACTOR}, _met(body, o)
    for c in body:
        if c.actor not in waited and c.label not in feeds and c.do is not Do.RECORD:
            waited.add(c.actor)
            others = met[c.actor.device] - {c.actor}
            found += [_wait(c.actor, e, o) for a, e in ends.items() if a in others]
        found.append(c)
    return [*found, *(syncs if rotates else ()), *records]


def _met(body: list[Command], o: Ordering) -> dict[str, set[Actor]]:
    """For each device its streams, and those of others that touch bytes which its own touch, one of
    the two writing. Who else is behind by a run, or ahead, is no matter."""
    storage = {t.name: t.storage.name for t in o.graph}
    touched: dict[Actor, tuple[set[str], set[str]]] = {}  # by each stream: in all, and written
    for c in body:
        sides = touched.setdefault(c.actor, (set(), set()))
        for of, accesses in zip(sides, ((*c.reads, *c.writes), c.writes), strict=True):
            of.update(storage.get(a.value, a.value) for a in accesses)
    found: dict[str, set[Actor]] = {}
    for a, (used, written) in touched.items():
        there = found.setdefault(a.device, set())
        for b, (also, wrote) in touched.items():
            if a.device == b.device or used & wrote or written & also:
                there.add(b)
    return found
