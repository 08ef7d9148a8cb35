"""The byte-level allocator: rules A1 to A8, and a state machine over it."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ggraph.alloc.dyn import (
    ENDLESS,
    MAX_CHUNKS,
    MAX_FREE_BLOCKS,
    Address,
    DynAllocator,
    align_up,
)
from ggraph.errors import AllocError


def test_a4_ties_go_to_the_later_block_and_to_the_later_chunk() -> None:
    a = DynAllocator(8, 96)
    spots = [a.alloc(16) for _ in range(6)]
    a.free(spots[0], 16)
    a.free(spots[2], 16)
    a.free(spots[5], 16)
    assert a.alloc(16) == Address(0, 32)  # not 0, which fits as well
    b = DynAllocator(8, 64)
    kept = [b.alloc(16) for _ in range(4)]
    more = [b.alloc(n) for n in (24, 8, 8, 8)]
    b.free(kept[0], 16)
    b.free(kept[2], 16)
    b.free(more[0], 24)
    assert b.alloc(16) == Address(1, 0)  # 24 bytes in chunk 1 win over the exact fit in chunk 0


def test_a5_the_last_block_that_grows_least_then_that_wastes_least() -> None:
    a = DynAllocator(8, 64)
    first, second = a.alloc(40), a.alloc(48)
    assert (first.chunk, second.chunk) == (0, 1)
    a.free(second, 48)
    assert a.alloc(24) == Address(1, 0)  # no growth beats 24 bytes of growth in chunk 0
    assert a.alloc(16) == Address(1, 24)


def test_a2_the_sixteenth_chunk_is_endless_and_nothing_follows() -> None:
    a = DynAllocator(8, 16)
    assert [a.alloc(16).chunk for _ in range(MAX_CHUNKS - 1)] == list(range(MAX_CHUNKS - 1))
    assert a.alloc(16) == Address(15, 0)
    assert a.alloc(1 << 40) == Address(15, 16)
    with pytest.raises(AllocError, match=r"%big: \d+ bytes do not fit into 16 chunks"):
        a.alloc(ENDLESS - 8, "big")


def test_a7_freed_neighbours_become_one_block() -> None:
    a = DynAllocator(8, 64)
    x, y, z, w = (a.alloc(8) for _ in range(4))
    a.free(x, 8)
    a.free(z, 8)
    assert [b[:] for b in a.chunks[0].free] == [[0, 8], [16, 8], [32, 32]]
    a.free(y, 8)
    assert a.chunks[0].free == [[0, 24], [32, 32]]
    a.free(w, 8)
    assert a.chunks[0].free == [[0, 64]]


def test_a7_a_block_before_a_free_one_joins_its_predecessor_too() -> None:
    a = DynAllocator(8, 64)
    x, y = a.alloc(8), a.alloc(8)
    a.free(y, 8)
    assert a.chunks[0].free == [[8, 56]]
    a.free(x, 8)
    assert a.chunks[0].free == [[0, 64]]


def test_bad_sizes_and_too_many_free_blocks() -> None:
    a = DynAllocator(8)
    for nbytes in (-1, 1 << 64):
        with pytest.raises(AllocError, match=f"%t: size {nbytes} is outside"):
            a.alloc(nbytes, "t")
    with pytest.raises(AllocError, match="alignment 12 is not a power of two"):
        DynAllocator(12)
    spots = [a.alloc(8) for _ in range(2 * MAX_FREE_BLOCKS + 1)]
    for at in spots[: 2 * (MAX_FREE_BLOCKS - 1) : 2]:
        a.free(at, 8)
    with pytest.raises(AllocError, match="%t: more than 256 free blocks"):
        a.free(spots[2 * (MAX_FREE_BLOCKS - 1)], 8, "t")


class Arena(RuleBasedStateMachine):
    """Random calls; what is live never overlaps, and every byte is live or free exactly once."""

    @initialize(alignment=st.sampled_from((1, 8, 32)), chunk=st.sampled_from((64, 256, ENDLESS)))
    def begin(self, alignment: int, chunk: int) -> None:
        self.dyn = DynAllocator(alignment, chunk)
        self.live: list[tuple[Address, int]] = []
        self.peak = 0

    @precondition(lambda self: len(self.live) < 40)
    @rule(nbytes=st.integers(1, 100))
    def alloc(self, nbytes: int) -> None:
        self.live.append((self.dyn.alloc(nbytes), nbytes))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        at, nbytes = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.dyn.free(at, nbytes)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cut=st.integers(1, 99))
    def shrink(self, data: st.DataObject, cut: int) -> None:
        """A18: the aligned tail of a block that a smaller child took over is freed."""
        k = data.draw(st.integers(0, len(self.live) - 1))
        at, had = self.live[k]
        kept = max(1, had - cut)
        a = self.dyn.alignment
        if align_up(kept, a) < align_up(had, a):
            tail = Address(at.chunk, at.offset + align_up(kept, a))
            self.dyn.free(tail, align_up(had, a) - align_up(kept, a))
            self.live[k] = (at, kept)

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        a = self.dyn.alignment
        for c, chunk in enumerate(self.dyn.chunks):
            free = [(o, o + n) for o, n in chunk.free]
            used = [(p.offset, p.offset + align_up(n, a)) for p, n in self.live if p.chunk == c]
            spans = sorted(free + used)
            assert spans[0][0] == 0
            assert all(x[1] == y[0] for x, y in pairwise(spans)), spans
            assert all(x[1] < y[0] for x, y in pairwise(free)), free
            assert all(o % a == 0 for o, _ in spans)
            assert chunk.max_size >= max((e for _, e in used), default=0)

    @invariant()
    def the_peak_only_grows(self) -> None:
        assert self.dyn.size >= self.peak
        self.peak = self.dyn.size


TestArena = Arena.TestCase
