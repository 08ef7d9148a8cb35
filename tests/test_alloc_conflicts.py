"""Conflicts and lives, found by windows and searches, against what they mean, pair by pair."""

import random

import numpy as np
from alloc_kit import random_schedule
from hypothesis import given
from hypothesis import strategies as st

from ggraph.alloc.arena_blocks import Blocks, make_blocks
from ggraph.alloc.bounds import live_bytes, live_table
from ggraph.alloc.conflicts import conflict_pairs
from ggraph.alloc.precedence import precedence


def conflict(blocks: Blocks, i: int, j: int) -> bool:
    """By every pair of accesses: not all of one before all of the other, and so the run after."""
    a, b, order = blocks.blocks[i], blocks.blocks[j], blocks.order

    def passes(x: tuple[int, ...], y: tuple[int, ...]) -> bool:
        here = all(order.before(r, s) for r in x for s in y)
        return here and all(order.before(s, order.n + r) for r in x for s in y)

    return a.pinned or b.pinned or not (passes(a.rows, b.rows) or passes(b.rows, a.rows))


def is_live(blocks: Blocks, i: int, c: int) -> bool:
    """Whether block i holds its bytes during command c."""
    b, before = blocks.blocks[i], blocks.order.before
    begun = any(r == c or before(r, c) for r in b.rows)
    return b.pinned or (begun and any(r == c or before(c, r) for r in b.rows))


@given(st.randoms(use_true_random=False))
def test_conflicts_and_lives_are_those_of_the_definition(r: random.Random) -> None:
    schedule = random_schedule(r)
    blocks = make_blocks(schedule, precedence(schedule))
    for device in {b.device for b in blocks.blocks}:
        of = blocks.of_device(device)
        start, near = conflict_pairs(blocks, of)
        for k, i in enumerate(of):
            want = [q for q, j in enumerate(of) if j != i and conflict(blocks, i, j)]
            assert near[start[k] : start[k + 1]].tolist() == want, (i, schedule)
        live = np.array([[is_live(blocks, i, c) for i in of] for c in range(blocks.order.n)])
        table = live_table(blocks, of)
        assert table is not None and np.array_equal(table, live.reshape(table.shape))
        size = np.array([blocks.blocks[i].nbytes for i in of], dtype=np.int64)
        pinned = sum(b.nbytes for b in map(blocks.blocks.__getitem__, of) if b.pinned)
        assert live_bytes(blocks, of) == max(pinned, *(table @ size).tolist(), 0)
