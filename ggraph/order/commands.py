"""The commands of one run, in enqueue order, before events are put between them.

Inputs first: the host writes them all, in place or to staging values, then copies take those to
their devices, so that all that is enqueued up to the host's next wait stands together. Then nodes
and copies in the graph's order, then the outputs. A `Step` is a command and the steps that must be
complete before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ggraph.errors import PlanError
from ggraph.order.steps import Ordering, Step, Steps
from ggraph.order.streams import (
    copied_bytes,
    copy_seconds,
    is_peer,
    link_seconds,
    mover,
)
from ggraph.order.values import reads_of, staging, writes_of
from ggraph.plan import HOST_ACTOR, Access, Actor, Command, Do
from ggraph.tensor import Kind, Tensor

IN_FLIGHT = 2  # weights copied for one run that may lie in a device's memory at once


def commands(o: Ordering) -> list[Step]:
    """Every step of one run except events and the syncs that they replace."""
    found = Steps()
    inputs = o.graph.leaves(Kind.INPUT)
    for t in inputs:
        _feed(o, found, t)
    for t in inputs:
        _send(o, found, t)
    _work(o, found)
    _outputs(o, found)
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


def _feed(o: Ordering, out: Steps, t: Tensor) -> None:
    target = None
    if not o.host_visible(t):
        target = staging(t.name)
        o.staged[t.name] = o.n_copies
    label = f"write:{t.name}"
    out.add(Command(Do.HOST_WRITE, HOST_ACTOR, label, t.name, writes=whole(t, target)))


def _send(o: Ordering, out: Steps, t: Tensor) -> None:
    """Copy a staged input to its device."""
    if t.name in o.staged and t.nbytes:
        spec = o.streams.spec(o.device(t))
        actor = o.streams.copier(spec.name, outwards=False)
        seconds = link_seconds(spec, t.nbytes)
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


def _work(o: Ordering, out: Steps) -> None:
    """Launches and copies in the graph's order, with forced syncs at the ends of splits."""
    split_of = {n: s for s in o.splits.splits for n in (*s.copies_in, *s.nodes)}
    throttle = _Throttle()
    nodes = o.graph.nodes
    for t in nodes:
        if t.op != "copy":
            actor = o.streams.of[t.name]
            o.beside.ask(t, actor, o.streams.spec(actor.device).needs(t))
    for t, after in zip(nodes, [*nodes[1:], None], strict=False):
        if t.op == "copy":
            _transfer(o, out, t, throttle)
        else:
            _launch(o, out, t)
        here = split_of.get(t.name)
        ends = after is None or split_of.get(after.name) is not here
        if here and ends and not o.marked.isdisjoint(here.nodes):
            for actor in _actors(out, here.device):
                out.add(_sync(f"forced:{t.name}", actor))


def _actors(out: Steps, device: str) -> Iterator[Actor]:
    found = {s.command.actor for s in out.steps if s.command.actor.device == device}
    yield from sorted(found)


def _sync(label: str, actor: Actor | None) -> Command:
    return Command(Do.HOST_SYNC, HOST_ACTOR, label, waits_for=actor)


def _launch(o: Ordering, out: Steps, t: Tensor) -> None:
    actor = o.streams.of[t.name]
    seconds = o.streams.seconds[t.name]
    held, filled = o.beside.of(t, actor)
    reads, writes = (*reads_of(t), *held), (*writes_of(t), *filled)
    c = Command(Do.LAUNCH, actor, t.name, t.name, reads, writes, seconds=seconds)
    old = t.overwritten
    out.add(c, old.root.name if old is not None else None)


@dataclass(eq=False)
class _Throttle:
    """Copied weights per device, in order: a copy waits for the readers of the last but one."""

    copies: dict[str, list[str]] = field(default_factory=dict)

    def before(self, device: str, name: str, out: Steps) -> tuple[int, ...]:
        earlier = self.copies.setdefault(device, [])
        earlier.append(name)
        if len(earlier) <= IN_FLIGHT:
            return ()
        return tuple(out.readers.get(earlier[-1 - IN_FLIGHT], ()))


def _transfer(o: Ordering, out: Steps, t: Tensor, throttle: _Throttle) -> None:
    """The commands of a Copy node: one, or two through the host, or a look and a partial copy."""
    if not t.nbytes:
        return
    source, *chosen = t.sources
    begin, end = o.streams.spec(o.device(source)), o.streams.spec(o.device(t))
    is_weight = source.root.is_leaf and source.root.kind is Kind.WEIGHT
    also = throttle.before(end.name, t.name, out) if is_weight else ()
    seconds = copy_seconds(begin, end, copied_bytes(t))
    if begin.host_visible or end.host_visible or is_peer(begin, end):
        actor = mover(o.streams, begin.name, end.name)
        c = _copy(actor, t.name, t.name, whole(source), whole(t), seconds)
        for ids in chosen:
            _look(o, out, ids)
            c = replace(c, chosen_by=ids.name)
        out.add(c, also=also)
        return
    held = whole(source, _brought(o, out, source))
    onto = o.streams.copier(end.name, outwards=False)
    took = link_seconds(end, t.nbytes)
    out.add(_copy(onto, t.name, t.name, held, whole(t), took), also=also)


def _look(o: Ordering, out: Steps, ids: Tensor) -> None:
    """The host reads indices, since it enqueues the copies of what they name."""
    if ids.name in o.looked_at:
        return
    o.looked_at.add(ids.name)
    held = _brought(o, out, ids)
    out.add(Command(Do.HOST_READ, HOST_ACTOR, f"look:{ids.name}", ids.name, whole(ids, held)))


def _brought(o: Ordering, out: Steps, t: Tensor) -> str | None:
    """The staging value through which the host sees `t`, copied once; None where it sees `t`."""
    if o.host_visible(t) or not t.nbytes:
        return None
    if t.name not in o.staged:
        spec = o.streams.spec(o.device(t))
        actor = o.streams.copier(spec.name, outwards=True)
        seconds = link_seconds(spec, t.nbytes)
        target = whole(t, staging(t.name))
        out.add(_copy(actor, staging(t.name), t.name, whole(t), target, seconds))
        o.staged[t.name] = 1
    return staging(t.name)


def _outputs(o: Ordering, out: Steps) -> None:
    """Bring the outputs to the host, wait, and read them."""
    gone = {t.overwritten.root.name: t for t in o.graph.nodes if t.overwritten is not None}
    for t in o.graph.outputs:
        if t.root.name in gone:
            by = gone[t.root.name].name
            raise PlanError(f"output %{t.name} is overwritten by %{by}; return a copy of it")
        _brought(o, out, t)
    if not o.overlap:
        out.add(_sync("end of run", None))
    for t in o.graph.outputs:
        held = staging(t.name) if t.name in o.staged else None
        label = f"read:{t.name}"
        out.add(Command(Do.HOST_READ, HOST_ACTOR, label, t.name, reads=whole(t, held)))
