"""Memory that more ordering would buy: offers for the pipeline, which alone may retry.

An offer is one edge, "this command only after that one", between two values that today may not
share bytes merely because nothing orders them. Its saving is measured by planning again with the
edge; nothing is changed here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ggraph.alloc import hb
from ggraph.alloc.arena_blocks import Block, Blocks, make_blocks
from ggraph.alloc.check import check_schedule
from ggraph.alloc.conflicts import conflict_pairs, packing, times
from ggraph.alloc.fit import NO_LIMIT, extent
from ggraph.alloc.precedence import Edge, precedence
from ggraph.plan import Schedule

TRIES = 32  # offers that are measured: each costs a plan


@dataclass(frozen=True)
class Offer:
    """Ordering command `before` ahead of `after` saves `bytes_saved` of the device's arena.

    `shareable` is the size of the smaller of the two values: what the pair could save at most.
    """

    before: int
    after: int
    bytes_saved: int
    shareable: int
    device: str


def peak_bytes(schedule: Schedule, extra: Iterable[Edge] = ()) -> dict[str, int]:
    """Arena bytes per device that `hb` mode needs with further orderings between commands.

    `extra` holds (before, after) pairs of command indices with before < after.
    """
    blocks = make_blocks(schedule, precedence(schedule, extra))
    devices = dict.fromkeys(b.device for b in blocks.blocks)
    return {d: _peak(blocks, blocks.of_device(d)) for d in devices}


def _peak_on(schedule: Schedule, device: str, extra: Iterable[Edge]) -> int:
    """`peak_bytes` of one device."""
    blocks = make_blocks(schedule, precedence(schedule, extra))
    return _peak(blocks, blocks.of_device(device))


def _peak(blocks: Blocks, of: list[int]) -> int:
    if not of:
        return 0
    p = packing(blocks, of, NO_LIMIT)
    return extent(hb.solve(p, *times(blocks, of))[1], p.size, p.limit)


def ordering_offers(schedule: Schedule, *, device: str | None = None) -> list[Offer]:
    """Edges that would let values share bytes, those that save most first.

    Only the `TRIES` pairs with the most to share are measured. An edge that saves nothing alone is
    listed all the same (last): it may be half of a pair. Raises AllocError for a bad schedule.
    """
    check_schedule(schedule)
    blocks = make_blocks(schedule, precedence(schedule))
    found = [o for o in _candidates(blocks) if device in (None, o.device)]
    found.sort(key=lambda o: (-o.shareable, o.before, o.after))
    now = {d: _peak(blocks, blocks.of_device(d)) for d in {o.device for o in found}}
    best: dict[Edge, Offer] = {}
    for o in found:
        best.setdefault((o.before, o.after), o)
    measured = []
    for edge, o in list(best.items())[:TRIES]:
        saved = now[o.device] - _peak_on(schedule, o.device, [edge])
        measured.append(Offer(*edge, saved, o.shareable, o.device))
    return sorted(measured, key=lambda o: (-o.bytes_saved, -o.shareable, o.before, o.after))


def _candidates(blocks: Blocks) -> Iterator[Offer]:
    """Pairs of blocks in conflict of which one edge could put the one behind the other."""
    for device in dict.fromkeys(b.device for b in blocks.blocks):
        of = [i for i in blocks.of_device(device) if not blocks.blocks[i].pinned]
        if np.count_nonzero(blocks.spans.last[of].any(axis=0)) < 2:
            continue  # all that one actor does is in order
        start, near = conflict_pairs(blocks, of)
        for p, i in enumerate(of):
            a = blocks.blocks[i]
            for q in near[start[p] : start[p + 1]]:
                b = blocks.blocks[of[q]]
                edge = _edge(blocks, a, b)
                if edge is not None:
                    yield Offer(*edge, 0, min(a.nbytes, b.nbytes), device)


def _edge(blocks: Blocks, a: Block, b: Block) -> Edge | None:
    """From the last loose access of a to the first of b, unless some of b already precedes a.

    The host enqueues in list order, so an edge can only point down the list.
    """
    before = blocks.order.before
    if any(x == y or before(y, x) for x in a.rows for y in b.rows):
        return None
    loose = [x for x in a.rows if not all(before(x, y) for y in b.rows)]
    if not loose or max(loose) >= b.rows[0]:
        return None
    return max(loose), b.rows[0]


def fitting_edges(schedule: Schedule, device: str, limit: int) -> tuple[Edge, ...] | None:
    """Few orderings with which the arena of `device` needs at most `limit` bytes, or None.

    Offers are taken greedily, those that save most first, until the plan fits; then each edge that
    turns out not to be needed is dropped. Raises AllocError for a bad schedule.
    """
    check_schedule(schedule)
    chosen: list[Edge] = []
    now = _peak_on(schedule, device, ())
    for o in ordering_offers(schedule, device=device) if now > limit else ():
        chosen.append((o.before, o.after))
        now = _peak_on(schedule, device, chosen)
        if now <= limit:
            break
    if now > limit:
        return None
    for edge in list(chosen):
        rest = [e for e in chosen if e != edge]
        if _peak_on(schedule, device, rest) <= limit:
            chosen = rest
    return tuple(chosen)
