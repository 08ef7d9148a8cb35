"""The commands of one run, in enqueue order, before events are put between them.

Inputs first: the host writes them all, in place or to staging values, then copies take those to
their devices, so that all that is enqueued up to the host's next wait stands together. Then nodes
and copies in the graph's order, then the outputs. A `Step` is a command and the steps that must be
complete before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.order.streams import Streams, copied_bytes, copy_seconds, is_peer, launch_seconds, mover
from ggraph.order.values import reads_of, staging, writes_of
from ggraph.plan import HOST_ACTOR, Access, Actor, Command, Do, Splits
from ggraph.tensor import Kind, Tensor

IN_FLIGHT = 2  # weights copied for one run that may lie in a device's memory at once


@dataclass(eq=False)
class Draft:
    """What the parts of `order` share; `staged` collects the host's staging values, `looked_at`
    the indices that the host has read for the copies that they choose."""

    splits: Splits
    streams: Streams
    n_copies: int
    overlap: bool
    marked: frozenset[str]
    staged: dict[str, int] = field(default_factory=dict)
    looked_at: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        """The placed graph, Copy nodes included."""
        return self.splits.placement.graph

    def device(self, t: Tensor) -> str:
        """The device whose memory holds `t`."""
        return self.splits.placement.of[t.root.name].device

    def host_visible(self, t: Tensor) -> bool:
        """Whether the host can read and write `t` in place."""
        return self.streams.spec(self.device(t)).host_visible


@dataclass(frozen=True)
class Step:
    """A command, and the indices of the steps whose completion it needs."""

    command: Command
    after: tuple[int, ...] = ()


@dataclass(eq=False)
class _List:
    """Steps with the dependencies that their accesses demand."""

    steps: list[Step] = field(default_factory=list)
    producer: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, c: Command, overwritten: str | None = None, also: tuple[int, ...] = ()) -> int:
        """Append `c`, which needs the producers of what it reads, and, where it overwrites a
        value, all that value's readers so far."""
        mine = len(self.steps)
        needed = {self.producer[a.value]: None for a in c.reads if a.value in self.producer}
        if overwritten is not None:
            needed.update(dict.fromkeys(self.readers.get(overwritten, ())))
        needed.update(dict.fromkeys(also))
        self.steps.append(Step(c, tuple(needed)))
        for a in c.reads:
            self.readers.setdefault(a.value, []).append(mine)
        for a in c.writes:
            self.producer[a.value] = mine
        return mine


def commands(draft: Draft) -> list[Step]:
    """Every step of one run except events and the syncs that they replace."""
    found = _List()
    inputs = draft.graph.leaves(Kind.INPUT)
    for t in inputs:
        _feed(draft, found, t)
    for t in inputs:
        _send(draft, found, t)
    _work(draft, found)
    _outputs(draft, found)
    return found.steps


def whole(t: Tensor, value: str | None = None) -> tuple[Access, ...]:
    """The bytes of `t` as one access: to its root, or to its staging value."""
    if not t.nbytes:
        return ()
    return (
        (Access(t.root.name, t.offset, t.offset + t.nbytes),)
        if value is None
        else (Access(value, 0, t.nbytes),)
    )


def _feed(draft: Draft, out: _List, t: Tensor) -> None:
    target = None
    if not draft.host_visible(t):
        target = staging(t.name)
        draft.staged[t.name] = draft.n_copies
    label = f"write:{t.name}"
    out.add(Command(Do.HOST_WRITE, HOST_ACTOR, label, t.name, writes=whole(t, target)))


def _send(draft: Draft, out: _List, t: Tensor) -> None:
    """Copy a staged input to its device."""
    if t.name in draft.staged and t.nbytes:
        spec = draft.streams.spec(draft.device(t))
        actor = draft.streams.copier(spec.name, outwards=False)
        seconds = spec.launch_s + t.nbytes / spec.link_bytes_per_s
        out.add(_copy(actor, t.name, t.name, whole(t, staging(t.name)), whole(t), seconds))


def _copy(
    actor: Actor,
    label: str,
    node: str,
    reads: tuple[Access, ...],
    writes: tuple[Access, ...],
    seconds: float,
) -> Command:
    return Command(Do.COPY, actor, f"copy:{label}", node, reads, writes, seconds=seconds)


def _work(draft: Draft, out: _List) -> None:
    """Launches and copies in the graph's order, with forced syncs at the ends of splits."""
    split_of = {n: s for s in draft.splits.splits for n in (*s.copies_in, *s.nodes)}
    throttle = _Throttle()
    nodes = draft.graph.nodes
    for t, after in zip(nodes, [*nodes[1:], None], strict=False):
        if t.op == "copy":
            _transfer(draft, out, t, throttle)
        else:
            _launch(draft, out, t)
        here = split_of.get(t.name)
        ends = after is None or split_of.get(after.name) is not here
        if here and ends and not draft.marked.isdisjoint(here.nodes):
            for actor in _actors(out, here.device):
                out.add(_sync(f"forced:{t.name}", actor))


def _actors(out: _List, device: str) -> Iterator[Actor]:
    found = {s.command.actor for s in out.steps if s.command.actor.device == device}
    yield from sorted(found)


def _sync(label: str, actor: Actor | None) -> Command:
    return Command(Do.HOST_SYNC, HOST_ACTOR, label, waits_for=actor)


def _launch(draft: Draft, out: _List, t: Tensor) -> None:
    actor = draft.streams.of[t.name]
    seconds = launch_seconds(draft.streams.spec(actor.device), t)
    reads, writes = reads_of(t), writes_of(t)
    c = Command(Do.LAUNCH, actor, t.name, t.name, reads, writes, seconds=seconds)
    out.add(c, t.overwritten.root.name if t.overwritten is not None else None)


@dataclass(eq=False)
class _Throttle:
    """Copied weights per device, in order: a copy waits for the readers of the last but one."""

    copies: dict[str, list[str]] = field(default_factory=dict)

    def before(self, device: str, name: str, out: _List) -> tuple[int, ...]:
        earlier = self.copies.setdefault(device, [])
        earlier.append(name)
        if len(earlier) <= IN_FLIGHT:
            return ()
        return tuple(out.readers.get(earlier[-1 - IN_FLIGHT], ()))


def _transfer(draft: Draft, out: _List, t: Tensor, throttle: _Throttle) -> None:
    """The commands of a Copy node: one, or two through the host, or a look and a partial copy."""
    if not t.nbytes:
        return
    source, *chosen = t.sources
    begin, end = draft.streams.spec(draft.device(source)), draft.streams.spec(draft.device(t))
    is_weight = source.root.is_leaf and source.root.kind is Kind.WEIGHT
    also = throttle.before(end.name, t.name, out) if is_weight else ()
    seconds = copy_seconds(begin, end, copied_bytes(t))
    if begin.host_visible or end.host_visible or is_peer(begin, end):
        actor = mover(draft.streams, begin.name, end.name)
        c = _copy(actor, t.name, t.name, whole(source), whole(t), seconds)
        for ids in chosen:
            _look(draft, out, ids)
            c = replace(c, chosen_by=ids.name)
        out.add(c, also=also)
        return
    middle = whole(t, staging(t.name))
    draft.staged[t.name] = 1
    up, down = (begin.link_bytes_per_s, begin.launch_s), (end.link_bytes_per_s, end.launch_s)
    away = draft.streams.copier(begin.name, outwards=True)
    took = up[1] + t.nbytes / up[0]
    out.add(_copy(away, staging(t.name), t.name, whole(source), middle, took))
    took = down[1] + t.nbytes / down[0]
    onto = draft.streams.copier(end.name, outwards=False)
    out.add(_copy(onto, t.name, t.name, middle, whole(t), took), also=also)


def _look(draft: Draft, out: _List, ids: Tensor) -> None:
    """The host reads indices, since it enqueues the copies of what they name."""
    if ids.name in draft.looked_at:
        return
    draft.looked_at.add(ids.name)
    held = _brought(draft, out, ids)
    out.add(Command(Do.HOST_READ, HOST_ACTOR, f"look:{ids.name}", ids.name, whole(ids, held)))


def _brought(draft: Draft, out: _List, t: Tensor) -> str | None:
    """The staging value through which the host sees `t`, copied once; None where it sees `t`."""
    if draft.host_visible(t) or not t.nbytes:
        return None
    if t.name not in draft.staged:
        spec = draft.streams.spec(draft.device(t))
        actor = draft.streams.copier(spec.name, outwards=True)
        seconds = spec.launch_s + t.nbytes / spec.link_bytes_per_s
        target = whole(t, staging(t.name))
        out.add(_copy(actor, staging(t.name), t.name, whole(t), target, seconds))
        draft.staged[t.name] = 1
    return staging(t.name)


def _outputs(draft: Draft, out: _List) -> None:
    """Bring the outputs to the host, wait, and read them."""
    gone = {t.overwritten.root.name: t for t in draft.graph.nodes if t.overwritten is not None}
    for t in draft.graph.outputs:
        if t.root.name in gone:
            by = gone[t.root.name].name
            raise PlanError(f"output %{t.name} is overwritten by %{by}; return a copy of it")
        _brought(draft, out, t)
    if not draft.overlap:
        out.add(_sync("end of run", None))
    for t in draft.graph.outputs:
        held = staging(t.name) if t.name in draft.staged else None
        label = f"read:{t.name}"
        out.add(Command(Do.HOST_READ, HOST_ACTOR, label, t.name, reads=whole(t, held)))
