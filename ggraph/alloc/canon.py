"""Depth-first search for a packing below a given height, compiled: half of `offline`. Floor 6.

Every packing can be pushed down until each block lies on the floor or on another one, and then
its blocks can be listed by rising offset. So it is enough to place, again and again, some block
on what already lies under it, never lower than the one before. Three cuts keep the tree small: a
block above which another one would still fit below is not next; blocks that are live together and
unplaced must fit above what is under them; and parts that no unplaced block connects are
solved one by one. The idea of canonical solutions with section inference is MiniMalloc's
(Moffitt, ASPLOS 2023); here sections are cliques of a conflict graph, so that partial orders work.

Legend: m = blocks, c = cliques (sets of pairwise conflicting blocks, in an order along time),
[from, to) = the stretch of cliques in which a block lives or has conflicts.
"""

from typing import Any, NamedTuple

import numpy as np

from ggraph.alloc.fit import Ints
from ggraph.alloc.jit import compiled

Floats = np.ndarray[Any, np.dtype[np.float64]]
FAR = 1 << 62
KEYS = 1 << 20  # more blocks than this in one packing are not searched


class Room(NamedTuple):
    """One packing problem with its cliques, and the order in which ties are tried."""

    size: Ints  # [m]
    start: Ints  # [m + 1], conflicts
    near: Ints
    begin: Ints  # [m], first clique of the stretch
    end: Ints  # [m], one past its last clique
    member_start: Ints  # [m + 1], cliques of each block
    member: Ints
    order: Ints  # [m], permutation: earlier is tried first
    rank: Ints  # [m], its inverse


class State(NamedTuple):
    """What the search changes. `work[0]` counts down inner steps; below zero all ends."""

    at: Ints  # [m], offset or -1
    low: Ints  # [m], lowest offset that what is placed allows
    total: Ints  # [c], bytes of unplaced members
    blame: Floats  # [m], how often a block was part of a dead end
    work: Ints  # [1]


@compiled
def _unplaced(room: Room, state: State, c0: int, c1: int) -> Ints:
    """Blocks of the stretch [c0, c1) that are not placed, in the order to try."""
    m = len(room.size)
    out = np.empty(m, np.int64)
    k = 0
    for q in range(m):
        b = room.order[q]
        if state.at[b] < 0 and room.begin[b] >= c0 and room.end[b] <= c1:
            out[k] = b
            k += 1
    state.work[0] -= m
    return out[:k]


@compiled
def _dead(room: Room, state: State, rest: Ints, c0: int, c1: int, last: int, height: int) -> bool:
    """Whether some block, or the members of some clique, no longer fit below `height`."""
    lows = np.full(c1 - c0, FAR, np.int64)
    for b in rest:
        o = max(state.low[b], last)
        if o + room.size[b] > height:
            state.blame[b] += 1.0
            return True
        for x in range(room.member_start[b], room.member_start[b + 1]):
            c = room.member[x] - c0
            lows[c] = min(lows[c], o)
        state.work[0] -= room.member_start[b + 1] - room.member_start[b]
    for c in range(c0, c1):
        if state.total[c] > 0 and lows[c - c0] + state.total[c] > height:
            for b in rest:
                for x in range(room.member_start[b], room.member_start[b + 1]):
                    if room.member[x] == c:
                        state.blame[b] += 1.0
            return True
    return False


@compiled
def _parts(room: Room, rest: Ints, c0: int, c1: int) -> Ints:
    """Borders [parts, 2] of stretches that no unplaced block connects and that have one."""
    opens = np.zeros(c1 - c0 + 1, np.int64)
    for b in rest:
        opens[room.begin[b] - c0] += 1
        opens[room.end[b] - c0] -= 1
    crossing = np.zeros(c1 - c0 + 1, np.int64)  # blocks that go on over the border before c
    for b in rest:
        crossing[room.begin[b] + 1 - c0] += 1
        crossing[room.end[b] - c0] -= 1
    out = np.empty((c1 - c0, 2), np.int64)
    count = live = over = 0
    since = c0
    busy = False
    for c in range(c0, c1 + 1):
        over += crossing[c - c0]
        if c > c0 and over == 0:
            if busy:
                out[count, 0], out[count, 1] = since, c
                count += 1
            since, busy = c, False
        live += opens[c - c0]
        busy = busy or live > 0
    return out[:count]


@compiled
def _put(room: Room, state: State, b: int, sign: int) -> None:
    """Take block b's bytes out of its cliques' totals (sign -1), or give them back (+1)."""
    for x in range(room.member_start[b], room.member_start[b + 1]):
        state.total[room.member[x]] += sign * room.size[b]


@compiled
def solve(room: Room, state: State, c0: int, c1: int, last: int, before: int, height: int) -> bool:
    """Place every unplaced block of [c0, c1) at or above `last`, the offset of block `before`.

    On success the offsets are in `state.at`; otherwise, or out of work, all is as it was.
    """
    rest = _unplaced(room, state, c0, c1)
    if len(rest) == 0:
        return True
    if state.work[0] < 0 or _dead(room, state, rest, c0, c1, last, height):
        return False
    parts = _parts(room, rest, c0, c1)
    if len(parts) > 1:
        for k in range(len(parts)):
            if not solve(room, state, parts[k, 0], parts[k, 1], last, before, height):
                for b in rest:
                    if state.at[b] >= 0:
                        state.at[b] = -1
                        _put(room, state, b, 1)
                return False
        return True
    lows = np.empty(len(rest), np.int64)
    ceiling = FAR
    for q in range(len(rest)):
        b = rest[q]
        lows[q] = state.low[b]
        ceiling = min(ceiling, max(lows[q], last) + room.size[b])
    for q in np.argsort(lows * KEYS + np.arange(len(rest))):
        b, o = rest[q], lows[q]
        # What starts at the ceiling leaves room for another block below it; of two blocks on one
        # level only one order is tried.
        if o < last or (o == last and before >= 0 and room.rank[b] < room.rank[before]):
            continue
        if o >= ceiling or state.work[0] < 0:
            break
        state.at[b] = o
        _put(room, state, b, -1)
        for x in range(room.start[b], room.start[b + 1]):
            other = room.near[x]
            if state.at[other] < 0:
                state.low[other] = max(state.low[other], o + room.size[b])
        if solve(room, state, c0, c1, o, b, height):
            return True
        state.at[b] = -1
        _put(room, state, b, 1)
        for z in range(len(rest)):
            state.low[rest[z]] = lows[z]
    return False
