"""Write down what a runtime enqueues, and get a plan that `ggraph.verify` can judge.

A plan speaks of values: versions of tensors. A runtime knows addresses: this kernel reads those
bytes and writes these. `PlanBuilder` turns the second into the first. Call it in the order in
which the host acts; a read means whatever was written there last, as if everything ran at once and
in that order. The verdict then says whether every legal execution agrees with that one.

    b = PlanBuilder()
    gpu = b.device("gpu0", streams=2)
    x, y = b.buffer("x", gpu, 64), b.buffer("y", gpu, 64)
    b.launch((gpu, 0), "make", writes=[x[0:64]])
    b.launch((gpu, 1), "use", reads=[x[0:64]], writes=[y[0:64]])   # nothing orders the two
    verify(b.plan())                                               # Rejected: race

Bytes that are read before they are written come from before the run (in a `fresh` buffer that is
refused); if they are written later, the next run finds what this one left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ggraph.device import DeviceSpec
from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
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
from ggraph.versions import Contents, Cuts, Names, Origin, Piece, Version, accesses, carried

Where = tuple[str, int] | Actor  # (device, stream)


@dataclass(frozen=True)
class Bytes:
    """Bytes [start, stop) of a buffer; `name` is what messages call the tensor that lies there.

    Of a read: `made_by` is the command (its place in the plan) whose result is meant. Without it
    the read means whatever was written there last.
    """

    buffer: str
    start: int
    stop: int
    name: str = ""
    made_by: int | None = None

    def called(self, name: str, made_by: int | None = None) -> "Bytes":
        """The same bytes under a tensor's name, and of a read what it means."""
        return replace(self, name=name, made_by=made_by)


@dataclass(frozen=True)
class Space:
    """A buffer of the plan: `space[start:stop]` are bytes of it."""

    name: str
    nbytes: int

    def __getitem__(self, span: slice) -> Bytes:
        """Bytes [start, stop) of the buffer. PlanError where they leave it."""
        start = 0 if span.start is None else span.start
        stop = self.nbytes if span.stop is None else span.stop
        if span.step is not None or not 0 <= start <= stop <= self.nbytes:
            raise PlanError(f"{self.name}[{start}:{stop}]: the buffer has {self.nbytes} bytes")
        return Bytes(self.name, start, stop)


@dataclass
class _Step:
    """A command whose accesses are still pieces of versions."""

    command: Command
    reads: list[Piece] = field(default_factory=list)
    writes: list[Piece] = field(default_factory=list)


class PlanBuilder:
    """Collects devices, buffers and commands; `plan()` is what they make up."""

    def __init__(self, mode: str = "recorded") -> None:
        self._mode = mode
        self._devices: dict[str, DeviceSpec] = {}
        self._buffers: dict[str, Buffer] = {}
        self._contents: dict[str, Contents] = {}
        self._steps: list[_Step] = []
        self._names = Names()

    def device(
        self, name: str, *, streams: int = 1, kind: str = "sim", host_visible: bool = False
    ) -> str:
        """A device with `streams` queues; returns its name.

        `host_visible`: the host and the device reach each other's memory, without copies.
        """
        self._devices[name] = DeviceSpec(
            name, kind, alignment=1, streams=streams, host_visible=host_visible
        )
        return name

    def buffer(
        self, name: str, device: str, nbytes: int, *, external: bool = True, fresh: bool = False
    ) -> Space:
        """A contiguous piece of memory of a device, or of the host ("host"); `fresh` if it is
        allocated in the run, so that nobody has written it before."""
        if name in self._buffers:
            raise PlanError(f"buffer {name!r} stands there twice")
        self._buffers[name] = Buffer(name, device, nbytes, 1, external)
        self._contents[name] = Contents("nobody" if fresh else "before")
        return Space(name, nbytes)

    def holds(self, b: Bytes) -> bool:
        """Whether each of these bytes was written, by now or before the run."""
        home = self._home(b)
        there = [p for p in home.within(b.start, b.stop) if p.version.origin != "nobody"]
        return home.origin == "before" or sum(p.stop - p.start for p in there) == b.stop - b.start

    def launch(
        self,
        on: Where,
        label: str,
        *,
        reads: Iterable[Bytes] = (),
        writes: Iterable[Bytes] = (),
        updates: Iterable[Bytes] = (),
        seconds: float = 0.0,
    ) -> int:
        """A kernel on a stream; returns its place in the plan.

        `updates` are bytes that it reads and overwrites where they stand: byte i from byte i.
        """
        return self._add(Do.LAUNCH, _actor(on), label, reads, writes, updates, seconds=seconds)

    def copy(
        self, on: Where, label: str, read: Bytes, write: Bytes, *, seconds: float = 0.0
    ) -> int:
        """Bytes moved by a stream, between any two memories."""
        return self._add(Do.COPY, _actor(on), label, [read], [write], (), seconds=seconds)

    def record(self, on: Where, event: str) -> int:
        """Marks the present end of a stream in `event`."""
        return self._add(Do.RECORD, _actor(on), event, event=event)

    def wait(self, on: Where, event: str) -> int:
        """The stream goes on after the latest record of `event` that was enqueued before."""
        return self._add(Do.WAIT, _actor(on), event, event=event)

    def host_read(self, label: str, *reads: Bytes) -> int:
        """The host reads memory that it sees, at once."""
        return self._add(Do.HOST_READ, HOST_ACTOR, label, reads)

    def host_write(self, label: str, *writes: Bytes) -> int:
        """The host writes memory that it sees, at once."""
        return self._add(Do.HOST_WRITE, HOST_ACTOR, label, (), writes)

    def host_sync(self, *, stream: Where | None = None, event: str | None = None) -> int:
        """The host waits: for the latest record of `event`, for a stream, or for everything."""
        what = event or ("all" if stream is None else str(_actor(stream)))
        waits_for = None if stream is None else _actor(stream)
        command = Command(Do.HOST_SYNC, HOST_ACTOR, f"sync {what}", None, (), (), event, waits_for)
        self._steps.append(_Step(command))
        return len(self._steps) - 1

    def _add(
        self,
        do: Do,
        actor: Actor,
        label: str,
        reads: Iterable[Bytes] = (),
        writes: Iterable[Bytes] = (),
        updates: Iterable[Bytes] = (),
        *,
        event: str | None = None,
        seconds: float = 0.0,
    ) -> int:
        command = Command(do, actor, label, node=label, event=event, seconds=seconds)
        step = _Step(command)
        for b in reads:
            step.reads += self._meant(b)
        for b in updates:
            old = self._read(b)
            step.reads += old
            step.writes += [self._write(replace(b, start=p.start, stop=p.stop), p) for p in old]
        step.writes += [self._write(b) for b in writes if b.start < b.stop]
        step.reads = list(dict.fromkeys(step.reads))  # a kernel may name a source twice
        self._steps.append(step)
        return len(self._steps) - 1

    def _meant(self, b: Bytes) -> list[Piece]:
        """What a read means: the result of `made_by` as far as that reaches, else what is there."""
        if b.made_by is None:
            return self._read(b)
        if not 0 <= b.made_by < len(self._steps):
            raise PlanError(f"{b}: made_by names none of the {len(self._steps)} commands so far")
        found, at = [], b.start
        made = (p for p in self._steps[b.made_by].writes if p.version.buffer == b.buffer)
        for p in sorted(made, key=lambda p: p.start):
            start, stop = max(p.start, b.start), min(p.stop, b.stop)
            if start < stop:
                before = self._read(replace(b, start=at, stop=start))
                found += [*before, Piece(start, stop, p.version)]
                at = stop
        return [*found, *self._read(replace(b, start=at))]

    def _read(self, b: Bytes) -> list[Piece]:
        """What [b.start, b.stop) holds; what no command has written came from before the run."""
        contents = self._home(b)
        at = b.start
        for p in [*contents.within(b.start, b.stop), None]:
            stop = b.stop if p is None else p.start
            if at < stop:
                version = self._version(b, at, stop, contents.origin)
                contents.put(Piece(at, stop, version))
            at = b.stop if p is None else p.stop
        return contents.within(b.start, b.stop)

    def _write(self, b: Bytes, old: Piece | None = None) -> Piece:
        version = self._version(b, b.start, b.stop, "write")
        if old is not None:
            version.replaces = old.version
        piece = Piece(b.start, b.stop, version)
        self._home(b).put(piece)
        return piece

    def _home(self, b: Bytes) -> Contents:
        """What the buffer holds that has these bytes. PlanError where none has."""
        if b.buffer not in self._buffers:
            raise PlanError(f"{b}: no such buffer; known: {', '.join(self._buffers) or 'none'}")
        nbytes = self._buffers[b.buffer].nbytes
        if not 0 <= b.start <= b.stop <= nbytes:
            raise PlanError(f"{b}: the buffer has {nbytes} bytes")
        return self._contents[b.buffer]

    def _version(self, b: Bytes, start: int, stop: int, origin: Origin) -> Version:
        return Version(self._names.new(b.name or b.buffer), b.buffer, start, stop, origin)

    def plan(self, log: Sequence[str] = ()) -> Plan:
        """The plan so far; more may be added afterwards."""
        touched = (p.version for s in self._steps for p in (*s.reads, *s.writes))
        versions = list(dict.fromkeys(touched))
        cuts = Cuts(versions, self._contents, Names(self._names.taken))
        values, regions = self._values(versions, cuts)
        commands = tuple(
            replace(s.command, reads=accesses(s.reads, cuts), writes=accesses(s.writes, cuts))
            for s in self._steps
        )
        used = {r.buffer for r in regions.values()}
        buffers = {name: b for name, b in self._buffers.items() if name in used}
        splits = Splits(Placement(Graph("json", (), (), {}), tuple(self._devices.values()), {}), ())
        schedule = Schedule(splits, values, commands, carried(versions, cuts, self._contents))
        return Plan(schedule, MemoryMap(self._mode, buffers, regions), tuple(log))

    def _values(
        self, versions: Sequence[Version], cuts: Cuts
    ) -> tuple[dict[str, Value], dict[str, Region]]:
        values: dict[str, Value] = {}
        regions: dict[str, Region] = {}
        for v in versions:
            home = self._buffers[v.buffer]
            for start, stop in cuts.parts(v):
                name, old = cuts.name(v, start), v.replaces
                values[name] = Value(
                    name,
                    home.device,
                    stop - start,
                    may_replace=() if old is None else (cuts.name(old, cuts.begin(old, start)),),
                    external=home.external,
                    initial=v.origin == "before",
                )
                regions[name] = Region(v.buffer, (start,), stop - start)
        return values, regions


def _actor(where: Where) -> Actor:
    return where if isinstance(where, Actor) else Actor(*where)
