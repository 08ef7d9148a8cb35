"""A machine of simulated devices: queues, events, a virtual clock, and a timeline.

The host enqueues entries; nothing runs until the host does something that memory can tell (a host
access or a synchronisation). Then the machine's `Order` chooses, again and again, one entry whose
stream and events allow it, or lets the host go on. So every legal interleaving of all devices and
the host can be realised. An entry runs as one step: races inside a kernel are not simulated.
"""

from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ggraph.backends.protocol import Memory
from ggraph.backends.sim.orders import InOrder, Order
from ggraph.errors import BackendError
from ggraph.plan import HOST_ACTOR, Actor
from ggraph.tensor import Array


@dataclass(frozen=True)
class Span:
    """One bar of the timeline: virtual seconds, who, and what."""

    start: float
    stop: float
    actor: Actor
    label: str


@dataclass(eq=False)
class Entry:
    """One enqueued command. A mark (record or wait) has no `run`; a wait names its record."""

    seq: int
    actor: Actor
    label: str
    seconds: float
    run: Callable[[], None] | None
    enqueued_at: float
    record: "Entry | None" = None
    done: bool = False
    stop: float = 0.0  # virtual time of its end, once done
    earliest: float = 0.0

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for a record that is not complete."""
        return self.record is not None and not self.record.done


@dataclass(eq=False)
class Machine:
    """All simulated devices of one computer, and its host."""

    order: Order = field(default_factory=InOrder)
    timeline: list[Span] = field(default_factory=list)
    host_time: float = 0.0
    bytes_copied: int = 0  # by copies that have run
    # Bool per byte; what nobody gave back goes with its last user, and is never another's.
    valid: MutableMapping[Memory, Array] = field(default_factory=WeakKeyDictionary)
    _queues: dict[Actor, deque[Entry]] = field(default_factory=dict)
    _latest: dict[str, Entry] = field(default_factory=dict)
    _free: dict[Actor, float] = field(default_factory=dict)
    _floor: float = 0.0  # no entry starts before one that ran before it
    _seq: int = 0

    def enqueue(
        self, actor: Actor, label: str, seconds: float, run: Callable[[], None] | None
    ) -> Entry:
        """Put a command at the end of a stream."""
        self._seq += 1
        entry = Entry(self._seq, actor, label, seconds, run, self.host_time)
        self._queues.setdefault(actor, deque()).append(entry)
        if run is not None:
            self.order.enqueued(label)
        return entry

    def record(self, actor: Actor, event: str) -> None:
        """Mark the present end of a stream as the latest record of `event`."""
        self._latest[event] = self.enqueue(actor, f"record:{event}", 0.0, None)

    def wait(self, actor: Actor, event: str) -> None:
        """Make a stream wait for the latest record of `event` so far; none: for nothing."""
        if event in self._latest:
            self.enqueue(actor, f"wait:{event}", 0.0, None).record = self._latest[event]

    def host(self, label: str, run: Callable[[], None], seconds: float = 0.0) -> None:
        """A host access: whatever the order wants first, then `run`."""
        self._advance(lambda: True)
        begin = max(self.host_time, self._floor)
        run()
        self.host_time = self._floor = begin
        self.host_time += seconds
        self.timeline.append(Span(begin, self.host_time, HOST_ACTOR, label))
        self.order.ran(label)

    def synchronise(
        self, device: str | None = None, stream: int | None = None, event: str | None = None
    ) -> None:
        """Block the host until an event, a stream, a device, or the whole machine is complete."""
        if event is not None:
            targets = [self._latest[event]] if event in self._latest else []
        else:
            targets = [q[-1] for a, q in self._queues.items() if q and _meant(a, device, stream)]
        self._advance(lambda: all(t.done for t in targets))
        self.host_time = max([self.host_time, *(t.stop for t in targets)])

    def abandon(self, device: str) -> None:
        """Forget what is enqueued on a device: what waits for it need not wait any more."""
        for actor, queue in self._queues.items():
            if actor.device == device:
                for entry in queue:
                    entry.done = True
                queue.clear()

    def pending(self) -> list[str]:
        """Labels of what is enqueued and has not run, by stream."""
        return [f"{a}: {e.label}" for a, q in sorted(self._queues.items()) for e in q if not e.done]

    def _advance(self, may_stop: Callable[[], bool]) -> None:
        while True:
            ready = self._ready()
            stop = may_stop()
            if not ready and not stop:
                raise BackendError(f"the machine is stuck: {'; '.join(self.pending()[:8])}")
            if not ready:
                return
            chosen = self.order.choose(ready, stop)
            if chosen is None:
                return
            assert isinstance(chosen, Entry), chosen
            self._run(chosen)

    def _ready(self) -> list[Entry]:
        """Heads of the streams that may run now; marks are passed at once, they move no bytes."""
        while any(self._pass_marks(q) for q in self._queues.values()):
            continue
        found = [q[0] for q in self._queues.values() if q and q[0].run is not None]
        for e in found:
            e.earliest = max(self._free.get(e.actor, 0.0), e.enqueued_at, self._floor)
        return found

    def _pass_marks(self, queue: deque[Entry]) -> bool:
        passed = False
        while queue and queue[0].run is None and not queue[0].is_blocked:
            mark = queue.popleft()
            free = self._free.get(mark.actor, 0.0)
            mark.stop = max(free, mark.record.stop if mark.record else 0.0)
            self._free[mark.actor] = mark.stop
            mark.done = passed = True
        return passed

    def _run(self, entry: Entry) -> None:
        assert entry.run is not None, entry.label
        self._queues[entry.actor].popleft()
        entry.run()
        self._floor = entry.earliest
        entry.stop = self._free[entry.actor] = entry.earliest + entry.seconds
        entry.done = True
        self.timeline.append(Span(entry.earliest, entry.stop, entry.actor, entry.label))
        self.order.ran(entry.label)


def _meant(actor: Actor, device: str | None, stream: int | None) -> bool:
    return device in (None, actor.device) and stream in (None, actor.stream)
