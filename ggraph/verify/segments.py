"""Who last wrote each byte of a buffer, and who has read it since.

A buffer is a sorted list of segments with equal history. Accesses arrive in enqueue order; a
segment is split where an access begins or ends within it.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

Tag = tuple[str, int, int]  # value, the run that wrote it, and where its first byte lay then
BEFORE = -1  # the "run" in which initial values were written


@dataclass(slots=True)
class Segment:
    """Bytes with one history. `writer` is a command number, -1 for the state before the first run.

    `tag` is None where nothing of use has been written. `readers` has the last reader of each
    actor since the write: an actor's earlier readers are ordered before its last one.
    """

    start: int
    stop: int
    tag: Tag | None = None
    writer: int = -1
    readers: dict[int, int] = field(default_factory=dict)


class History:
    """The segments of one buffer of `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self._segments = [Segment(0, nbytes)]
        self._starts = [0]

    def within(self, start: int, stop: int) -> list[Segment]:
        """The segments that make up [start, stop), split so that they fit exactly."""
        if start >= stop:
            return []
        s = self._segments[bisect_right(self._starts, start) - 1]
        if s.start == start and s.stop == stop:  # mostly
            return [s]
        return self._segments[self._cut(start) : self._cut(stop)]

    def write(self, start: int, stop: int, tag: Tag | None, writer: int) -> None:
        """Replace the history of [start, stop)."""
        if start >= stop:
            return
        i = bisect_right(self._starts, start) - 1
        s = self._segments[i]
        if s.start == start and s.stop == stop:  # mostly
            self._segments[i] = Segment(start, stop, tag, writer)
            return
        first, last = self._cut(start), self._cut(stop)
        self._segments[first:last] = [Segment(start, stop, tag, writer)]
        self._starts[first:last] = [start]

    def _cut(self, at: int) -> int:
        """Index of the segment that begins at `at`, made to exist, or the buffer's end."""
        i = bisect_right(self._starts, at) - 1
        s = self._segments[i]
        if s.start == at:
            return i
        if s.stop == at:
            return i + 1
        rest = Segment(at, s.stop, s.tag, s.writer, dict(s.readers))
        s.stop = at
        self._segments.insert(i + 1, rest)
        self._starts.insert(i + 1, at)
        return i + 1
