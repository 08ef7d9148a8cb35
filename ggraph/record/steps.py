"""A recording cut where nothing is in flight: what lies between can be proved by itself.

At a *quiescent* point the host knows that everything it enqueued is complete, so nothing before it
can meet anything after it. A window that begins or ends elsewhere proves nothing: the race of a
pipelined prompt lies between micro-batches, and each of them alone is fine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ggraph.record.log import HOST_STREAM, Record, Recording

Clock = dict[int, int]  # stream -> how many of its commands are complete


@dataclass(frozen=True)
class Step:
    """Records [start, stop) of a recording, from one quiescent point to another."""

    recording: Recording
    start: int
    stop: int
    whole: bool = True  # False: the recording ended while something was in flight

    @property
    def records(self) -> Sequence[Record]:
        """What the host did in it."""
        return self.recording.records[self.start : self.stop]


def steps(recording: Recording) -> list[Step]:
    """Every step of a recording. What the host does alone belongs to the device work behind it."""
    found, start, busy = [], 0, False
    known = _Known()
    for i, r in enumerate(recording.records, 1):
        known.take(r)
        busy |= r.kind in ("graph", "copy") and r.stream != HOST_STREAM
        if busy and known.quiescent:
            found.append(Step(recording, start, i))
            start, busy = i, False
    if busy:
        found.append(Step(recording, start, len(recording.records), whole=False))
    return found


class _Known:
    """What the host knows to be complete, by the clocks of streams and events."""

    def __init__(self) -> None:
        self._streams: dict[int, Clock] = {}  # what is complete when its last command is
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}

    def take(self, r: Record) -> None:
        if r.kind == "sync":
            table, key = (self._streams, r.stream) if r.event is None else (self._events, r.event)
            _join(self._host, table.get(key or 0, {}))
        elif r.stream is not None and r.stream != HOST_STREAM:
            clock = self._streams.setdefault(r.stream, {})
            if r.kind == "wait":
                _join(clock, self._events.get(r.event or 0, {}))
            clock[r.stream] = r.at + max(1, len(r.kernels))
            if r.kind == "rec" and r.event is not None:
                self._events[r.event] = dict(clock)

    @property
    def quiescent(self) -> bool:
        """Whether everything that was enqueued is known to be complete."""
        return all(self._host.get(s, 0) >= c.get(s, 0) for s, c in self._streams.items())


def _join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)
