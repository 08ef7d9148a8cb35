"""Refuses schedules that no allocator can serve."""

from collections.abc import Mapping

from ggraph.alloc.dyn import check_alignment
from ggraph.device import HOST
from ggraph.errors import AllocError
from ggraph.plan import HOST_STEPS, Command, Schedule, Value
from ggraph.strides import MAX_BYTES

HOST_ALIGNMENT = 64  # bytes; a cache line


def alignments(schedule: Schedule) -> dict[str, int]:
    """Alignment in bytes per device, and of host memory."""
    specs = schedule.splits.placement.devices
    return {**{d.name: d.alignment for d in specs}, HOST: HOST_ALIGNMENT}


def check_schedule(schedule: Schedule) -> None:
    """Raise AllocError for unknown devices, streams and values, and for sizes out of range."""
    known = alignments(schedule)
    for device, alignment in known.items():
        check_alignment(alignment, f"device {device!r}")
    for key, v in schedule.values.items():
        if key != v.name:
            raise AllocError(f"value %{v.name} is listed as %{key}")
        _check_value(v, schedule, known)
    total = sum(v.nbytes * v.slots for v in schedule.values.values())
    if total > MAX_BYTES:
        raise AllocError(f"all values together need {total} bytes, more than {MAX_BYTES}")
    streams = {d.name: d.streams + d.copy_streams for d in schedule.splits.placement.devices}
    for i, c in enumerate(schedule.commands):
        _check_command(i, c, schedule, streams)


def _check_value(v: Value, schedule: Schedule, known: dict[str, int]) -> None:
    if v.device not in known:
        raise AllocError(f"%{v.name}: unknown device {v.device!r}; known: {', '.join(known)}")
    if not 0 <= v.nbytes <= MAX_BYTES:
        raise AllocError(f"%{v.name}: size {v.nbytes} is outside 0..{MAX_BYTES}")
    if v.slots < 1:
        raise AllocError(f"%{v.name}: {v.slots} slots, expected at least 1")
    for other in (*([] if v.same_as is None else [v.same_as]), *v.may_replace):
        if other not in schedule.values:
            raise AllocError(f"%{v.name}: may lie on %{other}, which is no value of the schedule")


def roots(schedule: Schedule) -> dict[str, str]:
    """For each value the one on whose bytes it must lie (itself unless it overwrites another)."""
    found: dict[str, str] = {}
    for name, v in schedule.values.items():
        if v.same_as is None:
            found[name] = name
            continue
        way = {name: None}
        while (last := next(reversed(way))) not in found:
            over = _overwritten(schedule.values, last)
            if over is None:
                found[last] = last
            elif over in way:
                raise AllocError(f"%{name}: overwrites itself through {' -> '.join([*way, over])}")
            else:
                way[over] = None
        found.update(dict.fromkeys(way, found[last]))
    return found


def _overwritten(values: Mapping[str, Value], name: str) -> str | None:
    """What `name` overwrites, on the same device."""
    v = values[name]
    if v.same_as is not None and values[v.same_as].device != v.device:
        where = values[v.same_as].device
        raise AllocError(f"%{name} on {v.device} cannot lie on %{v.same_as}, which is on {where}")
    return v.same_as


def _check_command(i: int, c: Command, schedule: Schedule, streams: dict[str, int]) -> None:
    if c.do not in HOST_STEPS and c.actor.device != HOST:
        here = f"command {i} ({c.do.value} {c.label})"
        if c.actor.device not in streams:
            raise AllocError(f"{here}: unknown device {c.actor.device!r}")
        if not 0 <= c.actor.stream < streams[c.actor.device]:
            have = streams[c.actor.device]
            raise AllocError(f"{here}: unknown stream {c.actor}; the device has {have}")
    values = schedule.values
    for a in (*c.reads, *c.writes):
        v = values.get(a.value)
        if v is None:
            raise AllocError(f"command {i}: access {a} to a value that the schedule does not list")
        if not 0 <= a.start <= a.stop <= v.nbytes:
            raise AllocError(f"command {i}: access {a} is outside %{v.name} of {v.nbytes} bytes")
