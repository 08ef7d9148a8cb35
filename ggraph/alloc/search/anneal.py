"""Local search over placement order, compiled and seeded: one half of `offline` mode.

The decoder builds a packing from the bottom up: among the blocks that no other one could still go
below, the one of highest priority is put on what lies under it. The search changes priorities near
the blocks that stick out above a target height, keeps what sticks out less, and lowers the target
when nothing does. Work is counted, not timed: equal input and seed give an equal result.

Legend: m = blocks, prio [m] = priorities (higher goes first), at [m] = offsets.
"""

from typing import Any

import numpy as np

from ggraph.alloc.fit import Ints, Packing
from ggraph.alloc.search.jit import compiled

Floats = np.ndarray[Any, np.dtype[np.float64]]
FAR = 1 << 62


@compiled
def decode(
    prio: Floats, size: Ints, start: Ints, near: Ints, at: Ints, target: int, enough: int, buf: Ints
) -> tuple[int, int]:
    """Fill `at` bottom-up; bytes that stick out above `target`, and the height.

    Gives up, with what was found so far, when more than `enough` bytes stick out. `buf` is [2, m].
    """
    m = len(size)
    low, left = buf[0], buf[1]
    for i in range(m):
        low[i], left[i], at[i] = 0, i, -1
    over = top = 0
    for k in range(m, 0, -1):
        ceiling = FAR
        for q in range(k):
            ceiling = min(ceiling, low[left[q]] + size[left[q]])
        pick = -1
        for q in range(k):  # what starts at or above the ceiling leaves room for another below it
            if low[left[q]] < ceiling and (pick < 0 or prio[left[q]] > prio[left[pick]]):
                pick = q
        b = left[pick]
        left[pick] = left[k - 1]
        at[b] = low[b]
        end = low[b] + size[b]
        top = max(top, end)
        if end > target:
            over += end - target
            if over > enough:
                break
        for x in range(start[b], start[b + 1]):
            low[near[x]] = max(low[near[x]], end)
    return over, top


@compiled
def _shake(prio: Floats, over: Ints, count: int, start: Ints, near: Ints) -> None:
    """Change one or two priorities at most two conflicts away from a block that sticks out."""
    for _ in range(1 + np.random.randint(2)):
        i = over[np.random.randint(count)]
        for _ in range(np.random.randint(3)):
            if start[i + 1] > start[i]:
                i = near[start[i] + np.random.randint(start[i + 1] - start[i])]
        if start[i + 1] > start[i] and np.random.random() < 0.5:
            j = near[start[i] + np.random.randint(start[i + 1] - start[i])]
            prio[i], prio[j] = prio[j], prio[i]
        else:
            prio[i] = np.random.random()


@compiled
def _search(
    first: Floats, size: Ints, start: Ints, near: Ints, bound: int, work: int, seed: int
) -> tuple[int, Ints]:
    """The lowest height found and its offsets."""
    np.random.seed(seed)
    m = len(size)
    at, now, best = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    over, buf, prio, kept = np.empty(m, np.int64), np.empty((2, m), np.int64), first.copy(), first
    per_try = m * m + len(near)
    tries = max(1, work // per_try)
    target = bound
    cost, height = decode(prio, size, start, near, now, target, FAR, buf)
    lowest = height
    best[:] = now
    for t in range(tries):
        count = 0
        for b in range(m):
            if now[b] + size[b] > target:
                over[count] = b
                count += 1
        if count == 0:
            break
        prio[:] = kept
        _shake(prio, over, count, start, near)
        heat = 0.002 * bound * (1.0 - t / tries)
        enough = cost + int(-np.log(1.0 - np.random.random()) * heat)
        got, height = decode(prio, size, start, near, at, target, enough, buf)
        if got <= enough:
            cost = got
            kept[:] = prio
            now[:] = at
            if height < lowest:
                lowest = height
                best[:] = at
    return lowest, best


def anneal(p: Packing, order: Ints, bound: int, work: int, seed: int) -> tuple[int, Ints]:
    """Height and offsets of the best packing found in `work` inner steps.

    `order` is a good placement order to start from, `bound` a height that cannot be beaten;
    reaching it ends the search. The buffer limit is not looked at.
    """
    prio = np.empty(len(p), dtype=np.float64)
    prio[order] = np.linspace(1.0, 0.0, len(p))
    return _search(prio, p.size, p.start, p.near, bound, work, seed)
