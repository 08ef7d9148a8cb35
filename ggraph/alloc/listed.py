"""`ggml` mode: a MemoryMap from upstream's planner."""

from ggraph.alloc.dyn import DynAllocator, align_up
from ggraph.alloc.ggml import Spot, plan_list
from ggraph.alloc.layout import Layout, buffer_limit
from ggraph.alloc.listing import buffer_order, list_schedule
from ggraph.plan import MemoryMap, Schedule


def ggml_map(schedule: Schedule) -> MemoryMap:
    """The offsets that upstream would choose for the order in which the host enqueues.

    Streams and events are not looked at, so on several streams the map may race: that is what this
    mode is for. Rotating values get one leaf per slot (S8).
    """
    layout = Layout(schedule)
    index = buffer_order(schedule)
    buffers = [DynAllocator(layout.align[d], buffer_limit(schedule, d)) for d in index]
    listing, at = list_schedule(schedule, index)
    spots = plan_list(listing, buffers)
    names = list(index)
    for name, i in at.items():
        v = schedule.values[name]
        root = listing.tensors[i].view_of
        spot = spots[i if root is None else root]
        if spot.buffer >= 0:
            layout.put(
                name,
                spot.at.chunk,
                spot.at.offset,
                v.slots,
                align_up(v.nbytes, layout.align[v.device]),
            )
            layout.causes[name] = _cause(spot, root, names, listing.tensors[root or 0].name)
            if spot.in_place_of is not None and root is None:
                layout.causes[name] = f"in place of %{listing.tensors[spot.in_place_of].name} (A16)"
    layout.put_external()
    layout.put_empty()
    return layout.finish("ggml")


def _cause(spot: Spot, root: int | None, devices: list[str], over: str) -> str:
    if root is not None:
        return f"on %{over}'s bytes (A11)"
    return f"block of {devices[spot.buffer]}, chunk {spot.at.chunk} (A4 to A6)"
