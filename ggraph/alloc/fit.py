"""Placing blocks one after another among those they conflict with.

The packing problem in its bare form: block b has a size and a list of blocks that may not share its
bytes; an order and a rule give offsets. Every search in this room is a search for a good order.

Legend: m = blocks, P = order (permutation of m), start [m + 1] and near = conflicts as compressed
rows, limit = bytes of one buffer (no block may cross a multiple of it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def sizes(self) -> list[int]:
        """`size` as Python's own numbers: of a few at a time, faster than NumPy's."""
        found: list[int] = self.size.tolist()
        return found

    @cached_property
    def starts(self) -> list[int]:
        """`start` in the same way."""
        found: list[int] = self.start.tolist()
        return found


def fit_one(p: Packing, b: int, at: Sequence[int], *, best: bool) -> int:
    """Offset for block b among those placed `at` their offsets: the lowest gap that holds it, or
    the tightest when `best`."""
    sizes, need, near = p.sizes, p.sizes[b], p.near[p.starts[b] : p.starts[b + 1]].tolist()
    found, tightest, low = None, NO_LIMIT, 0
    for n in sorted([n for n in near if at[n] >= 0], key=at.__getitem__):
        start = at[n]
        if need <= start - low and need <= start - (gap := _within(low, need, p.limit)) < tightest:
            if not best:
                return gap
            found, tightest = gap, start - gap
        if low < start + sizes[n]:
            low = start + sizes[n]
    return _within(low, need, p.limit) if found is None else found


def _within(low: int, need: int, limit: int) -> int:
    """Where `need` bytes go from `low` on: not across a buffer's end."""
    return low if low % limit + need <= limit else (low // limit + 1) * limit


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
    at = [UNPLACED] * len(p)
    for b in order.tolist():
        at[b] = fit_one(p, b, at, best=best)
    found = np.array(at, dtype=np.int64)
    return extent(found, p.size, p.limit), found
