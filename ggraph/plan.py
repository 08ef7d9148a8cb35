"""The frozen nouns of planning. Data and text only, no decisions.

A `Schedule` lists what the host enqueues, in order, on which stream, reading and writing which
byte ranges of which values. A `MemoryMap` says where each value lies. A `Plan` is both, with the
graph and its placement; a `VerifiedPlan` is a plan with the certificate of `ggraph.verify`.

A *value* is one version of one tensor's bytes: a leaf, or the result of a command. Views have no
value of their own: they are ranges of their root's. A result that overwrites a source is a new
value that lies on the old one's bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from ggraph.device import HOST, RESULT, DeviceSpec, Need
from ggraph.errors import PlaceError, printable, shown
from ggraph.graph import Graph
from ggraph.lazy import lazy
from ggraph.tensor import Tensor

if TYPE_CHECKING:
    import networkx as nx
else:
    nx = lazy("networkx")


@dataclass(frozen=True)
class Placed:
    """Where one tensor lives and computes, and why."""

    device: str
    cause: str  # e.g. "input", "weights' home", "pin blk\\.1.*=sim0", "follows %x"


@dataclass(frozen=True, eq=False)
class Placement:
    """A device for every tensor of a graph."""

    graph: Graph
    devices: tuple[DeviceSpec, ...]
    of: Mapping[str, Placed]

    def device(self, name: str) -> DeviceSpec:
        """The spec of the device that holds tensor `name`. PlaceError where none does."""
        if name not in self.of:
            raise PlaceError(f"%{name} is placed nowhere")
        return self.device_called(self.of[name].device)

    def without_kernel(self) -> tuple[Tensor, ...]:
        """The tensors that their device computes in NumPy, for want of a kernel."""
        specs = {d.name: d for d in self.devices}
        return tuple(t for t in self.graph.nodes if not specs[self.of[t.name].device].compiled(t))

    def device_called(self, name: str) -> DeviceSpec:
        """The spec of the device called `name`. PlaceError where there is none."""
        for d in self.devices:
            if d.name == name:
                return d
        raise PlaceError(f"no device of this plan is called {name!r}")


@dataclass(frozen=True)
class Split:
    """A maximal run of work on one device; `copies_in` are the Copy nodes it starts with."""

    index: int
    device: str
    nodes: tuple[str, ...]
    copies_in: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Splits:
    """The placed graph cut into splits; `placement.graph` now holds explicit Copy nodes."""

    placement: Placement
    splits: tuple[Split, ...]


@dataclass(frozen=True, order=True, slots=True)
class Actor:
    """Who executes: the host (`HOST_ACTOR`), or one stream of one device."""

    device: str
    stream: int = 0

    def __str__(self) -> str:
        return HOST if self.device == HOST else printable(f"{self.device}.{self.stream}")


HOST_ACTOR = Actor(HOST)


class Do(Enum):
    """What a command does. Host steps run at once; the others are enqueued on their stream."""

    LAUNCH = "launch"  # run the kernel of `node`
    COPY = "copy"  # move bytes between buffers
    RECORD = "record"  # mark this point of the stream in `event`
    WAIT = "wait"  # the stream goes on after the latest record of `event` that the host enqueued
    HOST_WRITE = "host_write"  # the host writes bytes (inputs, indices)
    HOST_READ = "host_read"  # the host reads bytes (logits)
    HOST_SYNC = "host_sync"  # the host waits: for `event`, else for all work of `waits_for`
    HOST_FREE = "host_free"  # the host gives bytes up: a write of nothing over them


HOST_STEPS = frozenset({Do.HOST_WRITE, Do.HOST_READ, Do.HOST_SYNC, Do.HOST_FREE})


@dataclass(frozen=True, slots=True)
class Access:
    """Half-open byte range [start, stop) of a value, relative to the value's first byte."""

    value: str
    start: int
    stop: int

    def __str__(self) -> str:
        return printable(f"{self.value}[{self.start}:{self.stop}]")


@dataclass(frozen=True, slots=True)
class Command:
    """One step that the host performs or enqueues; its place in the schedule is the enqueue order.

    `reads` and `writes` are complete: a kernel's scratch is a value of its own, a fused kernel
    reads and writes what its parts do. After a write, the bytes hold that value.
    """

    do: Do
    actor: Actor
    label: str
    node: str | None = (
        None  # the tensor computed by a LAUNCH or COPY, the input or output of a host step
    )
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    event: str | None = None  # RECORD, WAIT; HOST_SYNC on an event
    waits_for: Actor | None = None  # HOST_SYNC without event: that stream; None: every stream
    seconds: float = 0.0  # estimated time
    chosen_by: str | None = None  # COPY: moves only the slices that this tensor, which the host
    # has read, names; `reads` and `writes` stay whole, an upper bound

    def __str__(self) -> str:
        waited = str(self.waits_for) if self.waits_for else ""
        what = printable(self.event or waited or self.node or self.label)
        reads = " reads " + ", ".join(map(str, self.reads)) if self.reads else ""
        writes = " writes " + ", ".join(map(str, self.writes)) if self.writes else ""
        chosen = printable(f" chosen by {self.chosen_by}") if self.chosen_by else ""
        return f"{self.actor!s:>8} {self.do.value:<10} {what}{reads}{writes}{chosen}"


def scratch(t: Tensor, need: Need, actor: Actor) -> str:
    """Name of the value that a launch of `t` on `actor` has for `need`: `NODE#need`, or, where it
    is made of sources and shared, `SOURCE#need` with the stream behind it. No other name has a #.
    """
    if not need.of:
        return f"{t.name}#{need.name}"
    made_of = [t if i == RESULT else t.sources[i] for i in need.of]
    names = [(s.root if need.flat and shows_all(s) else s).name for s in made_of]
    return f"{'#'.join(names)}#{need.name}{need.how}.{actor.stream}"


def shows_all(t: Tensor) -> bool:
    """Whether `t` is all elements of its root in order."""
    root = t.root
    return t.is_contiguous and (t.offset, t.dtype, t.nbytes) == (0, root.dtype, root.nbytes)


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one tensor's bytes, and what the allocator must know of it.

    `same_as` names the value whose bytes it must share (it overwrites that one); `may_replace` the
    values on whose bytes it may be put in place; `external` values (weights, states, buffers that
    the caller owns) have a buffer of their own that outlives the run. `initial` values hold valid
    data before the first run; `kept` values hold theirs until the next run's reader.
    """

    name: str
    device: str  # device whose memory holds it; HOST for host memory
    nbytes: int
    same_as: str | None = None
    may_replace: tuple[str, ...] = ()
    external: bool = False
    initial: bool = False
    kept: bool = False
    slots: int = 1  # copies that rotate from run to run


@dataclass(frozen=True, eq=False)
class Schedule:
    """What the host enqueues in one run, in order.

    `carried` maps a state to the value that holds it at the end of a run: the next run's readers
    of the state must see that value.
    """

    splits: Splits
    values: Mapping[str, Value]
    commands: tuple[Command, ...]
    carried: Mapping[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph that this schedule runs, Copy nodes included."""
        return self.splits.placement.graph

    def __iter__(self) -> Iterator[Command]:
        return iter(self.commands)

    def to_networkx(self) -> "nx.DiGraph[int]":
        """One node per command (attribute `command`); edges are the direct orderings of one run."""
        g: nx.DiGraph[int] = nx.DiGraph()
        last: dict[Actor, int] = {}
        recorded: dict[str, int] = {}
        for i, c in enumerate(self.commands):
            g.add_node(i, command=c)
            before = [last.get(HOST_ACTOR), last.get(c.actor)]
            if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event):
                before.append(recorded.get(c.event or ""))
            elif c.do is Do.HOST_SYNC:
                before += [j for a, j in last.items() if c.waits_for in (None, a)]
            if c.do is Do.RECORD and c.event:
                recorded[c.event] = i
            last[c.actor] = i
            g.add_edges_from((j, i) for j in before if j is not None)
        return g


@dataclass(frozen=True)
class Buffer:
    """One contiguous piece of memory. `device` is HOST or a device's name."""

    name: str
    device: str
    nbytes: int
    alignment: int
    external: bool = False  # owned by the caller, outlives the run


@dataclass(frozen=True, slots=True)
class Region:
    """Where a value lies: its slots in `buffer`, of which runs use one after the other."""

    buffer: str
    offsets: tuple[int, ...]
    nbytes: int

    @property
    def offset(self) -> int:
        """The first slot's offset in bytes (the only one unless the value rotates)."""
        return self.offsets[0]

    def start(self, run: int) -> int:
        """Where the value begins in run `run`."""
        offsets = self.offsets
        return offsets[0] if len(offsets) == 1 else offsets[run % len(offsets)]


@dataclass(frozen=True, eq=False)
class MemoryMap:
    """The allocator's answer: buffers, and a region for every value of the schedule."""

    mode: str  # "ggml", "hb" or "offline"
    buffers: Mapping[str, Buffer]
    regions: Mapping[str, Region]
    causes: Mapping[str, str] = field(default_factory=dict)  # value -> why it lies there

    @property
    def arena_bytes(self) -> int:
        """Bytes of all buffers that the plan itself owns."""
        return sum(b.nbytes for b in self.buffers.values() if not b.external)


@dataclass(frozen=True, eq=False)
class Plan:
    """A complete answer to: what runs where, in which order, in which bytes."""

    schedule: Schedule
    memory: MemoryMap
    log: tuple[str, ...] = ()  # one line per decision of the pipeline

    @property
    def graph(self) -> Graph:
        """The graph that this plan runs."""
        return self.schedule.graph

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`."""
        return self.graph[name]


@dataclass(frozen=True)
class Certificate:
    """What `verify` proved, for how much."""

    commands: int
    unrolled: int  # commands after unrolling to the steady state
    pairs_checked: int  # overlapping access pairs that had to be ordered
    reads_proved: int  # reads whose only reaching write is the producer's
    reuses: int  # pairs of values that share bytes at different times
    peak_bytes: int  # bytes of the arenas
    live_bound_bytes: int  # largest number of bytes that must be live at once
    concurrency_bytes: int  # peak lost because concurrent work may not share bytes
    approximations: tuple[str, ...] = ()  # what is rounded that the graph's meaning does not round
    ends_complete: bool = False  # a run ends when all its work is done: the host has waited for it


_SEAL = object()


class VerifiedPlan:
    """A plan that `ggraph.verify` proved sound, frozen all through: only `verify` makes one, and
    `execute` takes no other."""

    text: ClassVar[Callable[["VerifiedPlan"], str]] = object.__repr__  # `ggraph.show` has words
    __slots__ = ("certificate", "plan")
    plan: Plan
    certificate: Certificate

    def __init__(self, plan: Plan, certificate: Certificate, *, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only ggraph.verify.verify makes a VerifiedPlan")
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "certificate", certificate)

    def __str__(self) -> str:
        return type(self).text(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a VerifiedPlan cannot be changed: {name} = {shown(value)}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a VerifiedPlan cannot be changed: del {name}")
