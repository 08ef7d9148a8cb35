"""Random small plans, sound or not, and mutants of plans. No test is in here.

`random_plan` makes anything that the rules of declaration allow: several devices and streams,
events within and across runs, rotating slots, states, overwrites, in-place results, scratch,
partial accesses, host memory that is given up. Roughly half of its plans are sound, because it
puts in most of the waits that are needed and lays out most values by their lifetimes. `mutants`
damages a plan in each way that planners are known to fail.

Legend: r source of randomness, i, j indices of commands, u bytes of one alignment unit.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from ggraph.device import HOST, DeviceSpec
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
    HOST_STEPS,
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    MemoryMap,
    Placement,
    Plan,
    Region,
    Schedule,
    Splits,
    Value,
)

UNIT = 2  # alignment and step of all sizes, so that one byte more is misaligned


def plan_of(
    devices: Sequence[DeviceSpec],
    values: Sequence[Value],
    commands: Sequence[Command],
    buffers: Sequence[Buffer],
    regions: Mapping[str, Region],
    carried: Mapping[str, str] | None = None,
) -> Plan:
    """A plan without a graph: devices, values, commands and memory are all there is to it."""
    placement = Placement(Graph("none", (), (), {}), tuple(devices), {})
    named = {v.name: v for v in values}
    schedule = Schedule(Splits(placement, ()), named, tuple(commands), carried or {})
    return Plan(schedule, MemoryMap("hb", {b.name: b for b in buffers}, dict(regions)))


def with_commands(plan: Plan, commands: Sequence[Command]) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, commands=tuple(commands)))


def with_regions(plan: Plan, changed: Mapping[str, Region]) -> Plan:
    memory = replace(plan.memory, regions={**plan.memory.regions, **changed})
    return replace(plan, memory=memory)


def with_value(plan: Plan, value: Value) -> Plan:
    values = {**plan.schedule.values, value.name: value}
    return replace(plan, schedule=replace(plan.schedule, values=values))


def whole(*values: Value) -> tuple[Access, ...]:
    return tuple(Access(v.name, 0, v.nbytes) for v in values)


def launch(actor: Actor, writes: Value, *reads: Value, label: str = "") -> Command:
    """A kernel over whole values."""
    return Command(Do.LAUNCH, actor, label or writes.name, None, whole(*reads), whole(writes))


@dataclass
class _World:
    """A plan in the making; methods are called in the order of their appearance."""

    r: random.Random
    devices: list[DeviceSpec] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)  # state -> value that holds it now
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    # What exists before any work is done.

    def hardware(self) -> None:
        visible = self.chance(0.6)
        for name in ("d0", "d1")[: self.r.randint(1, 2)]:
            streams = self.r.randint(1, 2)
            spec = DeviceSpec(name, "sim", alignment=UNIT, streams=streams, host_visible=visible)
            self.devices.append(spec)
            self.actors += [Actor(name, s) for s in range(streams)]

    def leaves(self) -> None:
        for i in range(self.r.randint(1, 2)):
            home = self.any_home() if self.devices[0].host_visible else HOST
            slots = 2 if self.chance(0.25) else 1
            v = self.new(f"input{i}", home, slots=slots)
            self.add(Command(Do.HOST_WRITE, HOST_ACTOR, v.name, v.name, (), whole(v)))
        if self.chance(0.4):
            self.new("weight", self.any_device(), external=self.chance(0.7), initial=True)
        if self.chance(0.5):
            outside = self.chance(0.7)
            v = self.new("state", self.any_device(), external=outside, initial=True)
            self.current[v.name] = v.name

    def any_device(self) -> str:
        return self.r.choice(self.devices).name

    def any_home(self) -> str:
        return self.r.choice([HOST, *(d.name for d in self.devices)])

    def new(self, name: str, home: str, nbytes: int = 0, **more: object) -> Value:
        size = nbytes or UNIT * self.r.choice((1, 1, 2, 2, 3))
        v = Value(name, home, size, **more)  # type: ignore[arg-type]
        self.values[name] = v
        return v

    def add(self, c: Command) -> None:
        self.commands.append(c)

    # Work.

    def step(self, i: int) -> None:
        actor = self.r.choice(self.actors)
        seen = [v for v in self.values.values() if self.sees(actor.device, v.device)]
        roll = self.r.random()
        if roll < 0.2 or not seen:
            self.copy(i, actor)
        elif roll < 0.35 and any(v in self.current for v in self.current):
            self.overwrite(i, actor, seen)
        else:
            self.launch(i, actor, seen)
        if self.chance(0.12):
            self.host_read(i)

    def sees(self, device: str, home: str) -> bool:
        return device == home or self.devices[0].host_visible

    def copy(self, i: int, actor: Actor) -> None:
        source = self.r.choice(list(self.values.values()))
        v = self.new(f"copy{i}", self.any_home(), source.nbytes)
        self.add(Command(Do.COPY, actor, v.name, v.name, whole(source), whole(v)))

    def overwrite(self, i: int, actor: Actor, seen: list[Value]) -> None:
        """A result on the bytes of a state, read by its own command or not."""
        for state, now in self.current.items():
            old = self.values[now]
            if self.sees(actor.device, old.device):
                v = self.new(f"next{i}", old.device, old.nbytes, same_as=now)
                others = [x for x in seen if x.name != now][: self.r.randint(0, 1)]
                reads = (old, *others) if self.chance(0.7) else tuple(others)
                self.add(launch(actor, v, *reads))
                self.current[state] = self.carried[state] = v.name
                return
        self.launch(i, actor, seen)

    def launch(self, i: int, actor: Actor, seen: list[Value]) -> None:
        reads = self.r.sample(seen, min(len(seen), self.r.choice((0, 1, 1, 2, 2))))
        like = self.r.choice(reads).nbytes if reads and self.chance(0.6) else 0
        homes = [h for h in (HOST, *(d.name for d in self.devices)) if self.sees(actor.device, h)]
        over = tuple(v.name for v in reads) if self.chance(0.6) else ()
        kept = self.chance(0.05)
        home = actor.device if self.chance(0.8) else self.r.choice(homes)
        v = self.new(f"v{i}", home, like, may_replace=over, kept=kept)
        c = Command(Do.LAUNCH, actor, v.name, v.name, tuple(map(self.part, reads)), whole(v))
        if v.nbytes > UNIT and self.chance(0.15):
            self.halves(c, v)
        elif self.chance(0.12):
            scratch = self.new(f"scratch{i}", actor.device)
            self.add(replace(c, writes=(*c.writes, *whole(scratch))))
            if self.chance(0.4):  # what one launch fills others of its stream may read
                w = self.new(f"v{i}.second", actor.device)
                both = (*c.reads, *whole(scratch))
                self.add(Command(Do.LAUNCH, actor, w.name, w.name, both, whole(w)))
        else:
            self.add(c)

    def part(self, v: Value) -> Access:
        if v.nbytes == UNIT or self.chance(0.8):
            return Access(v.name, 0, v.nbytes)
        start = self.r.randrange(0, v.nbytes, UNIT)
        return Access(v.name, start, self.r.randrange(start + UNIT, v.nbytes + 1, UNIT))

    def halves(self, c: Command, v: Value) -> None:
        """Two commands write a value between them."""
        other = self.r.choice([a for a in self.actors if self.sees(a.device, v.device)])
        self.add(replace(c, writes=(Access(v.name, 0, UNIT),)))
        rest = (Access(v.name, UNIT, v.nbytes),)
        self.add(Command(Do.LAUNCH, other, f"{v.name}.rest", v.name, (), rest))

    def host_read(self, i: int) -> None:
        seen = [v for v in self.values.values() if self.sees(HOST, v.device)]
        if seen:
            v = self.r.choice(seen)
            self.add(Command(Do.HOST_READ, HOST_ACTOR, f"read{i}", v.name, whole(v)))

    def finish(self) -> None:
        self.host_read(99)
        last = self.values[next(reversed(self.values))]
        if self.chance(0.1) and last.device == HOST and not last.kept:
            self.add(Command(Do.HOST_FREE, HOST_ACTOR, f"free {last.name}", None, (), whole(last)))

    # Memory.

    def place(self) -> None:
        careful = self.r.choice((1.0, 1.0, 1.0, 0.7))
        for v in self.values.values():
            if v.same_as is not None:
                self.offsets[v.name] = self.offsets[v.same_as]
            elif v.external:
                self.offsets[v.name] = (0,)
            elif v.may_replace and self.chance(0.5) and self.in_place(v):
                self.offsets[v.name] = self.offsets[self.in_place(v)]
            else:
                taken: list[int] = []
                for _ in range(v.slots):
                    taken.append(self.fit(v, taken) if self.chance(careful) else self.anywhere())
                self.offsets[v.name] = tuple(taken)

    def anywhere(self) -> int:
        return UNIT * self.r.randint(0, 3)

    def in_place(self, v: Value) -> str:
        fits = [n for n in v.may_replace if self.values[n].nbytes == v.nbytes]
        return next((n for n in fits if self.arena(self.values[n]) == self.arena(v)), "")

    def fit(self, v: Value, taken: list[int]) -> int:
        """The first offset that is free while `v` lives in list order."""
        busy = [(o, o + v.nbytes) for o in taken]
        for other, offsets in self.offsets.items():
            w = self.values[other]
            if self.arena(w) == self.arena(v) and self.meet(v, w):
                busy += [(o, o + w.nbytes) for o in offsets]
        free = (o for o in range(0, 1000, UNIT))
        return next(o for o in free if all(b <= o or o + v.nbytes <= a for a, b in busy))

    def meet(self, v: Value, w: Value) -> bool:
        a, b = self.life(v), self.life(w)
        return a[0] <= b[1] and b[0] <= a[1]

    def life(self, v: Value) -> tuple[int, int]:
        family = {n for n in self.values if self.ground(n) == v.name}
        used = [i for i, c in enumerate(self.commands) if family & _touched(c)]
        lasting = v.initial or v.kept or v.slots > 1
        return (0, 1000) if lasting or not used else (used[0], used[-1])

    def ground(self, name: str) -> str:
        while (below := self.values[name].same_as) is not None:
            name = below
        return name

    def arena(self, v: Value) -> str:
        ground = self.values[self.ground(v.name)]
        return f"own.{ground.name}" if ground.external else f"arena.{ground.device}"

    def memory(self) -> tuple[list[Buffer], dict[str, Region]]:
        regions = {
            v.name: Region(self.arena(v), self.offsets[v.name], v.nbytes)
            for v in self.values.values()
        }
        sizes: dict[str, int] = {}
        homes: dict[str, str] = {}
        for name, region in regions.items():
            need = max(region.offsets) + region.nbytes
            sizes[region.buffer] = max(sizes.get(region.buffer, 0), need)
            homes[region.buffer] = self.values[name].device
        made = [Buffer(b, homes[b], n, UNIT, b.startswith("own.")) for b, n in sizes.items()]
        return made, regions

    # Order.

    def synchronise(self) -> None:
        """Put in waits for conflicts: all of them, most of them, or hardly any."""
        p = self.r.choice((1.0, 1.0, 1.0, 0.85, 0.3))
        joined = self.chance(0.5)
        waits: dict[int, list[int]] = {}
        for j in range(len(self.commands)):
            for i in self.needed(j, joined):
                if self.chance(p):
                    waits.setdefault(j, []).append(i)
        recorded = {i for found in waits.values() for i in found}
        names = {  # an event is one device's
            i: f"{self.commands[i].actor.device}.e{i % 3 if self.chance(0.1) else i}"
            for i in sorted(recorded)
        }
        old, self.commands = self.commands, []
        met = self.r.randrange(len(old)) if self.chance(0.15) else None
        for j, c in enumerate(old):
            if j == met:
                self.meet_all()
            streams = c.do not in HOST_STEPS
            for i in waits.get(j, ()):
                if met is not None and i < met <= j and streams:
                    continue  # the barrier between them orders them
                self.add(self.wait(old[i], c, names[i]))
            self.add(c)
            if j in recorded and c.actor != HOST_ACTOR:
                self.add(Command(Do.RECORD, c.actor, names[j], event=names[j]))
        if joined:
            self.add(Command(Do.HOST_SYNC, HOST_ACTOR, "end"))

    def meet_all(self) -> None:
        """A barrier: every stream waits for what all others have done so far."""
        for actor in self.actors:
            event = f"met.{actor.device}.{actor.stream}"
            self.add(Command(Do.RECORD, actor, event, event=event))
        for actor in self.actors:
            for other in self.actors:
                event = f"met.{other.device}.{other.stream}"
                if other != actor:
                    self.add(Command(Do.WAIT, actor, event, event=event))

    def needed(self, j: int, joined: bool) -> Iterator[int]:
        """For each other actor its last command that meets command j, of this run or the last."""
        c = self.commands[j]
        for actor in self.actors:
            if actor != c.actor:
                met = [
                    i
                    for i, d in enumerate(self.commands)
                    if d.actor == actor and self.conflict(c, d)
                ]
                early = [i for i in met if i < j]
                if early:
                    yield early[-1]
                elif met and not joined:
                    yield met[-1]

    def conflict(self, c: Command, d: Command) -> bool:
        pairs = [(a, b) for a in (*c.reads, *c.writes) for b in d.writes]
        pairs += [(a, b) for a in c.writes for b in d.reads]
        return any(self.overlap(a, b) for a, b in pairs)

    def overlap(self, a: Access, b: Access) -> bool:
        v, w = self.values[a.value], self.values[b.value]
        return self.arena(v) == self.arena(w) and any(
            x + a.start < y + b.stop and y + b.start < x + a.stop
            for x in self.offsets[v.name]
            for y in self.offsets[w.name]
        )

    def wait(self, first: Command, second: Command, event: str) -> Command:
        if second.do not in HOST_STEPS:
            return Command(Do.WAIT, second.actor, event, event=event)
        roll = self.r.random()
        if roll < 0.4:
            return Command(Do.HOST_SYNC, HOST_ACTOR, "for event", event=event)
        target = first.actor if roll < 0.7 else None
        return Command(Do.HOST_SYNC, HOST_ACTOR, "for stream", waits_for=target)


def _touched(c: Command) -> set[str]:
    return {a.value for a in (*c.reads, *c.writes)}


def random_plan(r: random.Random, most: int = 7) -> Plan:
    """A plan of at most `most` steps on devices, drawn from `r`; declared well, sound or not."""
    w = _World(r)
    w.hardware()
    w.leaves()
    for i in range(r.randint(1, most)):
        if sum(c.actor != HOST_ACTOR for c in w.commands) < most:
            w.step(i)
    w.finish()
    w.place()
    buffers, regions = w.memory()
    w.synchronise()
    return plan_of(w.devices, list(w.values.values()), w.commands, buffers, regions, w.carried)


def plans(most: int = 7) -> st.SearchStrategy[Plan]:
    """Hypothesis strategy over `random_plan`."""
    return st.randoms(use_true_random=False).map(lambda r: random_plan(r, most))


# Mutants: each function damages a plan in one way, or returns None where it cannot.

Mutation = Callable[[Plan, random.Random], Plan | None]


def _pick(plan: Plan, r: random.Random, wanted: Callable[[Command], bool]) -> int | None:
    found = [i for i, c in enumerate(plan.schedule) if wanted(c)]
    return r.choice(found) if found else None


def _without(plan: Plan, r: random.Random, *kinds: Do) -> Plan | None:
    i = _pick(plan, r, lambda c: c.do in kinds)
    if i is None:
        return None
    commands = list(plan.schedule.commands)
    del commands[i]
    return with_commands(plan, commands)


def dropped_wait(plan: Plan, r: random.Random) -> Plan | None:
    """A stream does not wait for an event."""
    return _without(plan, r, Do.WAIT)


def dropped_event(plan: Plan, r: random.Random) -> Plan | None:
    """An event is not recorded where it was; waits that nothing serves any more go with it."""
    mutant = _without(plan, r, Do.RECORD)
    if mutant is None:
        return None
    left = {c.event for c in mutant.schedule if c.do is Do.RECORD}
    served = [c for c in mutant.schedule if c.event is None or c.event in left]
    return with_commands(plan, served)


def unsynchronised_host(plan: Plan, r: random.Random) -> Plan | None:
    """The host does not wait before it reads, writes or goes on."""
    return _without(plan, r, Do.HOST_SYNC)


def lost_copy(plan: Plan, r: random.Random) -> Plan | None:
    """A copy is not made."""
    return _without(plan, r, Do.COPY)


def lost_work(plan: Plan, r: random.Random) -> Plan | None:
    """A kernel is not launched."""
    return _without(plan, r, Do.LAUNCH)


def swapped_commands(plan: Plan, r: random.Random) -> Plan | None:
    """Two neighbours in the list change places."""
    commands = list(plan.schedule.commands)
    if len(commands) < 2:
        return None
    i = r.randrange(len(commands) - 1)
    commands[i], commands[i + 1] = commands[i + 1], commands[i]
    return with_commands(plan, commands)


def early_host_write(plan: Plan, r: random.Random) -> Plan | None:
    """The host writes the next run's input at the end of this one."""
    i = _pick(plan, r, lambda c: c.do is Do.HOST_WRITE)
    if i is None:
        return None
    commands = list(plan.schedule.commands)
    return with_commands(plan, [*commands[:i], *commands[i + 1 :], commands[i]])


def _family(plan: Plan, ground: str) -> Iterator[str]:
    """The values that lie on `ground` by declaration, itself included."""
    values = plan.schedule.values
    for name in values:
        below = name
        while (next_one := values[below].same_as) is not None:
            below = next_one
        if below == ground:
            yield name


def _moved(plan: Plan, ground: str, offsets: tuple[int, ...]) -> Plan | None:
    """The family of `ground` elsewhere in its buffer, which must hold it."""
    regions = plan.memory.regions
    changed = {n: replace(regions[n], offsets=offsets) for n in _family(plan, ground)}
    inside = all(
        0 <= o <= plan.memory.buffers[x.buffer].nbytes - x.nbytes
        for x in changed.values()
        for o in x.offsets
    )
    return with_regions(plan, changed) if inside else None


def _grounds(plan: Plan) -> list[str]:
    return [n for n, v in plan.schedule.values.items() if v.same_as is None]


def shifted_offset(plan: Plan, r: random.Random) -> Plan | None:
    """A value lies one unit before or behind its place."""
    ground = r.choice(_grounds(plan))
    step = r.choice((-UNIT, UNIT))
    return _moved(plan, ground, tuple(o + step for o in plan.memory.regions[ground].offsets))


def misaligned(plan: Plan, r: random.Random) -> Plan | None:
    """A value begins behind a tail that was not rounded up."""
    ground = r.choice(_grounds(plan))
    step = r.choice((-1, 1))
    return _moved(plan, ground, tuple(o + step for o in plan.memory.regions[ground].offsets))


def shortened_lifetime(plan: Plan, r: random.Random) -> Plan | None:
    """A value's bytes are given to another one, whenever that lives."""
    regions = plan.memory.regions
    one, two = r.choice(_grounds(plan)), r.choice(_grounds(plan))
    if one == two or regions[one].buffer != regions[two].buffer:
        return None
    first = regions[one].offset
    return _moved(plan, two, tuple(first for _ in regions[two].offsets))


def lent_scratch(plan: Plan, r: random.Random) -> Plan | None:
    """The bytes that a launch has beside its operands are those of another value."""
    regions = plan.memory.regions
    pairs = [
        (one, two)
        for one in _grounds(plan)
        for two in _grounds(plan)
        if one.startswith("scratch") and one != two and regions[one].buffer == regions[two].buffer
    ]
    if not pairs:
        return None
    scratch, other = r.choice(pairs)
    return _moved(plan, scratch, (regions[other].offset,))


def dropped_barrier(plan: Plan, r: random.Random) -> Plan | None:
    """The streams do not meet where they should."""
    left = [c for c in plan.schedule if not (c.event or "").startswith("met.")]
    return with_commands(plan, left) if len(left) < len(plan.schedule.commands) else None


def turned_copy(plan: Plan, r: random.Random) -> Plan | None:
    """A copy onto its own source, which it may replace, with a part that goes elsewhere."""
    values, regions = plan.schedule.values, plan.memory.regions
    copies = [
        (i, c)
        for i, c in enumerate(plan.schedule)
        if c.do is Do.COPY and len(c.reads) == 1 and c.reads[0].stop - c.reads[0].start > UNIT
        if regions[c.reads[0].value].buffer == regions[c.writes[0].value].buffer
        if values[c.writes[0].value].same_as is None
    ]
    if not copies:
        return None
    i, c = r.choice(copies)
    (a,), (w,) = c.reads, c.writes
    moved = _moved(plan, w.value, regions[a.value].offsets)
    cut = r.randrange(a.start + UNIT, a.stop, UNIT)
    halves = [Access(a.value, a.start, cut), Access(a.value, cut, a.stop)]
    r.shuffle(halves)
    commands = list(plan.schedule.commands)
    commands[i] = replace(c, reads=tuple(halves))
    if moved is None:
        return None
    promised = with_value(moved, replace(values[w.value], may_replace=(a.value,)))
    return with_commands(promised, commands)


def second_reader(plan: Plan, r: random.Random) -> Plan | None:
    """A result is put in place over a source that another command reads too."""
    values, regions = plan.schedule.values, plan.memory.regions
    readers: dict[str, int] = {}
    for c in plan.schedule:
        for name in {a.value for a in c.reads}:
            readers[name] = readers.get(name, 0) + 1
    pairs = [
        (c.writes[0].value, a.value)
        for c in plan.schedule
        if c.do is Do.LAUNCH and c.writes and values[c.writes[0].value].same_as is None
        for a in c.reads
        if readers[a.value] > 1
        and regions[a.value].buffer == regions[c.writes[0].value].buffer
        and regions[a.value].nbytes == regions[c.writes[0].value].nbytes
    ]
    if not pairs:
        return None
    made, source = r.choice(pairs)
    moved = _moved(plan, made, regions[source].offsets)
    return moved and with_value(moved, replace(values[made], may_replace=(source,)))


MUTATIONS: tuple[Mutation, ...] = (
    dropped_wait,
    dropped_event,
    unsynchronised_host,
    lost_copy,
    lost_work,
    swapped_commands,
    early_host_write,
    shifted_offset,
    misaligned,
    shortened_lifetime,
    lent_scratch,
    dropped_barrier,
    second_reader,
    turned_copy,
)


def mutants(plan: Plan, r: random.Random) -> Iterator[tuple[str, Plan]]:
    """One mutant of each class that the plan has room for, with the class's name."""
    for mutation in MUTATIONS:
        mutant = mutation(plan, r)
        if mutant is not None:
            yield mutation.__name__, mutant
