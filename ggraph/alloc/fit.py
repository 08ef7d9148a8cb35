"""Placing blocks one after another among those they conflict with.

The packing problem in its bare form: block b has a size and a list of blocks that may not share its
bytes; an order and a rule give offsets. Every search in this room is a search for a good order.

Legend: m = blocks, P = order (permutation of m), start [m + 1] and near = conflicts as compressed
rows, limit = bytes of one buffer (no block may cross a multiple of it).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
UNPLACED = -1
NO_LIMIT = 1 << 62


@dataclass(frozen=True, eq=False)
class Packing:
    """One packing problem. Sizes are aligned, positive and at most `limit`."""

    size: Ints  # [m]
    start: Ints  # [m + 1]
    near: Ints
    limit: int = NO_LIMIT

    def __len__(self) -> int:
        return len(self.size)


def fit_one(p: Packing, b: int, at: Ints, *, best: bool) -> int:
    """Offset for block b among those placed `at` their offsets: the lowest gap that holds it, or
    the tightest when `best`."""
    near = p.near[p.start[b] : p.start[b + 1]]
    starts = at[near]
    there = starts >= 0
    near, starts = near[there], starts[there]
    by = np.argsort(starts, kind="stable")
    low = np.zeros(len(by) + 1, dtype=np.int64)  # where each gap begins
    np.maximum.accumulate(starts[by] + p.size[near[by]], out=low[1:])
    need = int(p.size[b])
    if p.limit < NO_LIMIT:  # not across a buffer's end
        low = np.where(low % p.limit + need > p.limit, (low // p.limit + 1) * p.limit, low)
    room = starts[by] - low[:-1]
    holds = np.flatnonzero(room >= need)
    if not len(holds):
        return int(low[-1])
    return int(low[holds[room[holds].argmin()] if best else holds[0]])


def extent(at: Ints, size: Ints, limit: int) -> int:
    """Bytes of all buffers together; each is as long as its highest block needs."""
    ends = at + size
    top = int(ends.max(initial=0))
    if top <= limit:
        return top
    buffer = at // limit
    longest = np.zeros(int(buffer.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, buffer, ends - buffer * limit)
    return int(longest.sum())


def packed(p: Packing, order: Ints, *, best: bool = False) -> tuple[int, Ints]:
    """Total bytes, and offsets [m], when the blocks are placed in `order`."""
    at = np.full(len(p), UNPLACED, dtype=np.int64)
    for b in order.tolist():
        at[b] = fit_one(p, b, at, best=best)
    return extent(at, p.size, p.limit), at
