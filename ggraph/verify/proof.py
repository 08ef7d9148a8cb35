"""The proof itself: every access of the unrolled plan against the history of its bytes.

Legend: u, v numbers of commands in the unrolled plan (command i of run k is k * n + i), s a
segment of a buffer, a, r, w accesses.

Each write is checked against the last write before it and the reads since, each read against the
last write. So when no check fails, all writes of a byte form one chain and every read has its
place in it: looking at neighbours is enough for all pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate

from ggraph.plan import Access, Command, Do, Plan
from ggraph.verify.blame import Blame
from ggraph.verify.clocks import Clocks
from ggraph.verify.report import CounterExample
from ggraph.verify.segments import BEFORE, History, Segment, Tag
from ggraph.verify.spans import Span, meetings, merged
from ggraph.verify.static import period

Fault = CounterExample | None
Home = tuple[History, Sequence[int]]  # of a value: the bytes of its buffer, its slots' offsets
MOST_VISITS = 1 << 25  # accesses, and segments that they meet: a million commands take half


@dataclass
class Proof:
    """One pass over `runs` runs of a plan that has no static fault; counts what it checked."""

    plan: Plan
    clocks: Clocks
    runs: int
    pairs: int = 0
    reads: int = 0
    visits: int = 0
    reuses: set[tuple[str, str]] = field(default_factory=set)
    _period: int = field(init=False)
    _homes: dict[str, Home] = field(default_factory=dict)  # of values
    _producer: dict[str, int] = field(default_factory=dict)  # value -> command that writes it
    _heirs: Mapping[str, str] = field(default_factory=dict)
    _lasting: Sequence[Access] = ()  # what outlives a run
    _blame: Blame = field(init=False)

    def __post_init__(self) -> None:
        self._blame = Blame(self.plan, self._producer)

    def fault(self) -> Fault:
        """The first race or wrong value, in enqueue order of the later command."""
        schedule = self.plan.schedule
        histories = {b.name: History(b.nbytes) for b in self.plan.memory.buffers.values()}
        regions = self.plan.memory.regions.items()
        self._homes = {name: (histories[r.buffer], r.offsets) for name, r in regions}
        for i, c in enumerate(schedule):
            if c.do is not Do.HOST_FREE:
                self._producer.update((a.value, i) for a in c.writes)
        self._heirs, self._period = schedule.carried, period(self.plan)
        reads = [_once(c.reads) for c in schedule]
        lasting = (v for v in schedule.values.values() if (v.kept or v.initial) and v.nbytes)
        self._lasting = [Access(v.name, 0, v.nbytes) for v in lasting]
        self._begin()
        count = len(schedule.commands)
        ended = None
        for run in range(self.runs):
            for i, c in enumerate(schedule):
                if found := self._command(run * count + i, run, c, reads[i]):
                    return found
            if ended is not None:  # a reader in this run would have told more
                return ended
            ended = next(self._end(run), None)
        return ended

    def _begin(self) -> None:
        """Initial values stand in their bytes before anything runs: a state where the first run
        reads it, since later runs read its heir, all others wherever some run reads them."""
        for v in self.plan.schedule.values.values():
            if v.initial and v.nbytes and v.same_as is None:
                history, offsets = self._homes[v.name]
                for offset in offsets[: 1 if v.name in self._heirs else None]:
                    history.write(offset, offset + v.nbytes, (v.name, BEFORE, offset), -1)

    def _end(self, run: int) -> Iterator[CounterExample]:
        """What outlives a run holds what the next run, of this plan or another, must find.

        Any run may be the last one: the very first too, and where slots rotate each of a period
        ends elsewhere.
        """
        for a in self._lasting:
            reader = run if a.value in self._producer else run + 1
            history, start, stop = self._place(a, reader)
            expected = self._expected(a.value, reader, start)
            for s in self._pieces(history, start, stop):
                if s.tag != expected:
                    yield self._blame.wrong(s, None, a, expected)
            if self.visits > MOST_VISITS:
                yield _spent()

    def _command(self, u: int, run: int, c: Command, reads: Sequence[Access]) -> Fault:
        for a in reads:
            if found := self._read(u, run, a):
                return found
            if self.visits > MOST_VISITS:
                return _spent()
        if c.writes and run < self._period:  # later runs repeat these places
            for found in self._alias(u, run, c):
                return found
        for a in c.writes:
            if found := self._write(u, run, a, freed=c.do is Do.HOST_FREE):
                return found
        return None

    def _place(self, a: Access, run: int) -> tuple[History, int, int]:
        history, offsets = self._homes[a.value]
        base = offsets[run % len(offsets)]
        return history, base + a.start, base + a.stop

    def _pieces(self, history: History, start: int, stop: int) -> list[Segment]:
        """The segments of a range, counted."""
        found = history.within(start, stop)
        self.visits += 1 + len(found)
        return found

    def _read(self, u: int, run: int, a: Access) -> Fault:
        value = a.value
        history, offsets = self._homes[value]
        base, made = offsets[run % len(offsets)], value in self._producer
        expected = (value, run, base) if made else self._expected(value, run, base)
        clocks, actor = self.clocks, self.clocks.actor[u]
        for s in self._pieces(history, base + a.start, base + a.stop):
            if (v := s.writer) >= 0:
                self.pairs += 1
                if not clocks.ordered(v, u):
                    return self._blame.race(s, v, u, a)
            if s.tag != expected:
                return self._blame.wrong(s, u, a, expected)
            s.readers[actor] = u
        self.reads += 1
        return None

    def _write(self, u: int, run: int, a: Access, *, freed: bool) -> Fault:
        history, offsets = self._homes[a.value]
        base, clocks = offsets[run % len(offsets)], self.clocks
        start, stop = base + a.start, base + a.stop
        for s in self._pieces(history, start, stop):
            for v in (*s.readers.values(), s.writer):
                if v >= 0 and v != u:
                    self.pairs += 1
                    if not clocks.ordered(v, u):
                        return self._blame.race(s, v, u, a)
            if s.tag is not None and s.tag[0] != a.value:
                self.reuses.add((s.tag[0], a.value))
        history.write(start, stop, None if freed else (a.value, run, base), u)
        return None

    def _expected(self, value: str, run: int, base: int) -> Tag:
        """The write that a read of `value`, which begins at `base`, must see in run `run`."""
        while value not in self._producer:
            heir = self._heirs.get(value)
            if heir is None or run == 0:
                return (value, BEFORE, base)
            value, run = heir, run - 1  # which no command need have written either
        return (value, run, base)

    def _alias(self, u: int, run: int, c: Command) -> Iterator[CounterExample]:
        """A command whose result lies on what it reads, or on another result of its own."""
        values, reads = self.plan.schedule.values, c.reads
        if c.do is Do.COPY:
            turns = [*_turns(c.writes)], [*_turns(reads)]
        else:
            written = {id(self._homes[w.value][0]) for w in c.writes}
            reads = tuple([r for r in reads if id(self._homes[r.value][0]) in written])
            # Not what one result overwrites and another may only replace, byte for byte, or not.
            over = (frozenset((w.value, values[w.value].same_as)) for w in c.writes)
            reads = _deduplicated(reads, frozenset.intersection(*over))
        for i, j in self._meetings(run, c.writes, reads):
            w, r = c.writes[i], reads[j]
            ahead = turns[0][i] - turns[1][j] if c.do is Do.COPY else None
            if not self._may_overwrite(w, r, run, ahead):
                leave = r.value in (values[w.value].same_as, *values[w.value].may_replace)
                why = "in place byte for byte alone" if leave else "not do that in place"
                what = f"over {r.value!r}, which it reads, and may {why}"
                yield self._blame.clash(u, w, r, self._common(w, r, run), what)
        for i, j in self._meetings(run, c.writes, c.writes) if len(c.writes) > 1 else ():
            w, other = c.writes[i], c.writes[j]
            if w.value != other.value:
                what = f"and {other.value!r} to the same bytes"
                yield self._blame.clash(u, w, other, self._common(w, other, run), what)

    def _meetings(
        self, run: int, one: Sequence[Access], other: Sequence[Access]
    ) -> Iterator[tuple[int, int]]:
        """Which accesses of `one` and of `other` touch common bytes, by their places there."""
        rooms: dict[int, tuple[list[Span], list[Span]]] = {}
        for k, side in enumerate((one, other)):
            for number, a in enumerate(side):
                history, start, stop = self._place(a, run)
                rooms.setdefault(id(history), ([], []))[k].append((start, stop, number))
        for spans in rooms.values():
            yield from meetings(*spans)

    def _may_overwrite(self, w: Access, r: Access, run: int, ahead: int | None) -> bool:
        """Declared overwrites may; in place needs a promise, and byte i must come from byte i.

        Of a copy `ahead` says by how many bytes `w` comes later among its writes than `r` among its
        reads: a byte that it reads may be overwritten by itself alone, in whatever order it moves.
        """
        value = self.plan.schedule.values[w.value]
        declared, promised = r.value in (value.same_as, w.value), r.value in value.may_replace
        (_, *mine), (_, *theirs) = self._place(w, run), self._place(r, run)
        if ahead is not None:
            return (declared or promised) and mine[0] - theirs[0] == ahead
        return declared or (promised and mine == theirs)

    def _common(self, a: Access, b: Access, run: int) -> tuple[int, int]:
        """The bytes that two accesses share, which meet."""
        (_, start, stop), (_, begin, end) = self._place(a, run), self._place(b, run)
        return max(start, begin), min(stop, end)


def _spent() -> CounterExample:
    """The rest would take too long. Asked where segments are only looked at: a write leaves one."""
    message = f"accesses meet more than {MOST_VISITS} pieces of bytes: too many to prove"
    return CounterExample("capacity", message)


def _once(reads: Sequence[Access]) -> Sequence[Access]:
    several = len({a.value for a in reads}) < len(reads)
    return tuple(dict.fromkeys(reads)) if several else reads


def _turns(accesses: Sequence[Access]) -> Iterator[int]:
    """Of each access the bytes before it, where all are moved end to end."""
    return accumulate((a.stop - a.start for a in accesses), initial=0)


def _deduplicated(
    reads: Sequence[Access], overwritten: AbstractSet[str | None]
) -> tuple[Access, ...]:
    """Each range once; of values that all results overwrite anyway the ranges joined."""
    joined: dict[str, list[tuple[int, int]]] = {}
    found: list[Access] = []
    for a in dict.fromkeys(reads):
        if a.value in overwritten:
            joined.setdefault(a.value, []).append((a.start, a.stop))
        else:
            found.append(a)
    found += [Access(name, *span) for name, spans in joined.items() for span in merged(spans)]
    return tuple(found)
