"""The proof itself: every access of the unrolled plan against the history of its bytes.

Legend: u, v numbers of commands in the unrolled plan (command i of run k is k * n + i), s a
segment of a buffer, a, r, w accesses.

Each write is checked against the last write before it and the reads since, each read against the
last write. So when no check fails, all writes of a byte form one chain and every read has its
place in it: looking at neighbours is enough for all pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ggraph.plan import Access, Command, Do, Plan
from ggraph.verify.clocks import Clocks
from ggraph.verify.report import (
    CounterExample,
    Repair,
    Site,
    neighbourhood,
    producer_repair,
    race_repairs,
    tenant_repair,
)
from ggraph.verify.segments import BEFORE, History, Segment, Tag
from ggraph.verify.static import period


@dataclass
class Proof:
    """One pass over `runs` runs of a plan that has no static fault; counts what it checked."""

    plan: Plan
    clocks: Clocks
    runs: int
    pairs: int = 0
    reads: int = 0
    reuses: set[tuple[str, str]] = field(default_factory=set)
    _period: int = 1
    _histories: dict[str, History] = field(default_factory=dict)
    _producer: dict[str, int] = field(default_factory=dict)  # value -> command that writes it
    _heirs: Mapping[str, str] = field(default_factory=dict)

    def faults(self) -> Iterator[CounterExample]:
        """Every race and wrong value, in enqueue order of the later command."""
        schedule = self.plan.schedule
        self._histories = {b.name: History(b.nbytes) for b in self.plan.memory.buffers.values()}
        for i, c in enumerate(schedule):
            if c.do is not Do.HOST_FREE:
                self._producer.update((a.value, i) for a in c.writes)
        self._heirs, self._period = schedule.carried, period(self.plan)
        self._begin()
        count = len(schedule.commands)
        for run in range(self.runs):
            for i, c in enumerate(schedule):
                yield from self._command(run * count + i, run, c)
            if run >= self.runs - self._period:
                yield from self._end(run)

    def _begin(self) -> None:
        """Initial values stand in their bytes before anything runs."""
        for v in self.plan.schedule.values.values():
            if v.initial and v.nbytes and v.same_as is None:
                region = self.plan.memory.regions[v.name]
                for offset in region.offsets:
                    history = self._histories[region.buffer]
                    history.write(offset, offset + v.nbytes, (v.name, BEFORE), -1)

    def _end(self, run: int) -> Iterator[CounterExample]:
        """What outlives a run holds what the next run, of this plan or another, must find.

        Any run may be the last one, and where slots rotate each of a period ends elsewhere.
        """
        for v in self.plan.schedule.values.values():
            if (v.kept or v.initial) and v.nbytes:
                a = Access(v.name, 0, v.nbytes)
                reader = run if v.name in self._producer else run + 1
                history, start, stop = self._place(a, reader)
                expected = self._expected(v.name, reader)
                for s in history.within(start, stop):
                    if s.tag != expected:
                        yield self._wrong(s, None, a, expected)

    def _command(self, u: int, run: int, c: Command) -> Iterator[CounterExample]:
        for a in c.reads:
            yield from self._read(u, run, a)
        if run < self._period:  # later runs repeat these places
            yield from self._alias(u, run, c)
        for a in c.writes:
            yield from self._write(u, run, a, freed=c.do is Do.HOST_FREE)

    def _place(self, a: Access, run: int) -> tuple[History, int, int]:
        region = self.plan.memory.regions[a.value]
        base = region.offsets[run % len(region.offsets)]
        return self._histories[region.buffer], base + a.start, base + a.stop

    def _read(self, u: int, run: int, a: Access) -> Iterator[CounterExample]:
        history, start, stop = self._place(a, run)
        expected, actor = self._expected(a.value, run), self.clocks.actor[u]
        for s in history.within(start, stop):
            if s.writer >= 0:
                self.pairs += 1
                if not self.clocks.ordered(s.writer, u):
                    yield self._race(s, s.writer, u, a)
            if s.tag != expected:
                yield self._wrong(s, u, a, expected)
            s.readers[actor] = u
        self.reads += 1

    def _write(self, u: int, run: int, a: Access, freed: bool) -> Iterator[CounterExample]:
        history, start, stop = self._place(a, run)
        for s in history.within(start, stop):
            for v in (*s.readers.values(), s.writer):
                if v >= 0 and v != u:
                    self.pairs += 1
                    if not self.clocks.ordered(v, u):
                        yield self._race(s, v, u, a)
            if s.tag is not None and s.tag[0] != a.value:
                self.reuses.add((s.tag[0], a.value))
        history.write(start, stop, None if freed else (a.value, run), u)

    def _expected(self, value: str, run: int) -> Tag:
        """The write that a read of `value` in run `run` must see."""
        if value in self._producer:
            return (value, run)
        heir = self._heirs.get(value)
        if heir is None or run == 0:
            return (value, BEFORE)
        return self._expected(heir, run - 1)  # which no command need have written either

    def _alias(self, u: int, run: int, c: Command) -> Iterator[CounterExample]:
        """A command whose result lies on what it reads, or on another result of its own."""
        for i, w in enumerate(c.writes):
            for r in c.reads:
                if self._overlap(w, r, run) and not self._may_overwrite(w, r, run):
                    what = f"over {r.value!r}, which it reads, and may not do that in place"
                    yield self._clash(u, run, w, r, what)
            for other in c.writes[:i]:
                if other.value != w.value and self._overlap(w, other, run):
                    yield self._clash(u, run, w, other, f"and {other.value!r} to the same bytes")

    def _may_overwrite(self, w: Access, r: Access, run: int) -> bool:
        """Declared overwrites may; in place needs a promise, and byte i must come from byte i."""
        value = self.plan.schedule.values[w.value]
        if r.value in (value.same_as, w.value):
            return True
        return r.value in value.may_replace and self._place(w, run)[1:] == self._place(r, run)[1:]

    def _overlap(self, a: Access, b: Access, run: int) -> tuple[int, int] | None:
        one, a_start, a_stop = self._place(a, run)
        two, b_start, b_stop = self._place(b, run)
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        return (start, stop) if one is two and start < stop else None

    def _clash(self, u: int, run: int, w: Access, other: Access, what: str) -> CounterExample:
        c, nbytes = self._at(u), self.plan.schedule.values[w.value].nbytes
        start, stop = self._overlap(w, other, run) or (0, 0)
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

    def _race(self, s: Segment, first: int, second: int, a: Access) -> CounterExample:
        one, two = self._at(first), self._at(second)
        other = s.tag[0] if s.tag is not None else a.value
        values, count = self.plan.schedule.values, len(self.plan.schedule.commands)
        smaller = min((values[other], values[a.value]), key=lambda v: v.nbytes)
        apart = smaller if self._ground(other) != self._ground(a.value) else None
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

    def _wrong(self, s: Segment, u: int | None, a: Access, expected: Tag) -> CounterExample:
        reader = f"{self._at(u).label!r} reads" if u is not None else "what follows needs"
        return CounterExample(
            "unwritten" if s.tag is None else "stale",
            f"{reader} {a.value!r} and means {expected[0]!r} {_when(expected)}, but finds "
            f"{self._found(s)}",
            self._site(s.writer) if s.writer >= 0 else None,
            self._site(u) if u is not None else None,
            self.plan.memory.regions[a.value].buffer,
            s.start,
            s.stop,
            (a.value, *((s.tag[0],) if s.tag is not None else ())),
            repairs=self._remedies(s, u, expected),
            nearby=self._nearby(*(v for v in (s.writer, u) if v is not None and v >= 0)),
        )

    def _found(self, s: Segment) -> str:
        if s.tag is not None:
            return f"{s.tag[0]!r} {_when(s.tag)}"
        if s.writer >= 0:
            return f"bytes that {self._at(s.writer).label!r} gave up"
        return "bytes that nobody has written"

    def _remedies(self, s: Segment, u: int | None, expected: Tag) -> tuple[Repair, ...]:
        """A longer lifetime if the value was there and is gone, its producer's turn if not yet."""
        value, run = expected
        count, values = len(self.plan.schedule.commands), self.plan.schedule.values
        made = run * count + self._producer.get(value, 0)
        if u is not None and run >= 0 and made > u:
            producer = self._producer[value]
            return (producer_repair(self._at(made), self._at(u), producer, u % count),)
        gone = run >= 0 or values[value].initial
        if not gone or s.tag is None or self._ground(s.tag[0]) == self._ground(value):
            return ()
        return (tenant_repair(values[value], values[s.tag[0]]),)

    def _ground(self, name: str) -> str:
        """The value on whose bytes `name` lies by declaration."""
        values = self.plan.schedule.values
        while (below := values[name].same_as) is not None:
            name = below
        return name

    def _at(self, u: int) -> Command:
        return self.plan.schedule.commands[u % len(self.plan.schedule.commands)]

    def _site(self, u: int) -> Site:
        count = len(self.plan.schedule.commands)
        return Site(u % count, u // count, str(self._at(u)))

    def _nearby(self, *numbers: int) -> str:
        commands = self.plan.schedule.commands
        return neighbourhood(commands, *(u % len(commands) for u in numbers))


def _when(tag: Tag) -> str:
    return "from before the first run" if tag[1] == BEFORE else f"of run {tag[1]}"
