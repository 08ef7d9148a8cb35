"""From offsets to a MemoryMap: buffers, regions, limits.

Legend: an arena is a buffer that the plan owns, `arena@DEVICE`; where one buffer cannot be large
enough there are more, `arena@DEVICE.1` and so on.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ggraph.alloc.arena_blocks import Blocks
from ggraph.alloc.check import alignments, roots
from ggraph.alloc.dyn import align_up
from ggraph.alloc.fit import NO_LIMIT, Ints
from ggraph.device import HOST
from ggraph.errors import AllocError
from ggraph.plan import Buffer, MemoryMap, Region, Schedule

Capacity = Mapping[str, int]


def arena(device: str, index: int) -> str:
    """Name of the plan's buffer number `index` on `device`."""
    return f"arena@{device}" + (f".{index}" if index else "")


def buffer_limit(schedule: Schedule, device: str) -> int:
    """Largest arena on `device`, a multiple of its alignment."""
    for d in schedule.splits.placement.devices:
        if d.name == device:
            return min(d.max_buffer_bytes & -d.alignment, NO_LIMIT)
    return NO_LIMIT  # host memory


@dataclass
class Layout:
    """A MemoryMap while it is filled in."""

    schedule: Schedule
    regions: dict[str, Region] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)  # (device, index) -> bytes

    def __post_init__(self) -> None:
        self.align, self.root = alignments(self.schedule), roots(self.schedule)

    def put(self, name: str, index: int, offset: int, slots: int, stride: int) -> None:
        """Value `name` at `offset` of its device's arena `index`; slots follow at `stride`."""
        v = self.schedule.values[name]
        offsets = (offset,) if slots == 1 else tuple([offset + k * stride for k in range(slots)])
        self.regions[name] = Region(arena(v.device, index), offsets, v.nbytes)
        end = align_up(offsets[-1] + v.nbytes, self.align[v.device])
        self.ends[v.device, index] = max(end, self.ends.get((v.device, index), 0))

    def put_blocks(self, blocks: Blocks, chosen: Iterable[int], at: Ints, limit: int) -> None:
        """Every member of the chosen blocks at offsets `at` of a space cut at `limit`."""
        for i, offset in zip(chosen, map(int, at), strict=True):
            b = blocks.blocks[i]
            for name in b.values:
                self.put(name, offset // limit, offset % limit, b.slots, b.nbytes // b.slots)

    def put_external(self) -> None:
        """Values whose bytes the caller owns: a buffer of their own, called after their root."""
        values = self.schedule.values
        for v in values.values():
            root = values[self.root[v.name]]
            if root.external or v.external:
                stride = align_up(root.nbytes, self.align[root.device])
                offsets = tuple(k * stride for k in range(max(root.slots, v.slots)))
                self.regions[v.name] = Region(root.name, offsets, v.nbytes)
                self.causes.setdefault(v.name, "external: the caller owns the buffer")

    def put_empty(self) -> None:
        """Values of zero bytes need a region all the same, and the slots of what they overwrite."""
        values = self.schedule.values
        for v in values.values():
            if v.name not in self.regions:
                self.put(v.name, 0, 0, max(v.slots, values[self.root[v.name]].slots), 0)
                self.causes.setdefault(v.name, "no bytes")

    def finish(self, mode: str) -> MemoryMap:
        """The map, with buffers in order of devices and externals in order of values."""
        buffers: dict[str, Buffer] = {}
        for device in self.align:
            for d, k in sorted(self.ends):
                if d == device:
                    name = arena(d, k)
                    buffers[name] = Buffer(name, d, self.ends[d, k], self.align[d])
        buffers.update(self._external_buffers())
        regions = {name: self.regions[name] for name in self.schedule.values}
        return MemoryMap(mode, buffers, regions, {n: self.causes.get(n, "") for n in regions})

    def _external_buffers(self) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        for name, region in self.regions.items():
            v = self.schedule.values[name]
            root = self.schedule.values.get(region.buffer)
            if root is not None and (root.external or v.external):
                had = found[root.name].nbytes if root.name in found else 0
                end = max(had, region.offsets[-1] + v.nbytes)
                found[root.name] = Buffer(
                    root.name, root.device, end, self.align[root.device], external=True
                )
        return found


def check_largest(schedule: Schedule, blocks: Blocks, capacity: Capacity | None) -> None:
    """Raise AllocError where one value alone exceeds a buffer's or the device's limit."""
    given = rooms(schedule, capacity)
    for b in blocks.blocks:
        limit = buffer_limit(schedule, b.device)
        if b.nbytes > limit:
            what = f"%{b.values[0]} needs {b.nbytes} bytes ({b.slots} slots)"
            raise AllocError(f"{what}, {b.device}'s largest buffer has {limit}")
        room = given.get(b.device)
        if room is not None and b.nbytes > room:
            raise AllocError(f"%{b.values[0]} needs {b.nbytes} bytes, {b.device} has {room}")


def rooms(schedule: Schedule, capacity: Capacity | None) -> Capacity:
    """Bytes that the arenas of each device may take: `capacity`, else its memory beside external
    buffers. Raises AllocError for an unknown device and a negative capacity."""
    known = alignments(schedule)
    for device, room in (capacity or {}).items():
        if device not in known:
            raise AllocError(f"capacity for unknown device {device!r}; known: {', '.join(known)}")
        if room < 0:
            raise AllocError(f"capacity of {device} is {room} bytes")
    rest = {d.name: d.memory_bytes for d in schedule.splits.placement.devices}
    for v in schedule.values.values():
        if v.external and v.same_as is None and v.device != HOST:
            rest[v.device] -= v.nbytes * v.slots
    return {**rest, **(capacity or {})}


def check_capacity(
    schedule: Schedule,
    memory: MemoryMap,
    capacity: Capacity | None,
    bound: Callable[[str], int],
) -> None:
    """Raise AllocError where a device's arenas need more than it has.

    `bound` gives the bytes of a device that no plan of this schedule can avoid, for the message.
    """
    for device, room in rooms(schedule, capacity).items():
        need = sum(b.nbytes for b in memory.buffers.values() if _owned(b, device))
        if need > room:
            owned = {
                n for n, r in memory.regions.items() if _owned(memory.buffers[r.buffer], device)
            }
            top = max((schedule.values[n] for n in sorted(owned)), key=lambda v: v.nbytes)
            raise AllocError(
                f"{device}: the plan needs {need} bytes, {room} are there; no {memory.mode} plan "
                f"of this order needs less than {bound(device)}; "
                f"largest value %{top.name} ({top.nbytes} bytes)"
            )


def _owned(b: Buffer, device: str) -> bool:
    return b.device == device and not b.external
