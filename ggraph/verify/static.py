"""What can be seen without any order: bounds, alignment, capacity, declared accesses. Floor 6."""

from collections.abc import Iterator, Mapping

from ggraph.device import HOST, DeviceSpec
from ggraph.plan import HOST_ACTOR, HOST_STEPS, Access, Command, Do, Plan, Value
from ggraph.tensor import Kind, Tensor
from ggraph.verify.report import CounterExample, Site, neighbourhood


def static_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every fault that needs no happens-before, cheapest checks first."""
    devices = {d.name: d for d in plan.schedule.splits.placement.devices}
    yield from _regions(plan)
    yield from _capacity(plan, devices)
    yield from _commands(plan, devices)
    yield from _declared(plan)


def _regions(plan: Plan) -> Iterator[CounterExample]:
    buffers, regions = plan.memory.buffers, plan.memory.regions
    for name, value in plan.schedule.values.items():
        region = regions.get(name)
        if region is None:
            yield CounterExample("bounds", f"value {name!r} has no region", values=(name,))
            continue
        buffer = buffers.get(region.buffer)
        if buffer is None:
            yield CounterExample("bounds", f"{name!r} lies in unknown buffer {region.buffer!r}")
            continue
        if buffer.device != value.device:
            yield CounterExample(
                "bounds", f"{name!r} belongs on {value.device}, but lies on {buffer.device}"
            )
        if region.nbytes < value.nbytes or not region.offsets:
            yield CounterExample(
                "bounds", f"{name!r} has {value.nbytes} bytes, its region {region.nbytes}"
            )
        for offset in region.offsets:
            if offset < 0 or offset + region.nbytes > buffer.nbytes:
                yield CounterExample(
                    "bounds",
                    f"{name!r} at [{offset}, {offset + region.nbytes}) leaves {buffer.name} of "
                    f"{buffer.nbytes} bytes",
                    values=(name,),
                )
            if value.nbytes and value.same_as is None and offset % max(buffer.alignment, 1):
                yield CounterExample(
                    "alignment",
                    f"{name!r} at offset {offset} of {buffer.name}: no multiple of "
                    f"{buffer.alignment}",
                    values=(name,),
                )
        yield from _sharing(name, value, plan)


def _sharing(name: str, value: Value, plan: Plan) -> Iterator[CounterExample]:
    if value.same_as is None:
        return
    mine, other = plan.memory.regions[name], plan.memory.regions.get(value.same_as)
    if other is None or (other.buffer, other.offsets) != (mine.buffer, mine.offsets):
        yield CounterExample(
            "alias",
            f"{name!r} overwrites {value.same_as!r} and must lie on its bytes, but lies at "
            f"{mine.buffer}+{mine.offsets}",
            values=(name, value.same_as),
        )


def _capacity(plan: Plan, devices: Mapping[str, DeviceSpec]) -> Iterator[CounterExample]:
    used: dict[str, int] = {}
    for b in plan.memory.buffers.values():
        if b.alignment < 1 or b.alignment & (b.alignment - 1):
            yield CounterExample("alignment", f"{b.name}: alignment {b.alignment}")
        if b.device == HOST:
            continue
        spec = devices.get(b.device)
        if spec is None:
            yield CounterExample("capacity", f"buffer {b.name!r} is on unknown device {b.device!r}")
            continue
        used[b.device] = used.get(b.device, 0) + b.nbytes
        if b.nbytes > spec.max_buffer_bytes:
            yield CounterExample(
                "capacity",
                f"{b.name} has {b.nbytes} bytes, {b.device} allows {spec.max_buffer_bytes}",
            )
    for device, nbytes in used.items():
        if nbytes > devices[device].memory_bytes:
            yield CounterExample(
                "capacity",
                f"{nbytes} bytes on {device}, which has {devices[device].memory_bytes}",
            )


def _commands(plan: Plan, devices: Mapping[str, DeviceSpec]) -> Iterator[CounterExample]:
    recorded = {c.event for c in plan.schedule if c.do is Do.RECORD}
    for i, c in enumerate(plan.schedule):
        fault = _misplaced(c, devices) or _eventless(c, recorded) or _out_of_range(c, plan)
        if fault:
            yield _at(plan, i, "declaration", fault)


def _misplaced(c: Command, devices: Mapping[str, DeviceSpec]) -> str:
    if (c.do in HOST_STEPS) != (c.actor == HOST_ACTOR):
        return f"{c.do.value} on {c.actor}"
    if c.actor == HOST_ACTOR:
        return ""
    spec = devices.get(c.actor.device)
    if spec is None:
        return f"unknown device {c.actor.device!r}"
    if not 0 <= c.actor.stream < spec.streams + spec.copy_streams:
        return f"stream {c.actor.stream} of {spec.streams + spec.copy_streams} on {spec.name}"
    return ""


def _eventless(c: Command, recorded: set[str | None]) -> str:
    if c.do in (Do.RECORD, Do.WAIT) and not c.event:
        return f"{c.do.value} without an event"
    if c.do in (Do.WAIT, Do.HOST_SYNC) and c.event and c.event not in recorded:
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


def _at(plan: Plan, i: int, kind: str, message: str) -> CounterExample:
    commands = plan.schedule.commands
    site = Site(i, 0, str(commands[i]))
    return CounterExample(kind, message, site, nearby=neighbourhood(commands, i))


def _declared(plan: Plan) -> Iterator[CounterExample]:
    """Accesses must cover what the graph's tensors need; every output must reach the host."""
    tensors = {t.name: t for t in plan.graph}
    if not tensors:
        return  # a plan of another runtime: its declarations are all there is
    launched: set[str] = set()
    read_back: set[str] = set()
    for i, c in enumerate(plan.schedule):
        t = tensors.get(c.node or "")
        if c.do is Do.HOST_READ and c.node:
            read_back.add(c.node)
        if c.do is not Do.LAUNCH or t is None:
            continue
        launched.add(t.name)
        yield from (_at(plan, i, "declaration", m) for m in _missing(c, t))
    wanted = {t.name for t in tensors.values() if not t.is_leaf and not t.is_view and t.nbytes}
    copied = {c.node for c in plan.schedule if c.do is Do.COPY}
    for name in sorted(wanted - launched - {n for n in copied if n}):
        yield CounterExample("declaration", f"no command computes {name!r}", values=(name,))
    for t in plan.graph.outputs:
        if t.name not in read_back:
            yield CounterExample("declaration", f"the host never reads output {t.name!r}")


def _missing(c: Command, t: Tensor) -> Iterator[str]:
    for s in t.sources:
        for start, stop in s.byte_ranges():
            if not _covers(c.reads, s.root.name, start, stop):
                yield f"reads bytes [{start}, {stop}) of {s.root.name!r} without declaring it"
    if t.kind is Kind.COMPUTED and t.nbytes and not _covers(c.writes, t.name, 0, t.nbytes):
        yield f"writes {t.nbytes} bytes of {t.name!r} without declaring it"


def _covers(accesses: tuple[Access, ...], value: str, start: int, stop: int) -> bool:
    reached = start
    for a in sorted((a for a in accesses if a.value == value), key=lambda a: a.start):
        if a.start <= reached:
            reached = max(reached, a.stop)
    return reached >= stop
