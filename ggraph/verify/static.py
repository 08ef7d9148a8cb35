"""What can be seen without any order: names, bounds, alignment, capacity, reach.

The checks run in the order of `static_faults`: later ones rely on what earlier ones have seen, and
the proof relies on them all, so that no plan, however odd, makes it fail with anything else.
"""

from collections.abc import Iterator, Mapping
from math import lcm

from ggraph.device import HOST, DeviceSpec
from ggraph.plan import Buffer, Do, Plan, Value
from ggraph.verify.declared import command_faults
from ggraph.verify.report import CounterExample, at_command
from ggraph.verify.spans import Disjoint

LONGEST_PERIOD = 64  # runs until all rotating slots stand as at the start
MOST_BYTES = 1 << 30  # of the proof's clocks
STEP_BYTES, CLOCK_BYTES = 150, 8  # of one unrolled command, as measured, and for each stream more


def static_faults(plan: Plan, iterations: int = 0) -> Iterator[CounterExample]:
    """Every fault that needs no happens-before, checks that others rely on first. `iterations` as
    in `verify`."""
    devices = {d.name: d for d in plan.schedule.splits.placement.devices}
    yield from _shapes(plan)
    yield from _names(plan)
    yield from _capacity(plan, devices)
    yield from _regions(plan)
    yield from command_faults(plan, devices)
    yield from _versions(plan)
    yield from _size(plan, iterations)


def unrolled_runs(plan: Plan, iterations: int) -> int:
    """How many runs the proof walks through.

    Two periods: every pair of runs that can meet lies within one period or in neighbours, since a
    command is always ordered before itself one period later, on the same bytes.
    """
    return max(2 * period(plan), iterations)


def _size(plan: Plan, iterations: int) -> Iterator[CounterExample]:
    """What a proof would not end in reasonable time and memory for. A run without commands costs
    what it keeps."""
    actors = {a for c in plan.schedule for a in (c.actor, c.waits_for) if a is not None}
    runs = unrolled_runs(plan, iterations)
    steps = runs * max(1, len(plan.schedule.commands))
    if steps * (STEP_BYTES + CLOCK_BYTES * len(actors)) > MOST_BYTES:
        message = f"{steps} commands in {runs} runs, by {len(actors)} streams: too many to prove"
        yield CounterExample("capacity", message)


def period(plan: Plan) -> int:
    """Runs after which all rotating slots stand as at the start; at least 1."""
    return lcm(*{len(r.offsets) for r in plan.memory.regions.values()})


def _shapes(plan: Plan) -> Iterator[CounterExample]:
    """Tensors have a stride for each axis, and no axis of fewer than no places."""
    for t in plan.graph:
        if len(t.shape) != len(t.strides) or min(t.shape, default=0) < 0:
            shown = f"{t.name!r} has shape {t.shape} and strides {t.strides}"
            yield CounterExample("declaration", shown, values=(t.name,))


def _names(plan: Plan) -> Iterator[CounterExample]:
    """Whatever is named exists, and overwrites lead to some first value."""
    values, buffers = plan.schedule.values, plan.memory.buffers
    for table, name, title in (
        *(("value", k, v.name) for k, v in values.items()),
        *(("buffer", k, b.name) for k, b in buffers.items()),
    ):
        if name != title:
            yield CounterExample("declaration", f"{table} {name!r} calls itself {title!r}")
    carried = (("carried", n) for pair in plan.schedule.carried.items() for n in pair)
    over = ((repr(v.name), n) for v in values.values() for n in _over(v))
    regions = (("the memory map", n) for n in plan.memory.regions)
    for who, name in (*over, *carried, *regions):
        if name not in values:
            yield CounterExample("declaration", f"unknown value {name!r} is named by {who}")
    for v in _circles(values):
        yield CounterExample("declaration", f"{v.name!r} overwrites itself", values=(v.name,))
    for v in values.values():
        if v.nbytes < 0:
            yield CounterExample("bounds", f"{v.name!r} has {v.nbytes} bytes", values=(v.name,))


def _over(v: Value) -> tuple[str, ...]:
    """The values on whose bytes it may lie, or must."""
    return v.may_replace if v.same_as is None else (*v.may_replace, v.same_as)


def _circles(values: Mapping[str, Value]) -> Iterator[Value]:
    """Values whose chain of overwrites comes back to them; each chain is walked once."""
    ended: set[str] = set()
    for v in (v for v in values.values() if v.same_as is not None):
        passed: dict[str, None] = {}
        at: Value | None = v
        while at is not None and at.name not in ended and at.name not in passed:
            passed[at.name] = None
            at = values.get(at.same_as) if at.same_as is not None else None
        if at is not None and at.name in passed:
            yield at
        ended.update(passed)


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
        if value.same_as is not None:
            yield from _sharing(value, value.same_as, plan)
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


def _sharing(value: Value, over: str, plan: Plan) -> Iterator[CounterExample]:
    """What overwrites a value lies on that value's bytes, in every slot."""
    mine, other = plan.memory.regions[value.name], plan.memory.regions.get(over)
    if other is None or (other.buffer, other.offsets) != (mine.buffer, mine.offsets):
        where = f"overwrites {over!r}, but lies elsewhere: {mine.buffer}+{mine.offsets}"
        yield _value("alias", value, where)


def _value(kind: str, value: Value, message: str) -> CounterExample:
    return CounterExample(kind, f"{value.name!r} {message}", values=(value.name,))


def _versions(plan: Plan) -> Iterator[CounterExample]:
    """A value is one version: no byte of it is written by two commands of a run."""
    written: dict[str, Disjoint] = {}
    for i, c in enumerate(plan.schedule):
        if c.do is Do.HOST_FREE:
            continue
        for a in c.writes:
            if not written.setdefault(a.value, Disjoint()).add(a.start, a.stop):
                yield at_command(plan, i, "declaration", f"{a} has been written before in this run")
