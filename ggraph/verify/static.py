"""What can be seen without any order: names, bounds, alignment, capacity, reach.

The checks run in the order of `static_faults`: later ones rely on what earlier ones have seen, and
the proof relies on them all, so that no plan, however odd, makes it fail with anything else.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import lcm

from ggraph.device import HOST, DeviceSpec
from ggraph.plan import HOST_ACTOR, HOST_STEPS, Actor, Buffer, Command, Do, Plan, Value
from ggraph.verify.report import CounterExample, Site, neighbourhood

LONGEST_PERIOD = 64  # runs until all rotating slots stand as at the start

# What a command may declare: reads, writes. Launches and copies do both.
_SHAPE: Mapping[Do, tuple[bool, bool]] = {
    Do.RECORD: (False, False),
    Do.WAIT: (False, False),
    Do.HOST_SYNC: (False, False),
    Do.HOST_READ: (True, False),
    Do.HOST_WRITE: (False, True),
    Do.HOST_FREE: (False, True),
}


def static_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every fault that needs no happens-before, checks that others rely on first."""
    devices = {d.name: d for d in plan.schedule.splits.placement.devices}
    yield from _names(plan)
    yield from _capacity(plan, devices)
    yield from _regions(plan)
    yield from _commands(plan, devices)
    yield from _versions(plan)


def period(plan: Plan) -> int:
    """Runs after which all rotating slots stand as at the start; at least 1."""
    return lcm(*{len(r.offsets) for r in plan.memory.regions.values()})


def at_command(plan: Plan, i: int, kind: str, message: str) -> CounterExample:
    """A fault that one command shows by itself."""
    commands = plan.schedule.commands
    site = Site(i, 0, str(commands[i]))
    return CounterExample(kind, message, site, nearby=neighbourhood(commands, i))


def _names(plan: Plan) -> Iterator[CounterExample]:
    """Whatever is named exists, and overwrites lead to some first value."""
    values, buffers = plan.schedule.values, plan.memory.buffers
    for table, name, title in (
        *(("value", k, v.name) for k, v in values.items()),
        *(("buffer", k, b.name) for k, b in buffers.items()),
    ):
        if name != title:
            yield CounterExample("declaration", f"{table} {name!r} calls itself {title!r}")
    carried = (n for pair in plan.schedule.carried.items() for n in pair)
    named = (n for v in values.values() for n in (*v.may_replace, *_some(v.same_as)))
    for name in (*named, *carried, *plan.memory.regions):
        if name not in values:
            yield CounterExample("declaration", f"unknown value {name!r} is named")
    for v in values.values():
        if _circular(v, values):
            yield CounterExample("declaration", f"{v.name!r} overwrites itself", values=(v.name,))
        if v.nbytes < 0:
            yield CounterExample("bounds", f"{v.name!r} has {v.nbytes} bytes", values=(v.name,))


def _some(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _circular(v: Value, values: Mapping[str, Value]) -> bool:
    seen = {v.name}
    while v.same_as is not None and v.same_as in values:
        v = values[v.same_as]
        if v.name in seen:
            return True
        seen.add(v.name)
    return False


def _capacity(plan: Plan, devices: Mapping[str, DeviceSpec]) -> Iterator[CounterExample]:
    used: dict[str, int] = {}
    for b in plan.memory.buffers.values():
        if b.alignment < 1 or b.alignment & (b.alignment - 1):
            message = f"{b.name}: alignment {b.alignment} is not a power of two"
            yield CounterExample("alignment", message, buffer=b.name)
        if b.nbytes < 0:
            yield CounterExample("bounds", f"{b.name} has {b.nbytes} bytes", buffer=b.name)
        if b.device == HOST:
            continue
        spec = devices.get(b.device)
        if spec is None:
            yield CounterExample("capacity", f"{b.name} is on unknown device {b.device!r}")
            continue
        used[b.device] = used.get(b.device, 0) + b.nbytes
        if b.alignment < spec.alignment:
            message = f"{b.name} is aligned to {b.alignment}, {b.device} needs {spec.alignment}"
            yield CounterExample("alignment", message, buffer=b.name)
        if b.nbytes > spec.max_buffer_bytes:
            message = f"{b.name} has {b.nbytes} bytes, {b.device} allows {spec.max_buffer_bytes}"
            yield CounterExample("capacity", message, buffer=b.name)
    for device, nbytes in used.items():
        if nbytes > (room := devices[device].memory_bytes):
            yield CounterExample("capacity", f"{nbytes} bytes on {device}, which has {room}")


def _regions(plan: Plan) -> Iterator[CounterExample]:
    for value in plan.schedule.values.values():
        region = plan.memory.regions.get(value.name)
        buffer = plan.memory.buffers.get(region.buffer) if region is not None else None
        if region is None or buffer is None:
            where = f"unknown buffer {region.buffer!r}" if region is not None else "no region"
            yield _value("bounds", value, f"lies in {where}")
            continue
        if buffer.device != value.device:
            yield _value("bounds", value, f"belongs on {value.device}, lies on {buffer.device}")
        if value.external and not buffer.external:
            yield _value("declaration", value, f"is the caller's, its buffer {buffer.name} is not")
        if region.nbytes < value.nbytes:
            yield _value("bounds", value, f"has {value.nbytes} bytes, its region {region.nbytes}")
        if not region.offsets:
            yield _value("bounds", value, "has a region without an offset")
        for offset in region.offsets:
            yield from _offset(value, offset, region.nbytes, buffer)
        yield from _sharing(value, plan)
    if (runs := period(plan)) > LONGEST_PERIOD:
        message = f"slots rotate with a period of {runs} runs, at most {LONGEST_PERIOD} are proved"
        yield CounterExample("declaration", message)


def _offset(value: Value, offset: int, nbytes: int, buffer: Buffer) -> Iterator[CounterExample]:
    if offset < 0 or offset + nbytes > buffer.nbytes:
        where = f"[{offset}, {offset + nbytes}) leaves {buffer.name} of {buffer.nbytes} bytes"
        yield _value("bounds", value, f"at {where}")
    if value.nbytes and value.same_as is None and offset % buffer.alignment:
        where = f"at offset {offset} of {buffer.name}: no multiple of {buffer.alignment}"
        yield _value("alignment", value, where)


def _sharing(value: Value, plan: Plan) -> Iterator[CounterExample]:
    """What overwrites a value lies on that value's bytes, in every slot."""
    mine, regions = plan.memory.regions[value.name], plan.memory.regions
    other = regions.get(value.same_as) if value.same_as is not None else mine
    if other is None or (other.buffer, other.offsets) != (mine.buffer, mine.offsets):
        where = f"overwrites {value.same_as!r}, but lies elsewhere: {mine.buffer}+{mine.offsets}"
        yield _value("alias", value, where)


def _value(kind: str, value: Value, message: str) -> CounterExample:
    return CounterExample(kind, f"{value.name!r} {message}", values=(value.name,))


def _commands(plan: Plan, devices: Mapping[str, DeviceSpec]) -> Iterator[CounterExample]:
    recorded = {c.event for c in plan.schedule if c.do is Do.RECORD}
    read: set[str | None] = {None}
    for i, c in enumerate(plan.schedule):
        read |= {c.node} if c.do is Do.HOST_READ else set()
        fault = (
            _misplaced(c, devices)
            or _misshapen(c)
            or _unchosen(c, read)
            or _eventless(c, recorded)
            or _out_of_range(c, plan)
            or _out_of_reach(c, plan, devices)
        )
        if fault:
            yield at_command(plan, i, "declaration", fault)


def _misplaced(c: Command, devices: Mapping[str, DeviceSpec]) -> str:
    if (c.do in HOST_STEPS) != (c.actor == HOST_ACTOR):
        return f"{c.do.value} on {c.actor}"
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
    sizes = [sum(a.stop - a.start for a in part) for part in (c.reads, c.writes)]
    if c.event is not None and c.waits_for is not None:
        return f"{c.do.value} for {c.event!r} and for {c.waits_for}: one of them"
    if c.do is Do.COPY and sizes[0] != sizes[1]:
        return f"copy of {sizes[0]} bytes to {sizes[1]} bytes"
    return ""


def _unchosen(c: Command, read: AbstractSet[str | None]) -> str:
    """The host enqueues a partial copy: it must have read what chooses the part."""
    if c.chosen_by is not None and (c.do is not Do.COPY or c.chosen_by not in read):
        return f"{c.do.value} chosen by {c.chosen_by!r}, which the host has not read before"
    return ""


def _eventless(c: Command, recorded: set[str | None]) -> str:
    if c.do in (Do.RECORD, Do.WAIT) and not c.event:
        return f"{c.do.value} without an event"
    if c.do in (Do.WAIT, Do.HOST_SYNC) and c.event is not None and c.event not in recorded:
        return f"{c.do.value} for {c.event!r}, which nothing records"
    return ""


def _out_of_range(c: Command, plan: Plan) -> str:
    for a in (*c.reads, *c.writes):
        value = plan.schedule.values.get(a.value)
        if value is None:
            return f"access to unknown value {a.value!r}"
        if not 0 <= a.start <= a.stop <= value.nbytes:
            return f"access {a} leaves the value's {value.nbytes} bytes"
    return ""


def _out_of_reach(c: Command, plan: Plan, devices: Mapping[str, DeviceSpec]) -> str:
    """Kernels and the host touch memory that they see; copies are there for the rest."""
    for a in (*c.reads, *c.writes):
        home = plan.schedule.values[a.value].device
        if c.do is not Do.COPY and not _sees(c.actor.device, home, devices):
            return f"{c.do.value} on {c.actor} cannot reach {a} on {home}"
    return ""


def _sees(device: str, home: str, devices: Mapping[str, DeviceSpec]) -> bool:
    """One's own memory; among host and host-visible devices, anyone's."""
    open_to_all = (d == HOST or devices[d].host_visible for d in (device, home))
    return device == home or all(open_to_all)


def _versions(plan: Plan) -> Iterator[CounterExample]:
    """A value is one version: no byte of it is written by two commands of a run."""
    written: dict[str, list[tuple[int, int]]] = {}
    for i, c in enumerate(plan.schedule):
        if c.do is Do.HOST_FREE:
            continue
        for a in c.writes:
            before = written.setdefault(a.value, [])
            if any(start < a.stop and a.start < stop for start, stop in before):
                yield at_command(plan, i, "declaration", f"{a} has been written before in this run")
            before.append((a.start, a.stop))
