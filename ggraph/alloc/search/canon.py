"""Depth-first search for a packing below a given height, compiled: half of `offline`.

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
from ggraph.alloc.search.jit import compiled

Floats = np.ndarray[Any, np.dtype[np.float64]]
FAR = 1 << 62


class Room(NamedTuple):
    """One packing problem with its cliques, and the order in which ties are tried."""

    size: Ints  # [m]
    start: Ints  # [m + 1], conflicts
    near: Ints
    begin: Ints  # [m], first clique of the stretch
    end: Ints  # [m], one past its last clique
    member_start: Ints  # [m + 1], cliques of each block
    member: Ints
    rank: Ints  # [m], place in the order: a smaller one is tried first
    weight: Ints  # [m], what placing a block counts as progress


class State(NamedTuple):
    """What the search changes. `work` counts down inner steps and nodes; below zero all ends."""

    at: Ints  # [m], offset or -1
    low: Ints  # [m], lowest offset that what is placed allows
    total: Ints  # [c], bytes of unplaced members
    blame: Floats  # [m], how often a block was part of a dead end
    work: Ints  # [2], inner steps and nodes that are left
    placed: Ints  # [2], weight of what is placed, now and at most so far
    trail: Ints  # [conflicts, 2], blocks and what their `low` was before it was raised
    top: Ints  # [1], entries of the trail
    least: Ints  # [c], scratch


def begun(room: Room, total: Ints, work: int, nodes: int) -> State:
    """The state in which nothing is placed, with `work` inner steps and `nodes` to spend."""
    m, zero = len(room.size), np.zeros(1, np.int64)
    at, low = np.full(m, -1, np.int64), np.zeros(m, np.int64)
    trail = np.empty((len(room.near), 2), np.int64)
    left, placed = np.array([work, nodes], np.int64), np.zeros(2, np.int64)
    scratch = np.empty_like(total)
    return State(at, low, total.copy(), np.zeros(m), left, placed, trail, zero, scratch)


@compiled
def _dead(room: Room, state: State, rest: Ints, c0: int, c1: int, last: int, height: int) -> bool:
    """Whether some block, or the members of some clique, no longer fit below `height`."""
    for b in rest:
        if max(state.low[b], last) + room.size[b] > height:
            state.blame[b] += 1.0
            return True
    for c in range(c0, c1):
        state.least[c] = FAR
    steps = len(rest) + c1 - c0
    for b in rest:
        o = max(state.low[b], last)
        for x in range(room.member_start[b], room.member_start[b + 1]):
            c = room.member[x]
            state.least[c] = min(state.least[c], o)
        steps += room.member_start[b + 1] - room.member_start[b]
    state.work[0] -= steps
    for c in range(c0, c1):
        if state.total[c] > 0 and state.least[c] + state.total[c] > height:
            for b in rest:
                for x in range(room.member_start[b], room.member_start[b + 1]):
                    if room.member[x] == c:
                        state.blame[b] += 1.0
            return True
    return False


@compiled
def _border(room: Room, rest: Ints, c0: int, c1: int) -> int:
    """The first border between cliques with blocks on both sides and none across, or -1."""
    crossing = np.zeros(c1 - c0 + 1, np.int64)  # change of blocks that go on over the border at c
    first, last = c1, c0
    for b in rest:
        crossing[room.begin[b] + 1 - c0] += 1
        crossing[room.end[b] - c0] -= 1
        first, last = min(first, room.begin[b]), max(last, room.end[b])
    over = 0
    for c in range(first + 1, last):
        over += crossing[c - c0]
        if over == 0:
            return c
    return -1


@compiled
def _eligible(room: Room, state: State, rest: Ints, last: int, before: int) -> Ints:
    """The blocks that may be placed next, lowest first.

    What starts where another block would still fit below is not next; of two blocks on one level
    only one order is tried.
    """
    ceiling = FAR
    for b in rest:
        ceiling = min(ceiling, max(state.low[b], last) + room.size[b])
    found = np.empty(len(rest), np.int64)
    count = 0
    for b in rest:
        o, r = state.low[b], room.rank[b]
        if o < last or o >= ceiling or (o == last and before >= 0 and r < room.rank[before]):
            continue
        j = count  # insertion sort: these are few
        while j > 0 and (o, r) < (state.low[found[j - 1]], room.rank[found[j - 1]]):
            found[j] = found[j - 1]
            j -= 1
        found[j] = b
        count += 1
    return found[:count]


@compiled
def _put(room: Room, state: State, b: int, sign: int) -> None:
    """Take block b's bytes out of its cliques' totals (sign -1), or give them back (+1)."""
    state.placed[0] -= sign * room.weight[b]
    for x in range(room.member_start[b], room.member_start[b + 1]):
        state.total[room.member[x]] += sign * room.size[b]


@compiled
def _place(room: Room, state: State, b: int) -> None:
    """Put block b as low as it goes; unplaced blocks in conflict go above it."""
    o = state.at[b] = state.low[b]
    _put(room, state, b, -1)
    for x in range(room.start[b], room.start[b + 1]):
        other = room.near[x]
        if state.at[other] < 0 and state.low[other] < o + room.size[b]:
            k = state.top[0]
            state.trail[k, 0], state.trail[k, 1] = other, state.low[other]
            state.top[0] = k + 1
            state.low[other] = o + room.size[b]


@compiled
def _lift(room: Room, state: State, b: int) -> None:
    """Take block b away again."""
    state.at[b] = -1
    _put(room, state, b, 1)


@compiled
def _rewind(state: State, mark: int) -> None:
    """Undo what was raised since the trail had `mark` entries."""
    for k in range(state.top[0] - 1, mark - 1, -1):
        state.low[state.trail[k, 0]] = state.trail[k, 1]
    state.top[0] = mark


@compiled
def solve(
    room: Room, state: State, rest: Ints, c0: int, c1: int, last: int, before: int, height: int
) -> bool:
    """Place the blocks `rest` of [c0, c1) at or above `last`, the offset of block `before`.

    On success the offsets are in `state.at`; otherwise, or out of work, all is as it was.
    """
    state.placed[1] = max(state.placed[1], state.placed[0])
    if len(rest) == 0:
        return True
    state.work[1] -= 1
    if min(state.work) < 0 or _dead(room, state, rest, c0, c1, last, height):
        return False
    mark, border = state.top[0], _border(room, rest, c0, c1)
    if border >= 0:
        left, right = rest[room.end[rest] <= border], rest[room.end[rest] > border]
        if not solve(room, state, left, c0, border, last, before, height):
            return False
        if solve(room, state, right, border, c1, last, before, height):
            return True
        for b in left:
            _lift(room, state, b)
        _rewind(state, mark)
        return False
    for b in _eligible(room, state, rest, last, before):
        _place(room, state, b)
        if solve(room, state, rest[rest != b], c0, c1, state.at[b], b, height):
            return True
        _lift(room, state, b)
        _rewind(state, mark)
        if min(state.work) < 0:
            break
    return False
