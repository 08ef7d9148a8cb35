"""Placing blocks one after another among those they conflict with, compiled.

The packing problem in its bare form: block b has a size and a list of blocks that may not share its
bytes; an order and a rule give offsets. Every search in this room is a search for a good order.

Legend: m = blocks, P = order (permutation of m), start [m + 1] and near = conflicts as compressed
rows, limit = bytes of one buffer (no block may cross a multiple of it).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ggraph.alloc.jit import compiled

Ints = np.ndarray[Any, np.dtype[np.int64]]
UNPLACED = -1
NO_LIMIT = 1 << 62
PLAIN = 50_000  # conflicts up to which loading the compiled form costs more than it saves


@dataclass(frozen=True, eq=False)
class Packing:
    """One packing problem. Sizes are aligned, positive and at most `limit`."""

    size: Ints  # [m]
    start: Ints  # [m + 1]
    near: Ints
    limit: int = NO_LIMIT

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def lists(self) -> tuple[Any, Any, Any]:
        """`size`, `start`, `near` as lists."""
        return self.size.tolist(), self.start.tolist(), self.near.tolist()


@compiled
def fit_one(
    b: int, size: Ints, start: Ints, near: Ints, at: Ints, limit: int, best: bool, buf: Ints
) -> int:
    """Offset for block b: the lowest gap that holds it, or the tightest when `best`.

    `at` holds the offsets of placed blocks; `buf` [m] is scratch.
    """
    count = 0
    for k in range(start[b], start[b + 1]):
        o = near[k]
        if at[o] >= 0:  # insertion sort by offset
            j = count
            while j > 0 and at[buf[j - 1]] > at[o]:
                buf[j] = buf[j - 1]
                j -= 1
            buf[j] = o
            count += 1
    need = size[b]
    low = 0
    found = -1
    tight = NO_LIMIT
    for j in range(count + 1):
        if low % limit + need > limit:
            low = (low // limit + 1) * limit
        high = at[buf[j]] if j < count else NO_LIMIT
        room = high - low
        if room >= need and (found < 0 or (j < count and room < tight)):
            if not best:
                return low
            found, tight = low, room
        if j < count:
            low = max(low, at[buf[j]] + size[buf[j]])
    return found


@compiled
def place(order: Ints, size: Ints, start: Ints, near: Ints, limit: int, best: bool) -> Ints:
    """Offsets [m] when the blocks are placed in `order`."""
    at = np.full(len(size), -1, dtype=np.int64)
    buf = np.empty(len(size), dtype=np.int64)
    for b in order:
        at[b] = fit_one(b, size, start, near, at, limit, best, buf)
    return at


@compiled
def extent(at: Ints, size: Ints, limit: int) -> int:
    """Bytes of all buffers together; each is as long as its highest block needs."""
    top = 0
    for b in range(len(size)):
        top = max(top, at[b] + size[b])
    if top <= limit:
        return top
    ends = np.zeros((top + limit - 1) // limit, dtype=np.int64)
    for b in range(len(size)):
        k = at[b] // limit
        ends[k] = max(ends[k], at[b] + size[b] - k * limit)
    return int(ends.sum())


def packed(p: Packing, order: Ints, *, best: bool = False) -> tuple[int, Ints]:
    """Total bytes and offsets of one order."""
    if len(p.near) > PLAIN:
        at = place(order, p.size, p.start, p.near, p.limit, best)
        return int(extent(at, p.size, p.limit)), at
    size, start, near = p.lists
    at = place.plain(order.tolist(), size, start, near, p.limit, best)
    return int(extent.plain(at, size, p.limit)), np.asarray(at, np.int64)
