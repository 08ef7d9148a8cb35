"""A recorded step -> a plan that `ggraph.verify` can judge.

Addresses become bytes of buffers. Memory that is neither a device's nor pinned counts only where
a device touches it: what the host does with the rest meets nobody. What lies partly in it is cut to
it, never left out.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggraph.alloc.ggml import INPLACE_OPS
from ggraph.device import HOST
from ggraph.plan import Plan
from ggraph.plan_builder import Bytes, PlanBuilder, Space
from ggraph.record.log import HOST_STREAM, Kernel, Memory, Range, Record
from ggraph.record.steps import Step

# Which of its sources an operation overwrites as well (ggml.h: a, grad, m, v, parameters).
ALSO_UPDATES = {"OPT_STEP_ADAMW": (2, 3)}
READS_NOTHING = frozenset({"FILL"})  # it names a source for its shape
REPLACES = frozenset({"CPY", "FILL"})  # views of their target, of which they read nothing
# What the allocator may put onto a source that is read. What the program itself puts there lies
# there by ggml.h's promise.
IN_PLACE = INPLACE_OPS - READS_NOTHING
PARTIAL = frozenset({"SET_ROWS", "SET", "ACC"})  # leave the rest of their target as it was


@dataclass(frozen=True)
class Place:
    """Where a command of the plan stood in the recording: stream, and place in that stream."""

    stream: int
    at: int


@dataclass(frozen=True, eq=False)
class Converted:
    """A step as a plan. `places[i]` is where command i came from, None for the host's steps."""

    plan: Plan
    places: tuple[Place | None, ...]
    stacks: dict[int, tuple[str, ...]]  # command -> the stack of a touch


def convert(step: Step) -> Converted:
    """The plan of a step; reads mean what was written last, in the order of the record."""
    return _Converter(step).converted()


class _Converter:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._builder = PlanBuilder("recorded")
        self._streams = _streams(step)
        self._memory = _AddressSpace(step, self._builder)
        self._recorded: set[int] = set()
        self._places: list[Place | None] = []
        self._stacks: dict[int, tuple[str, ...]] = {}

    def converted(self) -> Converted:
        used = [device for device, _ in self._streams.values()]
        for d in range(self._step.recording.devices):
            # What ggml's host sets and gets it does without a stream: in the device's memory.
            count = max(1, used.count(f"sim{d}"))
            self._builder.device(f"sim{d}", streams=count, host_visible=True)
        for i, r in enumerate(self._step.records, self._step.start):
            self._memory.now(i)
            self._record(r)
        if not self._step.whole:  # judged as if the host had waited where the recording ends
            self._builder.host_sync()
            self._places.append(None)
        return Converted(self._builder.plan(), tuple(self._places), self._stacks)

    def _record(self, r: Record) -> None:
        match r.kind:
            case "graph" if r.stream == HOST_STREAM:
                for k in r.kernels:
                    self._host(f"cpu {k.op} {k.name}", k.reads, [k.writes, *_also(k)])
            case "graph":
                made: list[int] = []
                for i, k in enumerate(r.kernels):
                    made.append(self._kernel(r.stream or 0, r.at + i, k, made))
            case "copy":
                self._copy(r)
            case "host":
                reads, writes = ([x] if x is not None else [] for x in (r.read, r.write))
                self._host(r.label, reads, writes, r.stack)
            case "free":
                if r.write is not None and self._memory.used(r.write):
                    self._host(r.label, (), [r.write])
            case "sync":
                self._sync(r)
            case _:
                self._order(r)

    def _placed(self, stream: int, at: int) -> tuple[str, int]:
        self._places.append(Place(stream, at))
        return self._streams[stream]

    def _kernel(self, stream: int, at: int, k: Kernel, made: Sequence[int]) -> int:
        where = self._placed(stream, at)
        reads, writes, updates = _accesses(k)
        return self._builder.launch(
            where,
            f"{k.op} {k.name}",
            reads=self._memory.bytes(reads, made),
            writes=self._memory.bytes(writes),
            updates=self._memory.bytes(updates),
        )

    def _copy(self, r: Record) -> None:
        where = self._placed(r.stream or 0, r.at)
        reads, writes = (self._memory.bytes([x] if x else []) for x in (r.read, r.write))
        if len(reads) == len(writes) == 1:
            self._builder.copy(where, r.label, reads[0], writes[0])
        else:  # from memory that was staged at the call, or over the end of a buffer
            self._builder.launch(where, r.label, reads=reads, writes=writes)

    def _host(
        self,
        label: str,
        reads: Iterable[Range],
        writes: Iterable[Range],
        stack: tuple[str, ...] = (),
    ) -> None:
        for act, ranges in ((self._builder.host_read, reads), (self._builder.host_write, writes)):
            if touched := self._memory.bytes(ranges):
                index = act(label, *touched)
                self._places.append(None)
                if stack:
                    self._stacks[index] = stack

    def _order(self, r: Record) -> None:
        """A record or a wait. An event of an earlier step is complete: nobody waits for it."""
        event = r.event or 0
        if r.kind == "rec":
            self._recorded.add(event)
            self._builder.record(self._placed(r.stream or 0, r.at), f"event {event}")
        elif event in self._recorded:
            self._builder.wait(self._placed(r.stream or 0, r.at), f"event {event}")

    def _sync(self, r: Record) -> None:
        if r.event is not None and r.event in self._recorded:
            self._builder.host_sync(event=f"event {r.event}")
        elif r.event is None and r.stream in self._streams:
            self._builder.host_sync(stream=self._streams[r.stream])
        else:
            return
        self._places.append(None)


def _streams(step: Step) -> dict[int, tuple[str, int]]:
    """Stream of the recording -> device and stream of the plan."""
    used = {r.stream for r in step.records if r.kind in ("graph", "copy", "rec", "wait")}
    found: dict[int, tuple[str, int]] = {}
    count: dict[int, int] = {}
    for stream in sorted(s for s in used if s is not None and s != HOST_STREAM):
        device = step.recording.device_of[stream]
        found[stream] = (f"sim{device}", count.get(device, 0))
        count[device] = count.get(device, 0) + 1
    return found


def _also(k: Kernel) -> list[Range]:
    """The sources that a kernel overwrites."""
    return [k.reads[i] for i in ALSO_UPDATES.get(k.op, ()) if i < len(k.reads)]


def _accesses(k: Kernel) -> tuple[list[Range], list[Range], list[Range]]:
    """What a kernel reads, what it writes without reading it, and what it changes in place."""
    also = _also(k)
    over = [r for r in k.reads if _same(r, k.writes)]
    allowed = k.op in IN_PLACE or (k.view and k.op not in REPLACES)
    changes = k.op in PARTIAL or not k.solid or (over and allowed)
    left_out = [*also, *(over if changes or k.op == "CPY" else ())]
    reads = [] if k.op in READS_NOTHING else [r for r in k.reads if r not in left_out]
    return (reads, [], [k.writes, *also]) if changes else (reads, [k.writes], also)


def _same(a: Range, b: Range) -> bool:
    return (a.address, a.nbytes) == (b.address, b.nbytes)


@dataclass(frozen=True, order=True)
class _Home:
    """Addresses [start, stop), which are bytes of a buffer that begins at `base`."""

    start: int
    stop: int
    buffer: str
    device: str
    base: int
    nbytes: int


class _AddressSpace:
    """Addresses of a step as bytes of buffers, which the builder learns of when they are used.

    Buffers come and go within a step. The program's own memory is worked out for the whole step at
    once, so that an address in it means the same byte at all times.
    """

    def __init__(self, step: Step, builder: PlanBuilder) -> None:
        self._step, self._builder = step, builder
        self._spaces: dict[str, Space] = {}
        lives = step.recording.lived.values()
        self._changes = {at for life in lives for at in life if step.start < at < step.stop}
        self._program: list[_Home] = []
        self._program = self._program_memory()
        self._look(step.start)

    def now(self, index: int) -> None:
        """From now on addresses mean what they do at record `index`: buffers come and go."""
        if index in self._changes:
            self._look(index)

    def used(self, r: Range) -> bool:
        """Whether anything in the step so far has touched the buffer that begins there."""
        return any(h.base == r.address and h.buffer in self._spaces for h in self._homes)

    def bytes(self, ranges: Iterable[Range], made: Sequence[int] = ()) -> list[Bytes]:
        """The ranges as bytes of the plan, cut to what counts.

        `made`: the commands of the same list, for what a source means.
        """
        found = []
        for r in ranges:
            writer = made[r.writer] if made and r.writer >= 0 else None
            for home, start, stop in self._parts(r):
                part = self._space(home)[start - home.base : stop - home.base]
                found.append(part.called(r.name, writer))
        return found

    def _look(self, index: int) -> None:
        known = [_named(m) for m in self._step.recording.memories_at(index)]
        self._set_homes(known)
        gaps = ((home, x) for home in self._program for x in self._outside(home.start, home.stop))
        own = [replace(home, start=start, stop=stop) for home, (start, stop) in gaps]
        self._set_homes([*known, *own])

    def _set_homes(self, homes: Iterable[_Home]) -> None:
        self._homes = sorted(homes)
        self._starts = [home.start for home in self._homes]

    def _parts(self, r: Range) -> list[tuple[_Home, int, int]]:
        """The homes that a range meets, and the addresses that it has in each."""
        i, found = max(0, bisect_right(self._starts, r.address) - 1), []
        while i < len(self._homes) and self._homes[i].start < r.end:
            home = self._homes[i]
            start, stop = max(r.address, home.start), min(r.end, home.stop)
            if start < stop:
                found.append((home, start, stop))
            i += 1
        return found

    def _outside(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of some addresses that no home has at present."""
        found = []
        for _, first, last in self._parts(Range(start, stop - start)):
            if start < first:
                found.append((start, first))
            start = last
        return [*found, (start, stop)] if start < stop else found

    def _program_memory(self) -> list[_Home]:
        """What devices touch of the program's own memory: ranges that overlap make one buffer."""
        own: set[tuple[int, int]] = set()
        seen: set[int] = set()  # lists of kernels, while buffers stay where they are
        self._look(self._step.start)
        for i, r in enumerate(self._step.records, self._step.start):
            if i in self._changes:
                seen.clear()
                self._look(i)
            if r.kind not in ("copy", "graph") or r.stream == HOST_STREAM or id(r.kernels) in seen:
                continue
            if r.kernels:
                seen.add(id(r.kernels))
            for x in _touched(r):
                own.update(self._outside(x.address, x.end))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(own):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return [
            _Home(start, stop, f"program{i}", HOST, start, stop - start)
            for i, (start, stop) in enumerate(merged)
        ]

    def _space(self, home: _Home) -> Space:
        if home.buffer not in self._spaces:
            made = self._builder.buffer(home.buffer, home.device, home.nbytes)
            self._spaces[home.buffer] = made
        return self._spaces[home.buffer]


def _named(m: Memory) -> _Home:
    name = f"pinned{m.number}" if m.pinned else f"buffer{m.number}@sim{m.device}"
    device = HOST if m.pinned else f"sim{m.device}"
    return _Home(m.address, m.address + m.nbytes, name, device, m.address, m.nbytes)


def _touched(r: Record) -> Iterator[Range]:
    """Every range that a device touches in a record."""
    yield from (x for x in (r.read, r.write) if x is not None)
    for k in r.kernels:
        yield k.writes
        yield from k.reads
