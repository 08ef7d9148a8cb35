"""Products of many rows where unpacking takes turns with them: a few blocks are opened for all.

Opened, a block's codes are bytes and its scales float32, on the thread's stack. Passes of few rows
then only multiply: unpacking anew in each would take a fifth of four pipes for vectors of 256 bits,
and of Intel's two for 512 bits a quarter.

Legend: n outputs, k inputs; a group is some rows of x whose sums wait on the stack.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ggraph.backends.cpu.codegen import routine
from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import F32, I8, I64, Kernel, Num, Val, vec
from ggraph.backends.cpu.kernels.blocks import Abreast, Block, Following
from ggraph.backends.cpu.kernels.passes import (
    ABREAST,
    ABREAST_ROWS,
    ROWS,
    Held,
    in_passes,
    near,
    of_height,
)
from ggraph.backends.cpu.kernels.sums import Sum
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

# Rows for which blocks are opened, or with 512 bits tiles come abreast: opened, so many gain 3 % of
# Q4_K, 18 % of Q6_K.
MANY = 12
# Rows for which they are opened with 512 bits: 24 lose a tenth of Q4_0 and Q8_0, 40 gain 21 % of
# Q4_K, 25 % of Q6_K, 1 % of Q4_0 and 8 % of Q8_0.
MANY_WIDE = 32
GROUP_ROWS = 128  # of x, which with their sums stay in the second cache
CHUNK = 16  # blocks opened together, whole runs: 10 KB a tile, which the nearest cache keeps
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
    """Whether blocks of a layout are opened for many rows. Codes that are bytes already are not
    worth it with 256 bits; with 512, Q8_0's products take 0.89 of their time."""
    if not isinstance(layout, Layout) or isa.unpacks_beside:
        return False
    return isa.lanes > HALF or layout.planes != (8,)


def least(isa: Isa) -> int:
    """Rows from which on blocks are opened, which is `MANY` or more."""
    return MANY_WIDE if isa.lanes > HALF else MANY


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


Add = Callable[[Kernel, Abreast, Sequence[Val], Sequence[Sum]], None]


@dataclass(frozen=True)
class Group:
    """The sums of a group of rows, with room for some tiles', and the blocks that are open; both of
    this thread.

    `add` adds the products of a block, or of that of some tiles `abreast`, with `most` rows at once
    or fewer to their sums. What lies `ahead` bytes further is asked for between the passes of open
    blocks, a share in each: all of it at once is more than a core has on its way, and memory would
    idle while rows are multiplied.
    """

    k: Kernel
    layout: Layout
    ahead: Num
    add: Add
    most: int
    abreast: int
    sums: Val
    blocks: Val

    @staticmethod
    def of(k: Kernel, layout: Layout, ahead: Num, add: Add, side: int = SIDE) -> "Group":
        """On the stack, for up to `side` tiles, an even number."""
        wide = k.isa.lanes > HALF
        most, abreast = (ABREAST_ROWS, ABREAST) if wide else (ROWS[HALF], 1)
        blocks = k.scratch(abreast * CHUNK * opened_bytes(layout))
        return Group(k, layout, ahead, add, most, abreast, k.scratch(side * APART), blocks)

    def run(
        self, tile_at: Callable[[Val], Val], tiles: Val, rows: Val, row_at: Callable[[Val], Val]
    ) -> None:
        """Leave the sums of rows 0 .. `rows` - 1 with the weights of some tiles in `sums`, tile by
        tile, row by row. `rows` is `least` or more; tiles and rows lie at the addresses that their
        numbers give. A tile that has none beside it is its own neighbour."""
        for i in self.k.loop(self.k.const(0, I64), tiles, self.abreast):
            beside = [i, *(self.k.minimum(i + a, tiles - 1) for a in range(1, self.abreast))]
            self._abreast([tile_at(t) for t in beside], self.sums + i * APART, rows, row_at)

    def _abreast(
        self, tiles: Sequence[Val], home: Val, rows: Val, row_at: Callable[[Val], Val]
    ) -> None:
        k = self.k
        for i in range(self.abreast):
            for at in k.loop(0, rows * NUMBERS, HALF * 4):
                k.store(home + i * APART + at, k.const(0.0, vec(F32, HALF)))
        whole = k.arg("k") // BLOCK
        for first in k.loop(0, whole, CHUNK):
            count = k.minimum(whole - first, CHUNK)
            runs = [t + first // self.layout.blocks * self.layout.run_bytes for t in tiles]
            for i, run in enumerate(runs):
                self._open_all(run, count, self.blocks + i * self._room)
            following = [Following(k, self.layout, run + self.ahead, count) for run in runs]
            for row, height in in_passes(k, self.most, rows):
                for some in following:
                    some.ask(row + height, rows)
                self._pass(home + row * NUMBERS, row, height, count, first * X_BLOCK, row_at)

    @property
    def _room(self) -> int:
        """Bytes of a tile's open blocks."""
        return CHUNK * opened_bytes(self.layout)

    def _open_all(self, run: Val, count: Val, to: Val) -> None:
        k, layout, each = self.k, self.layout, opened_bytes(self.layout)
        for j in k.loop(0, count):
            here = run + j // layout.blocks * layout.run_bytes
            _open(Block(k, layout, here, j % layout.blocks), to + j * each)

    def _pass(
        self, home: Val, row: Val, height: Val, count: Val, at: Val, row_at: Callable[[Val], Val]
    ) -> None:
        """`height` rows from one on, `at` bytes behind their addresses, with `count` open blocks;
        their sums are at `home`."""
        k = self.k
        for some in of_height(k, height, self.most, (self.most + 1) // 2):  # never fewer
            starts = [row_at(row + r) + at for r in range(some)]
            name = f"{k.spec.name}_opened_{some}"
            routine.call(k, name, self._rows, home, self.blocks, count, *starts)

    def _rows(self, home: Val, blocks: Val, count: Val, *starts: Val) -> None:
        """The rows at these addresses."""
        k, each = self.k, opened_bytes(self.layout)
        parts = [
            i * APART + p * 4 for i in range(self.abreast) for p in range(0, TILE, k.isa.lanes)
        ]
        held = [Held(k, home + (part + r * NUMBERS)) for part in parts for r in range(len(starts))]
        with near(k, held) as sums:
            for j in k.loop(0, count):
                here = k.opaque(blocks + j * each)
                tiles = [Opened(k, self.layout, here + i * self._room) for i in range(self.abreast)]
                self.add(k, Abreast(tiles), [start + j * X_BLOCK for start in starts], sums)
