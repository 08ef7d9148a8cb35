"""Schedule -> MemoryMap: where every value lies, and which values share bytes.

Three modes: `hb` (default) passes bytes from one value to the next only where happens-before
allows it in the steady state; `offline` searches the same rule for a smaller peak; `ggml` trusts
list order, offset for offset as upstream does, and is therefore unsafe on several streams.
Nothing here reorders or retries: that is the pipeline's.
"""

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from ggraph.alloc import hb
from ggraph.alloc.arena_blocks import Blocks, make_blocks
from ggraph.alloc.bounds import Bound, live_bytes, live_table, lower_bound
from ggraph.alloc.check import check_schedule
from ggraph.alloc.conflicts import packing, times
from ggraph.alloc.fit import Packing, extent
from ggraph.alloc.layout import Layout, buffer_limit, check_capacity, check_largest, rooms
from ggraph.alloc.listed import ggml_map
from ggraph.alloc.offers import Offer, fitting_edges, ordering_offers, peak_bytes
from ggraph.alloc.precedence import Ints, precedence
from ggraph.alloc.tenants import tenants
from ggraph.errors import AllocError
from ggraph.lazy import lazy
from ggraph.plan import MemoryMap, Schedule

if TYPE_CHECKING:
    from ggraph.alloc.search import offline
else:
    offline = lazy("ggraph.alloc.search.offline")

__all__ = [
    "MODES",
    "Offer",
    "allocate",
    "fitting_edges",
    "lower_bounds",
    "ordering_offers",
    "peak_bytes",
    "rooms",
    "tenants",
]

MODES = ("hb", "offline", "ggml")


def allocate(
    schedule: Schedule,
    *,
    mode: str = "hb",
    capacity: Mapping[str, int] | None = None,
    offline_seconds: float = 0.2,
) -> MemoryMap:
    """Buffers, and a region in one of them for every value of `schedule`.

    `capacity` limits the arena bytes of each device (default: its memory beside the external
    buffers). `offline_seconds` is the search budget of `offline` mode for each device, in seconds
    of a nominal machine: work is counted and not timed, so equal input gives an equal map.
    Raises AllocError for an unknown mode, device, stream or value, a size out of range, and where
    the plan does not fit; the message names the tensor and the number.
    """
    if mode not in MODES:
        raise AllocError(f"unknown allocator mode {mode!r}; known: {', '.join(MODES)}")
    if not 0 <= offline_seconds < inf:
        raise AllocError(f"offline_seconds={offline_seconds}: expected 0 or more, and an end")
    check_schedule(schedule)
    blocks = make_blocks(schedule, precedence(schedule))
    check_largest(schedule, blocks, capacity)
    if mode == "ggml":
        memory = ggml_map(schedule)
    else:
        memory = _ordered_map(schedule, blocks, offline_seconds if mode == "offline" else 0)
    check_capacity(schedule, memory, capacity, lambda device: _bound(blocks, device).nbytes)
    return memory


def lower_bounds(schedule: Schedule) -> dict[str, Bound]:
    """For each device a number of arena bytes that no plan of this order can do without."""
    check_schedule(schedule)
    blocks = make_blocks(schedule, precedence(schedule))
    return {device: _bound(blocks, device) for device in _devices(blocks)}


def _devices(blocks: Blocks) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b.device for b in blocks.blocks))


def _bound(blocks: Blocks, device: str) -> Bound:
    return lower_bound(blocks, blocks.of_device(device))


def _ordered_map(schedule: Schedule, blocks: Blocks, seconds: float) -> MemoryMap:
    """The map of `hb` mode, searched further when `seconds` is positive."""
    layout = Layout(schedule, causes=dict(blocks.causes))
    for device in _devices(blocks):
        of = blocks.of_device(device)
        if not of:
            continue
        limit = buffer_limit(schedule, device)
        p = packing(blocks, of, limit)
        least = live_bytes(blocks, of)
        why, at, order = hb.solve(p, *times(blocks, of), least)
        if seconds > 0:
            at, searched = _searched(blocks, of, p, order, at, least, seconds)
            why += ", then searched" if searched else ", at the live-bytes bound"
        layout.put_blocks(blocks, of, at, limit)
        for i in of:
            layout.causes.setdefault(blocks.blocks[i].values[0], why)
    layout.put_external()
    layout.put_empty()
    return layout.finish("offline" if seconds > 0 else "hb")


def _searched(
    blocks: Blocks, of: list[int], p: Packing, order: Ints, at: Ints, least: int, seconds: float
) -> tuple[Ints, bool]:
    """Offsets after the search, and whether there was anything to search for: nothing takes fewer
    than `least` bytes."""
    if extent(at, p.size, p.limit) == least:
        return at, False
    table = live_table(blocks, of)
    cliques = None if table is None else offline.cliques_of(table)
    bound = lower_bound(blocks, of).nbytes
    return offline.search(p, order, at, bound, cliques, seconds), True
