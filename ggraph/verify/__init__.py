"""Plan -> VerifiedPlan, or a counter-example. Floor 6: shares no code with the passes.

Written from one page of rules, the happens-before of host and streams, and not from the planner's
code. The plan is unrolled into its steady state; then, in enqueue order (which every ordering rule
respects), each access is held against the last write of its bytes and the reads since:

1. race freedom: two accesses to a byte, one of them a write, are ordered;
2. provenance: the last write before a read is the producer of the value that is read, in the run
   that is meant;
3. bounds, alignment, capacity, and complete declarations (`static`).

Because each write is checked against the write and the reads before it, all writes of a byte are
totally ordered when the check passes, so looking at the last one is enough.

Limits: nothing is said of races inside a kernel, and the proof is as good as the accesses that the
commands declare.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ggraph.plan import _SEAL, Access, Certificate, Command, Do, Plan, VerifiedPlan
from ggraph.verify.clocks import Clocks, clocks
from ggraph.verify.live import live_bytes
from ggraph.verify.report import (
    CounterExample,
    Rejected,
    Repair,
    Site,
    neighbourhood,
    repairs,
)
from ggraph.verify.segments import History, Segment, Tag
from ggraph.verify.static import static_faults

__all__ = ["CounterExample", "Rejected", "Repair", "Site", "examine", "verify"]

BEFORE = -1  # the "run" in which initial values were written


def verify(plan: Plan, *, iterations: int | None = None) -> VerifiedPlan:
    """Prove a plan sound. Raises Rejected, a PlanError that carries the counter-example.

    `iterations` is the number of runs that are unrolled (default: two, or one more than the
    rotating slots).
    """
    verdict = examine(plan, iterations=iterations)
    if isinstance(verdict, CounterExample):
        raise Rejected(verdict)
    return VerifiedPlan(plan, verdict, seal=_SEAL)


def examine(plan: Plan, *, iterations: int | None = None) -> Certificate | CounterExample:
    """The verdict on a plan, without raising."""
    for fault in static_faults(plan):
        return fault
    slots = max((len(r.offsets) for r in plan.memory.regions.values()), default=1)
    runs = iterations if iterations is not None else max(2, slots + 1)
    proof = _Proof(plan, clocks(plan.schedule.commands, runs), runs)
    for fault in proof.faults():
        return fault
    peak = plan.memory.arena_bytes
    bound = live_bytes(plan)
    several = len({c.actor for c in plan.schedule if c.do in (Do.LAUNCH, Do.COPY)}) > 1
    return Certificate(
        commands=len(plan.schedule.commands),
        unrolled=runs * len(plan.schedule.commands),
        pairs_checked=proof.pairs,
        reads_proved=proof.reads,
        reuses=len(proof.reuses),
        peak_bytes=peak,
        live_bound_bytes=bound,
        concurrency_bytes=max(0, peak - bound) if several else 0,
    )


@dataclass
class _Proof:
    """One pass over the unrolled plan."""

    plan: Plan
    clocks: Clocks
    runs: int
    pairs: int = 0
    reads: int = 0
    reuses: set[tuple[str, str]] = field(default_factory=set)
    histories: dict[str, History] = field(default_factory=dict)
    produced: frozenset[str] = frozenset()
    heirs: Mapping[str, str] = field(default_factory=dict)

    def faults(self) -> Iterator[CounterExample]:
        """Every race and wrong value, in enqueue order of the later command."""
        schedule = self.plan.schedule
        self.histories = {b.name: History(b.nbytes) for b in self.plan.memory.buffers.values()}
        self.produced = frozenset(a.value for c in schedule for a in c.writes)
        self.heirs = schedule.carried
        self._begin()
        count = len(schedule.commands)
        for run in range(self.runs):
            for i, c in enumerate(schedule):
                yield from self._command(run * count + i, run, c)

    def _begin(self) -> None:
        """Initial values stand in their bytes before anything runs."""
        for v in self.plan.schedule.values.values():
            if v.initial and v.nbytes and v.same_as is None:
                for offset in self.plan.memory.regions[v.name].offsets:
                    history = self.histories[self.plan.memory.regions[v.name].buffer]
                    history.write(offset, offset + v.nbytes, (v.name, BEFORE), -1)

    def _command(self, u: int, run: int, c: Command) -> Iterator[CounterExample]:
        for a in c.reads:
            yield from self._read(u, run, a)
        yield from self._alias(u, run, c)
        for a in c.writes:
            yield from self._write(u, run, a)

    def _place(self, a: Access, run: int) -> tuple[History, int, int]:
        region = self.plan.memory.regions[a.value]
        base = region.offsets[run % len(region.offsets)]
        return self.histories[region.buffer], base + a.start, base + a.stop

    def _read(self, u: int, run: int, a: Access) -> Iterator[CounterExample]:
        history, start, stop = self._place(a, run)
        expected = self._expected(a.value, run)
        for s in history.within(start, stop) if start < stop else ():
            if s.writer >= 0:
                self.pairs += 1
                if not self.clocks.ordered(s.writer, u):
                    yield self._race(s, s.writer, u, a)
            if s.tag != expected:
                yield self._wrong(s, u, a, expected)
            s.readers[self.clocks.actor[u]] = u
        self.reads += 1

    def _write(self, u: int, run: int, a: Access) -> Iterator[CounterExample]:
        history, start, stop = self._place(a, run)
        if start >= stop:
            return
        for s in history.within(start, stop):
            rivals = [*s.readers.values(), *([s.writer] if s.writer >= 0 else [])]
            for v in rivals:
                if v != u:
                    self.pairs += 1
                    if not self.clocks.ordered(v, u):
                        yield self._race(s, v, u, a)
            if s.tag is not None and s.tag[0] != a.value:
                self.reuses.add((s.tag[0], a.value))
        history.write(start, stop, (a.value, run), u)

    def _expected(self, value: str, run: int) -> Tag:
        """The write that a read of `value` in run `run` must see."""
        if value in self.produced:
            return (value, run)
        heir = self.heirs.get(value, value)
        if heir == value or run == 0:
            return (value, BEFORE)
        return (heir, run - 1)

    def _alias(self, u: int, run: int, c: Command) -> Iterator[CounterExample]:
        """A command that writes over what it reads must have been allowed to."""
        values = self.plan.schedule.values
        for w in c.writes:
            allowed = {values[w.value].same_as, *values[w.value].may_replace, w.value}
            for r in c.reads:
                clash = self._overlap(w, r, run)
                if clash and (r.value not in allowed or self._shifted(w, r, run)):
                    yield CounterExample(
                        "alias",
                        f"{c.label!r} writes {w.value!r} over {r.value!r}, which it reads, and "
                        "its kernel does not promise to bear that",
                        self._site(u),
                        None,
                        self.plan.memory.regions[w.value].buffer,
                        *clash,
                        values=(w.value, r.value),
                        nearby=self._nearby(u),
                    )

    def _overlap(self, w: Access, r: Access, run: int) -> tuple[int, int] | None:
        if self.plan.memory.regions[w.value].buffer != self.plan.memory.regions[r.value].buffer:
            return None
        _, a, b = self._place(w, run)
        _, x, y = self._place(r, run)
        return (max(a, x), min(b, y)) if max(a, x) < min(b, y) else None

    def _shifted(self, w: Access, r: Access, run: int) -> bool:
        """In place means: both values begin at the same byte."""
        regions = self.plan.memory.regions
        a, b = regions[w.value].offsets, regions[r.value].offsets
        return a[run % len(a)] != b[run % len(b)]

    def _race(self, s: Segment, first: int, second: int, a: Access) -> CounterExample:
        one, two = self._at(first), self._at(second)
        other = s.tag[0] if s.tag is not None else a.value
        shared = other != a.value and self.plan.schedule.values[a.value].same_as != other
        sizes = [self.plan.schedule.values[v].nbytes for v in (other, a.value)]
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
            repairs(one, two, min(sizes) if shared else 0),
            self._nearby(first, second),
        )

    def _wrong(self, s: Segment, u: int, a: Access, expected: Tag) -> CounterExample:
        c = self._at(u)
        if s.tag is None:
            kind, found = "unwritten", "bytes that nobody has written"
        else:
            kind = "stale"
            when = "from before the first run" if s.tag[1] == BEFORE else f"of run {s.tag[1]}"
            found = f"{s.tag[0]!r} {when}"
        meant = "its initial contents" if expected[1] == BEFORE else f"run {expected[1]}"
        return CounterExample(
            kind,
            f"{c.label!r} reads {a.value!r} and means {expected[0]!r} of {meant}, "
            f"but finds {found}",
            self._site(s.writer) if s.writer >= 0 else None,
            self._site(u),
            self.plan.memory.regions[a.value].buffer,
            s.start,
            s.stop,
            (a.value, *((s.tag[0],) if s.tag is not None else ())),
            nearby=self._nearby(u),
        )

    def _at(self, u: int) -> Command:
        return self.plan.schedule.commands[u % len(self.plan.schedule.commands)]

    def _site(self, u: int) -> Site:
        count = len(self.plan.schedule.commands)
        return Site(u % count, u // count, str(self._at(u)))

    def _nearby(self, *numbers: int) -> str:
        commands = self.plan.schedule.commands
        return neighbourhood(commands, *(u % len(commands) for u in numbers))
