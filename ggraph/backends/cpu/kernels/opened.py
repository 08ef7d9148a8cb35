"""Products of many rows where vectors have 256 bits: a few blocks are opened once for all rows.

Opened, a block's codes are bytes and its scales float32, on the thread's stack. Passes of few rows
then only multiply: with four pipes for vectors, unpacking anew in each would take a fifth of them.

Legend: n outputs, k inputs; a group is some rows of x whose sums wait on the stack.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import F32, I8, Kernel, Num, Val, vec
from ggraph.backends.cpu.kernels.blocks import Block, Following
from ggraph.backends.cpu.kernels.passes import Held, homes, in_passes, of_height
from ggraph.backends.cpu.kernels.tiles import (
    BLOCK,
    GROUP_BYTES,
    GROUPS,
    HALF,
    TILE,
    X_BLOCK,
    Layout,
    Packed,
)  # fmt: skip
from ggraph.backends.cpu.runtime.taking import SHARES, taken

OPEN_ROWS = 12  # rows for which blocks are opened: so many gain 3 % of Q4_K, 18 % of Q6_K
GROUP_ROWS = 128  # of x, which with their sums stay in the second cache
CHUNK = 16  # blocks that are opened together, whole runs: 10 KB, which the nearest cache keeps
# Tiles whose results are written together, row after row: products take 2 to 7 % less than with one
# (docs/log/2026-11-27-where-prompts-lost-time.md).
SIDE = 8
CODES, NUMBERS = GROUPS * GROUP_BYTES, TILE * 4  # bytes of a block's codes, and of its scales
APART = GROUP_ROWS * NUMBERS  # bytes between the sums of two tiles


@dataclass(frozen=True)
class Opened:
    """A block of `layout` as it lies opened at `at`; it answers as `Block` does."""

    k: Kernel
    layout: Layout
    at: Val

    @property
    def outputs(self) -> int:
        """Rows of the matrix in it."""
        return TILE

    def codes(self, group: int, part: int) -> Val:
        """Codes or values of four columns of a part of the tile, one vector of bytes."""
        width = self.k.isa.lanes * 4
        return self.k.load(self.at + (group * GROUP_BYTES + part * width), vec(I8, width))

    def scales(self, sub: int, first: int, lanes: int) -> Val:
        """Scales of a part of the columns, float32."""
        return self.k.load(self.at + (CODES + sub * NUMBERS + first * 4), vec(F32, lanes))

    def minimums(self, sub: int, first: int, lanes: int) -> Val:
        """What is added to a weight in a part of the columns, float32."""
        return self.scales(self.layout.subs + sub, first, lanes)


def opens(isa: Isa, layout: Packed) -> bool:
    """Whether blocks of a layout are opened for many rows: codes that are bytes already are not."""
    return isinstance(layout, Layout) and isa.lanes == HALF and layout.planes != (8,)


def sides(k: Kernel, tiles: Val, most: int = SIDE) -> Iterator[tuple[Val, Val]]:
    """First and end of those of the tiles that this thread takes, to be written together."""
    each = k.maximum(k.minimum(tiles // (k.threads * SHARES), most), 1)
    for i in taken(k, (tiles + (each - 1)) // each):
        yield i * each, k.minimum((i + 1) * each, tiles)


def opened_bytes(layout: Layout) -> int:
    """Bytes of one opened block."""
    return CODES + layout.subs * (1 + layout.stored_minimum) * NUMBERS


def _open(block: Block, to: Val) -> None:
    """Write a block there as `Opened` finds it."""
    k, lanes = block.k, block.k.isa.lanes
    for part in range(TILE // lanes):
        for group in range(GROUPS):
            at = to + (group * GROUP_BYTES + part * lanes * 4)
            k.store(at, block.codes(group, part))
        subs = range(block.layout.subs)
        numbers = [block.scales(sub, part * lanes, lanes) for sub in subs]
        if block.layout.stored_minimum:
            numbers += [block.minimums(sub, part * lanes, lanes) for sub in subs]
        for i, number in enumerate(numbers):
            k.store(to + (CODES + i * NUMBERS + part * lanes * 4), number)
        k.keep_order()


Add = Callable[[Kernel, Opened, Sequence[Val], Sequence[Held]], None]


@dataclass(frozen=True)
class Group:
    """The sums of a group of rows, with room for some tiles', and the blocks that are open; both of
    this thread.

    `add` adds a block's products with some rows at once, `most` or fewer, to their sums. What lies
    `ahead` bytes further is asked for between the passes of open blocks, a share in each: all of it
    at once is more than a core has on its way, and memory would idle while rows are multiplied.
    """

    k: Kernel
    layout: Layout
    most: int
    ahead: Num
    add: Add
    sums: Val
    blocks: Val

    @staticmethod
    def of(k: Kernel, layout: Layout, most: int, ahead: Num, add: Add, side: int = SIDE) -> "Group":
        """On the stack."""
        sums = k.scratch(side * APART)
        blocks = k.scratch(CHUNK * opened_bytes(layout))
        return Group(k, layout, most, ahead, add, sums, blocks)

    def beside(self, i: Val) -> "Group":
        """With the sums of tile i of those that are written together."""
        return replace(self, sums=self.sums + i * APART)

    def run(self, tile: Val, rows: Val, row_at: Callable[[Val], Val]) -> None:
        """Leave the sums of rows 0 .. `rows` - 1 with a tile's weights in `sums`, row by row.
        `rows` is OPEN_ROWS or more; `row_at` gives a row's address."""
        k = self.k
        for r in k.loop(0, rows):
            for half in range(TILE // HALF):
                k.store(self.sums + r * NUMBERS + half * HALF * 4, k.const(0.0, vec(F32, HALF)))
        whole = k.arg("k") // BLOCK
        for first in k.loop(0, whole, CHUNK):
            count = k.minimum(whole - first, CHUNK)
            run = tile + first // self.layout.blocks * self.layout.run_bytes
            self._open_all(run, count)
            self._passes(rows, row_at, first * X_BLOCK, count, run + self.ahead)

    def _passes(
        self, rows: Val, row_at: Callable[[Val], Val], at: Val, count: Val, following: Val
    ) -> None:
        """All rows, from `at` bytes behind their addresses on, with `count` open blocks; asks for
        as many bytes as these have been stored in, from `following` on."""
        k = self.k
        behind = Following(k, self.layout, following, count)
        for first, height in in_passes(k, self.most, rows):
            behind.ask(first + height, rows)
            for some in of_height(k, height, self.most, (self.most + 1) // 2):  # never fewer
                starts = [k.opaque(row_at(first + r) + at) for r in range(some)]
                self._pass(starts, self.sums + first * NUMBERS, count)

    def _open_all(self, run: Val, count: Val) -> None:
        k, layout, each = self.k, self.layout, opened_bytes(self.layout)
        for j in k.loop(0, count):
            here = run + j // layout.blocks * layout.run_bytes
            _open(Block(k, layout, here, j % layout.blocks), self.blocks + j * each)

    def _pass(self, starts: list[Val], home: Val, count: Val) -> None:
        """Some of the rows; their sums are at `home`."""
        k = self.k
        sums = homes(k, home, TILE, len(starts))
        for j in k.loop(0, count):
            block = Opened(k, self.layout, self.blocks + j * opened_bytes(self.layout))
            self.add(k, block, [start + j * X_BLOCK for start in starts], sums)
