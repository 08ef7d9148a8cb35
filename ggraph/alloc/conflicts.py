"""Which blocks may not share bytes: work that grows with the pairs in conflict, not with all pairs.

Of one actor's commands those that precede all of block b's accesses come first, those that follow
them all last; between them lies b's *window*. Two blocks are in conflict within a run just when a
first access of one, on some actor, is in the other's window: if an access of a is in b's window on
an actor whose first access of a is not, then that one precedes all of b, and the first accesses of
b on the actors that the later one does not precede are in a's window. From one run to the next they
are where the last access of one is not before all of the other's next ones.

Legend: m = blocks asked about, A = actors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ggraph.alloc.arena_blocks import Blocks
from ggraph.alloc.fit import Packing
from ggraph.alloc.precedence import Ints, Precedence, Spans

Pairs = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]  # a * m + b each, in few bytes


def conflict_pairs(blocks: Blocks, of: Sequence[int]) -> tuple[Ints, Ints]:
    """Conflicts among the chosen blocks as compressed rows (start [m + 1], neighbours).

    Neighbours are positions in `of`, ascending. Pinned blocks are in conflict with all.
    """
    m = len(of)
    spans = blocks.spans.of(np.asarray(of, dtype=np.int64))
    pinned = np.array([blocks.blocks[i].pinned for i in of], dtype=bool)
    found = [_within(np.arange(m), np.arange(m), np.zeros(m, np.int64), np.where(pinned, m, 0))]
    for actor in range(len(blocks.order.actors)):
        found += _on(blocks.order, spans, actor)
    pairs = np.concatenate(found)
    del found  # where all are in conflict with all, each list of pairs is large
    pairs.sort()
    pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]  # each once
    start = np.searchsorted(pairs, (np.arange(m + 1) * m).astype(pairs.dtype))
    return start, (pairs % pairs.dtype.type(m)).astype(np.int64)


def packing(blocks: Blocks, of: Sequence[int], limit: int) -> Packing:
    """The packing problem of the chosen blocks."""
    size = np.array([blocks.blocks[i].nbytes for i in of], dtype=np.int64)
    return Packing(size, *conflict_pairs(blocks, of), limit)


def times(blocks: Blocks, of: Sequence[int]) -> tuple[Ints, Ints]:
    """First command and number of commands between first and last access, per block."""
    rows = [blocks.blocks[i].rows or (0,) for i in of]
    birth = np.array([r[0] for r in rows], dtype=np.int64)
    return birth, np.array([r[-1] - r[0] + 1 for r in rows], dtype=np.int64)


def _on(order: Precedence, s: Spans, actor: int) -> Iterator[Pairs]:
    """Pairs that this actor's commands tell of."""
    rows = order.rows_of[actor]
    used = np.flatnonzero(s.last[:, actor])
    if not len(used):  # most actors touch few devices
        return
    begin = np.searchsorted(rows, s.meet[:, actor])
    end = order.count_before(actor, s.last).max(axis=1, initial=0)
    yield _within(used, np.searchsorted(rows, s.first[used, actor] - 1), begin, end)
    begin = np.searchsorted(rows, s.meet2[:, actor])
    end = np.full(len(begin), len(rows))
    yield _within(used, np.searchsorted(rows, s.last[used, actor] - 1), begin, end)


def _within(who: Ints, place: Ints, begin: Ints, end: Ints) -> Pairs:
    """Each window [begin, end), by number, with those of `who` whose `place` is inside, and the
    other way round; none with itself."""
    m = len(begin)
    kind = np.min_scalar_type(m * m)
    by = np.argsort(place, kind="stable")
    low, high = (np.searchsorted(place[by], side) for side in (begin, end))
    count = np.maximum(high - low, 0)
    window = np.repeat(np.arange(m, dtype=kind), count)
    ahead = (np.cumsum(count) - count - low).astype(kind)  # may be below 0, and wraps back
    inside = who[by].astype(kind)[np.arange(len(window), dtype=kind) - np.repeat(ahead, count)]
    window, inside = (side[window != inside] for side in (window, inside))
    return np.concatenate((window * kind.type(m) + inside, inside * kind.type(m) + window))
