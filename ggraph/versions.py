"""What bytes of a buffer hold as commands write to them, and the values that this makes up.

A version is what one write left, or what was found; a piece is the part of a buffer that still
holds it. `plan_builder` collects both, and names values by them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ggraph.plan import Access

Origin = Literal["write", "before", "nobody"]  # who made some bytes what they are


@dataclass(eq=False)
class Version:
    """Bytes [start, stop) of a buffer, as one write left them or as they were found."""

    name: str
    buffer: str
    start: int
    stop: int
    origin: Origin
    replaces: "Version | None" = None  # in place, on bytes of that one


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a buffer, which hold part of a version."""

    start: int
    stop: int
    version: Version


class Contents:
    """What each byte of one buffer holds at present: pieces without overlap, in order.

    `origin` is that of bytes which no command has written.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._pieces: list[Piece] = []
        self._starts: list[int] = []

    def within(self, start: int, stop: int) -> list[Piece]:
        """The written part of [start, stop), cut to it."""
        if start >= stop:
            return []
        first, last = self._range(start, stop)
        pieces = self._pieces[first:last]
        return [Piece(max(p.start, start), min(p.stop, stop), p.version) for p in pieces]

    def put(self, new: Piece) -> None:
        """From now on [new.start, new.stop) holds that."""
        first, last = self._range(new.start, new.stop)
        old = self._pieces[first:last]
        left = [Piece(p.start, new.start, p.version) for p in old[:1] if p.start < new.start]
        right = [Piece(new.stop, p.stop, p.version) for p in old[-1:] if p.stop > new.stop]
        self._pieces[first:last] = [*left, new, *right]
        self._starts[first:last] = [p.start for p in (*left, new, *right)]

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._pieces[first].stop <= start:
            first += 1
        return first, max(first, bisect_left(self._starts, stop))


class Names:
    """Names that stand for one thing each, whatever others are called."""

    def __init__(self, taken: Mapping[str, int] | None = None) -> None:
        self.taken = dict(taken or {})  # each with the last number that was put behind it

    def new(self, wanted: str) -> str:
        """`wanted`, with a number behind it where something has that name."""
        name = wanted
        while name in self.taken:
            self.taken[wanted] += 1
            name = f"{wanted}.{self.taken[wanted]}"
        self.taken[name] = 1
        return name


class Cuts:
    """Where versions are cut in two: per buffer, offsets in order.

    A value is carried to the next run as a whole. So where the end of a run holds parts of several
    versions in bytes that its beginning read as one, all versions are cut at their borders.
    """

    def __init__(
        self, versions: Iterable[Version], contents: Mapping[str, Contents], names: Names
    ) -> None:
        at: dict[str, set[int]] = {}
        for v in (v for v in versions if v.origin == "before"):
            final = contents[v.buffer].within(v.start, v.stop)
            if any(p.version is not v for p in final):
                at.setdefault(v.buffer, set()).update(x for p in final for x in (p.start, p.stop))
        self._at = {buffer: sorted(offsets) for buffer, offsets in at.items()}
        self._names = names
        self._named: dict[tuple[str, int], str] = {}  # parts, but for the first of each version

    def parts(self, v: Version) -> list[tuple[int, int]]:
        """The ranges that a version falls into."""
        return self.within(v.buffer, v.start, v.stop)

    def within(self, buffer: str, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop), cut."""
        at = self._at.get(buffer, [])
        inner = at[bisect_right(at, start) : bisect_left(at, stop)]
        return list(pairwise([start, *inner, stop]))

    def begin(self, v: Version, at: int) -> int:
        """Where the part of `v` that has byte `at` begins."""
        offsets = self._at.get(v.buffer, [])
        i = bisect_right(offsets, at)
        return max(v.start, offsets[i - 1]) if i else v.start

    def name(self, v: Version, start: int) -> str:
        """The value that is made of the part of `v` that begins at `start`."""
        if start == v.start:
            return v.name
        part = v.name, start  # versions' names are unique
        if part not in self._named:
            self._named[part] = self._names.new(f"{v.name}@{start - v.start}")
        return self._named[part]


def carried(
    versions: Sequence[Version], cuts: Cuts, contents: Mapping[str, Contents]
) -> dict[str, str]:
    """State -> what holds it at the end of a run."""
    found: dict[str, str] = {}
    for v in (v for v in versions if v.origin == "before"):
        for p in contents[v.buffer].within(v.start, v.stop):
            for start, _ in cuts.within(v.buffer, p.start, p.stop):
                if p.version is not v:
                    found[cuts.name(v, start)] = cuts.name(p.version, start)
    return found


def accesses(pieces: Iterable[Piece], cuts: Cuts) -> tuple[Access, ...]:
    """What a command that touches these pieces touches of values."""
    found = []
    for p in pieces:
        for start, stop in cuts.within(p.version.buffer, p.start, p.stop):
            base = cuts.begin(p.version, start)
            found.append(Access(cuts.name(p.version, base), start - base, stop - base))
    return tuple(found)
