"""What each command may declare: who, where, which bytes, which events. One at a time, no order."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from ggraph.device import HOST, DeviceSpec
from ggraph.plan import HOST_ACTOR, HOST_STEPS, Actor, Command, Do, Plan
from ggraph.verify.report import CounterExample, at_command

# What a command may declare: reads, writes. Launches and copies do both.
_SHAPE: Mapping[Do, tuple[bool, bool]] = {
    Do.RECORD: (False, False),
    Do.WAIT: (False, False),
    Do.HOST_SYNC: (False, False),
    Do.HOST_READ: (True, False),
    Do.HOST_WRITE: (False, True),
    Do.HOST_FREE: (False, True),
}


def command_faults(plan: Plan, devices: Mapping[str, DeviceSpec]) -> Iterator[CounterExample]:
    """Every command that cannot be what it declares; values and buffers have been seen."""
    recorders: dict[str | None, str] = {}  # event -> the device that records it first
    for c in plan.schedule:
        if c.do is Do.RECORD:
            recorders.setdefault(c.event, c.actor.device)
    read: set[str | None] = {None}
    for i, c in enumerate(plan.schedule):
        read |= {c.node} if c.do is Do.HOST_READ else set()
        fault = (
            _misplaced(c, devices)
            or _misshapen(c)
            or _unchosen(c, read)
            or _eventless(c, recorders)
            or _out_of_range(c, plan)
            or _out_of_reach(c, plan, devices)
        )
        if fault:
            yield at_command(plan, i, "declaration", fault)


def _misplaced(c: Command, devices: Mapping[str, DeviceSpec]) -> str:
    if (c.do in HOST_STEPS) != (c.actor == HOST_ACTOR):
        return f"{c.do.value} on {c.actor}"
    if c.do is Do.HOST_SYNC and c.waits_for == HOST_ACTOR:
        return f"{c.do.value} on the host itself"
    return _unknown(c.actor, devices) or (_unknown(c.waits_for, devices) if c.waits_for else "")


def _unknown(actor: Actor, devices: Mapping[str, DeviceSpec]) -> str:
    if actor == HOST_ACTOR:
        return ""
    spec = devices.get(actor.device)
    if spec is None:
        return f"unknown device {actor.device!r}"
    count = spec.streams + spec.copy_streams
    return "" if 0 <= actor.stream < count else f"stream {actor.stream} of {count} on {spec.name}"


def _misshapen(c: Command) -> str:
    reads, writes = _SHAPE.get(c.do, (True, True))
    if (c.reads and not reads) or (c.writes and not writes):
        return f"{c.do.value} cannot touch {(c.writes or c.reads)[0]}"
    if c.waits_for is not None and c.do is not Do.HOST_SYNC:
        return f"{c.do.value} cannot wait for {c.waits_for}"
    if c.event is not None and c.waits_for is not None:
        return f"{c.do.value} for {c.event!r} and for {c.waits_for}: one of them"
    if c.do is Do.COPY:
        sizes = [sum(a.stop - a.start for a in part) for part in (c.reads, c.writes)]
        if sizes[0] != sizes[1]:
            return f"copy of {sizes[0]} bytes to {sizes[1]} bytes"
    return ""


def _unchosen(c: Command, read: AbstractSet[str | None]) -> str:
    """The host enqueues a partial copy: it must have read what chooses the part."""
    if c.chosen_by is not None and (c.do is not Do.COPY or c.chosen_by not in read):
        return f"{c.do.value} chosen by {c.chosen_by!r}, which the host has not read before"
    return ""


def _eventless(c: Command, recorders: Mapping[str | None, str]) -> str:
    """Who waits for an event asks the one device that records it."""
    if c.do in (Do.RECORD, Do.WAIT) and not c.event:
        return f"{c.do.value} without an event"
    if c.do not in (Do.RECORD, Do.WAIT, Do.HOST_SYNC) and c.event is not None:
        return f"{c.do.value} can neither record {c.event!r} nor wait for it"
    if c.do in (Do.WAIT, Do.HOST_SYNC) and c.event is not None and c.event not in recorders:
        return f"{c.do.value} for {c.event!r}, which nothing records"
    if c.do is Do.RECORD and (first := recorders[c.event]) != c.actor.device:
        return f"event {c.event!r} is recorded on {first} and on {c.actor.device}"
    return ""


def _out_of_range(c: Command, plan: Plan) -> str:
    values = plan.schedule.values
    for a in (*c.reads, *c.writes):
        value = values.get(a.value)
        if value is None:
            return f"access to unknown value {a.value!r}"
        if not 0 <= a.start <= a.stop <= value.nbytes:
            return f"access {a} leaves the value's {value.nbytes} bytes"
    return ""


def _out_of_reach(c: Command, plan: Plan, devices: Mapping[str, DeviceSpec]) -> str:
    """Kernels and the host touch memory that they see; copies are there for the rest."""
    if c.do is Do.COPY:
        return ""
    values, mine = plan.schedule.values, c.actor.device
    for a in (*c.reads, *c.writes):
        home = values[a.value].device
        if home != mine and not _sees(mine, home, devices):
            return f"{c.do.value} on {c.actor} cannot reach {a} on {home}"
    return ""


def _sees(device: str, home: str, devices: Mapping[str, DeviceSpec]) -> bool:
    """Another's memory: among host and host-visible devices, anyone's."""
    return all(d == HOST or devices[d].host_visible for d in (device, home))
