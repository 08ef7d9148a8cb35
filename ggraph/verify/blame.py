"""Counter-examples of the proof, in words and with their repairs. What is wrong is decided there.

Legend: u a number of a command in the unrolled plan, s a segment of a buffer, a, w accesses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ggraph.plan import Access, Command, Plan
from ggraph.verify.report import (
    CounterExample,
    Repair,
    Site,
    neighbourhood,
    producer_repair,
    race_repairs,
    tenant_repair,
)
from ggraph.verify.segments import BEFORE, Segment, Tag
from ggraph.verify.spans import Span, meetings


@dataclass(frozen=True)
class Blame:
    """Says who is at fault in a plan; `producer` maps a value to the command that writes it."""

    plan: Plan
    producer: Mapping[str, int]

    def clash(
        self, u: int, w: Access, other: Access, bytes_: tuple[int, int], what: str
    ) -> CounterExample:
        """Command u writes `w` where it may not: over `other`, on these bytes."""
        c, nbytes = self._at(u), self.plan.schedule.values[w.value].nbytes
        start, stop = bytes_
        return CounterExample(
            "alias",
            f"{c.label!r} writes {w.value!r} {what}",
            self._site(u),
            None,
            self.plan.memory.regions[w.value].buffer,
            start,
            stop,
            (w.value, other.value),
            repairs=(Repair(f"give {w.value!r} bytes of its own", nbytes=nbytes, apart=w.value),),
            nearby=self._nearby(u),
        )

    def race(self, s: Segment, first: int, second: int, a: Access) -> CounterExample:
        """Nothing orders command `first`, known from s, and `second`, which accesses `a`."""
        one, two = self._at(first), self._at(second)
        other = s.tag[0] if s.tag is not None else a.value
        values, count = self.plan.schedule.values, len(self.plan.schedule.commands)
        smaller = min((values[other], values[a.value]), key=lambda v: v.nbytes)
        apart = smaller if self._part(first, second, smaller.name) else None
        return CounterExample(
            "race",
            f"{one.label!r} and {two.label!r} touch the same bytes and nothing orders them",
            self._site(first),
            self._site(second),
            self.plan.memory.regions[a.value].buffer,
            s.start,
            s.stop,
            (other, a.value),
            f"{one.label!r} on {one.actor} -> {two.label!r} on {two.actor}",
            race_repairs(one, two, (first % count, second % count), apart),
            self._nearby(first, second),
        )

    def wrong(self, s: Segment, u: int | None, a: Access, expected: Tag) -> CounterExample:
        """Command u, or what follows the run where it is None, finds in s another value."""
        reader = f"{self._at(u).label!r} reads" if u is not None else "what follows needs"
        return CounterExample(
            "unwritten" if s.tag is None else "stale",
            f"{reader} {a.value!r} and means {expected[0]!r} {_when(expected)}, but finds "
            f"{self._found(s)}{_shifted(s, expected)}{self._uncarried(s, expected)}",
            self._site(s.writer) if s.writer >= 0 else None,
            self._site(u) if u is not None else None,
            self.plan.memory.regions[a.value].buffer,
            s.start,
            s.stop,
            (a.value, *((s.tag[0],) if s.tag is not None else ())),
            repairs=self._remedies(s, u, expected),
            nearby=self._nearby(*(v for v in (s.writer, u) if v is not None and v >= 0)),
        )

    def _uncarried(self, s: Segment, expected: Tag) -> str:
        """What may have been meant where a state is found as an earlier run left it."""
        value, run, _ = expected
        if run != BEFORE or s.tag is None or s.tag[1] == BEFORE:
            return ""
        states = self.plan.schedule.carried
        same = self._ground(s.tag[0]) == self._ground(value)
        return "" if value in states or not same else f" (no `carried` names {value!r})"

    def _found(self, s: Segment) -> str:
        if s.tag is not None:
            return f"{s.tag[0]!r} {_when(s.tag)}"
        if s.writer >= 0:
            return f"bytes that {self._at(s.writer).label!r} gave up"
        return "bytes that nobody has written"

    def _remedies(self, s: Segment, u: int | None, expected: Tag) -> tuple[Repair, ...]:
        """A longer lifetime if the value was there and is gone, its producer's turn if not yet."""
        value, values = expected[0], self.plan.schedule.values
        producer = self.producer.get(value)
        if producer is not None and u is not None and producer > u:  # already in the first run
            return (producer_repair(self._at(producer), self._at(u), producer, u),)
        gone = producer is not None or values[value].initial
        if not gone or s.tag is None or self._ground(s.tag[0]) == self._ground(value):
            return ()
        return (tenant_repair(values[value], values[s.tag[0]]),)

    def _ground(self, name: str) -> str:
        """The value on whose bytes `name` lies by declaration."""
        values = self.plan.schedule.values
        while (below := values[name].same_as) is not None:
            name = below
        return name

    def _part(self, u: int, v: int, name: str) -> bool:
        """Whether commands u and v clash nowhere once `name` lies on bytes of its own."""
        mine, theirs = (self._touched(x, self._ground(name)) for x in (u, v))
        return not any(
            writes or rewrites
            for room in mine.keys() & theirs.keys()
            for writes, rewrites in meetings(mine[room], theirs[room])
        )

    def _touched(self, u: int, ground: str) -> Mapping[tuple[str, bool], list[Span]]:
        """What u touches and whether it writes there, by buffer and by whether it is `ground`'s."""
        found: dict[tuple[str, bool], list[Span]] = {}
        c, run = self._at(u), u // len(self.plan.schedule.commands)
        for a, writes in (*((r, 0) for r in c.reads), *((w, 1) for w in c.writes)):
            region = self.plan.memory.regions[a.value]
            start = region.start(run)
            room = found.setdefault((region.buffer, self._ground(a.value) == ground), [])
            room.append((start + a.start, start + a.stop, writes))
        return found

    def _at(self, u: int) -> Command:
        return self.plan.schedule.commands[u % len(self.plan.schedule.commands)]

    def _site(self, u: int) -> Site:
        count = len(self.plan.schedule.commands)
        return Site(u % count, u // count, str(self._at(u)))

    def _nearby(self, *numbers: int) -> str:
        commands = self.plan.schedule.commands
        return neighbourhood(commands, *(u % len(commands) for u in numbers))


def _shifted(s: Segment, expected: Tag) -> str:
    """The right value is there, with another byte of it where each should be."""
    if s.tag is None or s.tag[:2] != expected[:2]:
        return ""
    return f" at offset {s.tag[2]}, where it should lie at {expected[2]}"


def _when(tag: Tag) -> str:
    return "from before the first run" if tag[1] == BEFORE else f"of run {tag[1]}"
