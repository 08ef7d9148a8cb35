"""Plans executed on symbolic bytes in every order that host and streams allow. No test is in here.

An operational meaning, with no notion of happens-before (which stands at the end, by itself): the
host walks down the list, streams take commands from their queues, a wait holds its stream up until
the record that was current when it was enqueued is done. `brute` visits every reachable state. Each
cell of memory holds the value, the run that wrote it and where it began; reads check the tags.

What it calls harmful is exactly: two enabled commands that touch a byte, one of them writing (a
race, whether or not tags would agree); a read, or the end of any run, that finds another tag than
the one that is meant (wrong); a command whose own result lies on its own source without
leave (clash); a value that no execution ever makes (unmade).

Legend: u number of an unrolled command, q queue of a stream, cell a run of bytes never cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm

from ggraph.plan import HOST_ACTOR, HOST_STEPS, Access, Actor, Command, Do, Plan

Tag = tuple[str, int, int] | None
Cells = tuple[int, ...]
Memory = tuple[Tag, ...]
State = tuple[tuple[int, ...], Memory]  # commands done per actor (host first), memory


class TooLarge(Exception):
    """More states than the caller allowed."""


@dataclass(frozen=True)
class Outcome:
    """What some execution can show; `states` counts the states that were visited."""

    race: bool
    wrong: bool
    clash: bool
    unmade: bool
    states: int

    @property
    def is_sound(self) -> bool:
        return not (self.race or self.wrong or self.clash or self.unmade)


@dataclass(frozen=True)
class _Step:
    """One command of one run: who, after which steps, which cells, which tags."""

    actor: int
    after: tuple[tuple[int, int], ...]  # (actor, number of its commands that must be done)
    reads: tuple[tuple[Cells, Tag], ...]
    writes: tuple[tuple[Cells, Tag], ...]

    @property
    def touches_memory(self) -> bool:
        return bool(self.reads or self.writes)


@dataclass
class _Machine:
    plan: Plan
    runs: int
    cells: dict[str, list[int]] = field(default_factory=dict)  # buffer -> cuts
    base: dict[str, int] = field(default_factory=dict)  # buffer -> number of its first cell
    queues: list[list[_Step]] = field(default_factory=list)
    begin: Memory = ()
    ends: dict[tuple[int, ...], list[tuple[Cells, Tag]]] = field(default_factory=dict)

    def build(self) -> None:
        self._cut()
        self._begin()
        actors = {HOST_ACTOR: 0}
        for c in self.plan.schedule:
            actors.setdefault(c.actor, len(actors))
        self.queues = [[] for _ in actors]
        recorded: dict[str, tuple[int, int]] = {}
        for run in range(self.runs):
            for c in self.plan.schedule:
                a = actors[c.actor]
                after = self._after(c, actors, recorded)
                self.queues[a].append(_Step(a, after, self._reads(c, run), self._writes(c, run)))
                if c.do is Do.RECORD:
                    recorded[c.event or ""] = (a, len(self.queues[a]))
        per_run = [len(q) // self.runs for q in self.queues]
        for run in range(self.runs):
            done = self.settle(tuple((run + 1) * n for n in per_run))
            self.ends[done] = list(self._lasting(run))

    def _after(
        self, c: Command, actors: dict[Actor, int], recorded: dict[str, tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """Besides its place in its queue: enqueued by the host, and what a wait waits for."""
        host = ((0, len(self.queues[0])),) if c.do not in HOST_STEPS else ()
        if c.event is not None and c.do is not Do.RECORD:
            return (*host, recorded[c.event]) if c.event in recorded else host
        if c.do is Do.HOST_SYNC:
            return tuple(
                (a, len(self.queues[a]))
                for actor, a in actors.items()
                if c.waits_for in (None, actor)
            )
        return host

    # Memory.

    def _cut(self) -> None:
        cuts: dict[str, set[int]] = {b: {0} for b in self.plan.memory.buffers}
        for v in self.plan.schedule.values.values():
            cuts[self.plan.memory.regions[v.name].buffer] |= self._edges(
                Access(v.name, 0, v.nbytes)
            )
        for c in self.plan.schedule:
            for a in (*c.reads, *c.writes):
                cuts[self.plan.memory.regions[a.value].buffer] |= self._edges(a)
        count = 0
        for name, found in cuts.items():
            self.cells[name], self.base[name] = sorted(found), count
            count += len(found)
        self.begin = (None,) * count

    def _edges(self, a: Access) -> set[int]:
        offsets = self.plan.memory.regions[a.value].offsets
        return {o + edge for o in offsets for edge in (a.start, a.stop)}

    def start(self, value: str, run: int) -> int:
        offsets = self.plan.memory.regions[value].offsets
        return offsets[run % len(offsets)]

    def where(self, a: Access, run: int) -> Cells:
        region, offset = self.plan.memory.regions[a.value], self.start(a.value, run)
        start, stop = offset + a.start, offset + a.stop
        first = self.base[region.buffer]
        spans = enumerate(pairwise(self.cells[region.buffer]))
        return tuple(first + i for i, (x, y) in spans if start <= x and y <= stop)

    def _begin(self) -> None:
        memory = list(self.begin)
        for v in self.plan.schedule.values.values():
            if v.initial:
                slots = len(self.plan.memory.regions[v.name].offsets)
                for slot in range(1 if v.name in self.plan.schedule.carried else slots):
                    for cell in self.where(Access(v.name, 0, v.nbytes), slot):
                        memory[cell] = (v.name, -1, self.start(v.name, slot))
        self.begin = tuple(memory)

    # Meaning.

    def tag(self, value: str, run: int) -> Tag:
        """What run `run` must find where it reads `value`: whose bytes, and not shifted."""
        return *self.meant(value, run), self.start(value, run)

    def meant(self, value: str, run: int) -> tuple[str, int]:
        """The value that run `run` means by `value`, and the run that writes it."""
        made = (w.value for c in self.plan.schedule if c.do is not Do.HOST_FREE for w in c.writes)
        if value in made:
            return (value, run)
        heir = self.plan.schedule.carried.get(value)
        return (value, -1) if heir is None or run == 0 else self.meant(heir, run - 1)

    def _reads(self, c: Command, run: int) -> tuple[tuple[Cells, Tag], ...]:
        return tuple((self.where(a, run), self.tag(a.value, run)) for a in c.reads)

    def _writes(self, c: Command, run: int) -> tuple[tuple[Cells, Tag], ...]:
        lost = c.do is Do.HOST_FREE
        tags = (None if lost else (a.value, run, self.start(a.value, run)) for a in c.writes)
        return tuple(zip((self.where(a, run) for a in c.writes), tags, strict=True))

    def _lasting(self, run: int) -> Iterator[tuple[Cells, Tag]]:
        """What must be found once `run` is over, by the next run of this plan or of another."""
        for v in self.plan.schedule.values.values():
            if v.kept or v.initial:
                own = self.meant(v.name, 0) == (v.name, 0)  # made anew in each run
                reader = run if own else run + 1
                yield self.where(Access(v.name, 0, v.nbytes), reader), self.tag(v.name, reader)

    # Execution.

    def settle(self, done: tuple[int, ...]) -> tuple[int, ...]:
        """Go on with everything that touches no memory: it only enables more."""
        progress, moved = list(done), True
        while moved:
            moved = False
            for a, q in enumerate(self.queues):
                while self._ready(a, progress) and not q[progress[a]].touches_memory:
                    progress[a] += 1
                    moved = True
        return tuple(progress)

    def _ready(self, a: int, done: list[int] | tuple[int, ...]) -> bool:
        q = self.queues[a]
        return done[a] < len(q) and all(done[b] >= n for b, n in q[done[a]].after)

    def enabled(self, done: tuple[int, ...]) -> list[_Step]:
        return [q[done[a]] for a, q in enumerate(self.queues) if self._ready(a, done)]


def _conflict(one: _Step, two: _Step) -> bool:
    def cells(found: tuple[tuple[Cells, Tag], ...]) -> set[int]:
        return {c for some, _ in found for c in some}

    wrote, wrote_too = cells(one.writes), cells(two.writes)
    return bool(wrote & (wrote_too | cells(two.reads)) or wrote_too & cells(one.reads))


def _finds(memory: Memory, wanted: Iterable[tuple[Cells, Tag]]) -> bool:
    return all(memory[c] == tag for cells, tag in wanted for c in cells)


def _after(memory: Memory, step: _Step) -> Memory:
    cells = list(memory)
    for where, tag in step.writes:
        for c in where:
            cells[c] = tag
    return tuple(cells)


def _bytes(plan: Plan, accesses: Iterable[Access], run: int) -> list[tuple[str, int]]:
    """The bytes of these accesses end to end, as buffer and place."""
    found = []
    for a in accesses:
        region = plan.memory.regions[a.value]
        base = region.offsets[run % len(region.offsets)]
        found += [(region.buffer, base + at) for at in range(a.start, a.stop)]
    return found


def moves_over_itself(plan: Plan, c: Command, run: int) -> bool:
    """Whether a copy of which no order is known (byte by byte, from either end, by many at once)
    may overwrite a byte before it has read it."""
    into = {at: k for k, at in enumerate(_bytes(plan, c.writes, run))}
    return any(into.get(at, k) != k for k, at in enumerate(_bytes(plan, c.reads, run)))


def clashes(plan: Plan, machine: _Machine) -> bool:
    """Whether a command writes over its own source, or writes two values to one place."""
    for c in plan.schedule:
        for run in range(machine.runs):
            copies = c.do is Do.COPY
            if copies and moves_over_itself(plan, c, run):
                return True
            for i, w in enumerate(c.writes):
                mine, value = machine.where(w, run), plan.schedule.values[w.value]
                for a in c.reads:
                    theirs = machine.where(a, run)
                    in_place = a.value in value.may_replace and (copies or mine == theirs)
                    if set(mine) & set(theirs) and not (in_place or a.value == value.same_as):
                        return True
                if any(set(mine) & set(machine.where(x, run)) for x in c.writes[:i]):
                    return True
    return False


def unmade(machine: _Machine) -> bool:
    """Whether some value with bytes is neither there at the start nor written by any step."""
    steps = (s for q in machine.queues for s in q)
    tags = {*machine.begin, *(tag for s in steps for cells, tag in s.writes if cells)}
    there = {tag[0] for tag in tags if tag is not None}
    values = machine.plan.schedule.values.values()
    return any(v.nbytes and not v.initial and v.name not in there for v in values)


def period(plan: Plan) -> int:
    return lcm(*(len(x.offsets) for x in plan.memory.regions.values()))


def brute(plan: Plan, runs: int = 0, limit: int = 50_000, *, memo: bool = True) -> Outcome:
    """Every execution of `runs` runs (default: two periods and one run more).

    Without `memo` each order is walked separately: literally every linear extension. Raises
    TooLarge beyond `limit` states; a plan with both faults is not explored to the end.
    """
    machine = _Machine(plan, runs or 2 * period(plan) + 1)
    machine.build()
    clash = clashes(plan, machine)
    race = wrong = False
    start: State = (machine.settle((0,) * len(machine.queues)), machine.begin)
    stack, seen, visited = [start], {start}, 0
    while stack and not (race and wrong):
        done, memory = stack.pop()
        visited += 1
        if visited > limit:
            raise TooLarge(f"more than {limit} states")
        steps = machine.enabled(done)
        race |= any(_conflict(x, y) for i, x in enumerate(steps) for y in steps[:i])
        wrong |= not _finds(memory, machine.ends.get(done, ()))
        for step in steps:
            wrong |= not _finds(memory, step.reads)
            progress = tuple(n + (a == step.actor) for a, n in enumerate(done))
            state = (machine.settle(progress), _after(memory, step))
            if not memo or state not in seen:
                seen.add(state)
                stack.append(state)
    return Outcome(race, wrong, clash, unmade(machine), visited)


def happens_before(commands: Sequence[Command]) -> list[set[int]]:
    """By the page of rules: what must be done before each command of a list of all runs."""
    before: list[set[int]] = []
    for v, c in enumerate(commands):
        earlier = list(enumerate(commands[:v]))
        direct = {u for u, d in earlier if d.actor in (c.actor, HOST_ACTOR)}
        if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event is not None):
            direct |= set([u for u, d in earlier if d.do is Do.RECORD and d.event == c.event][-1:])
        elif c.do is Do.HOST_SYNC:
            direct |= {u for u, d in earlier if c.waits_for in (None, d.actor)}
        before.append(direct.union(*(before[u] for u in direct)))
    return before
