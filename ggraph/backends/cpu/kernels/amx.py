"""Products of many rows by AMX: 16 rows of x with 16 outputs in one instruction.

A pass is up to `MOST` rows with up to `TILES` tiles of weights. It goes through the columns in
batches, of which x is laid out once for all tiles, in the nearest cache, and each tile's codes once
for all rows (`panels.py`). The sums of a scale's columns, a unit, are exact, as those of
`words.Dot` are, and what is made of them is what `matmul` makes, in the same order, so that all
bits are.

For some 300 cycles behind any instruction of AMX a core of Sapphire Rapids multiplies 512 bits on
one port instead of two (sums of floats, integers' and loads keep theirs), so that the products of a
unit, 48 instructions where there are minimums, are the bound: everything else must wait for nothing
and keep off their port. So a unit's tile is stored one unit early and multiplied a block before
that, and a height's sums stay in registers through a batch.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
Legend: SUMS, CODES, ROWS are numbers of tile registers; h number of a height, u of a unit in a
turn of the loop, i of a block in its batch.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import I8, I64, Kernel, Val, Var
from ggraph.backends.cpu.kernels.blocks import Block, Following
from ggraph.backends.cpu.kernels.panels import (
    FLOATS,
    INTS,
    LINE,
    NUMBERS,
    code_rows,
    floating,
    row_bytes,
    store_codes,
    store_row,
)
from ggraph.backends.cpu.kernels.tiles import BLOCK, SUPER, X_BLOCK, X_SCALE, X_SUM, Layout, Packed

SUMS, CODES, ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
UNITS = len(SUMS)  # of a turn
HEIGHT = 16  # rows of x in one instruction
MOST = 256  # rows that share what is unpacked
TILES = 48  # of weights that share a batch of x; their sums are 3/4 MB, for the second cache
BATCH = 8  # blocks of a batch
APART = MOST * LINE  # bytes between the sums of two tiles


def takes(isa: Isa, layout: Packed) -> bool:
    """Whether products of a layout are AMX's: not where halves of a block have minimums, or scales
    of values that codes stand for, which nobody has laid out for it."""
    if not isa.tiles or not isinstance(layout, Layout):
        return False
    return layout.subs == 1 or not (layout.values or layout.stored_minimum)


def _call(k: Kernel, name: str, *values: Val | ir.Value) -> None:
    k.intrinsic("llvm.x86." + name, ir.VoidType(), *values)


def configure(k: Kernel, columns: int, rows: int) -> None:
    """Give the registers their sizes, until `release`: bytes of a row of x, rows of codes."""
    widths, heights = [0] * 16, [0] * 16
    for registers, width, height in (
        (SUMS, LINE, HEIGHT), (CODES, LINE, rows), (ROWS, columns, HEIGHT)
    ):  # fmt: skip
        for register in registers:
            widths[register], heights[register] = width, height
    config = struct.pack("<B15x16H16B", 1, *widths, *heights)
    room = k.scratch(len(config))
    k.store(room, k.consts([b - 256 * (b > 127) for b in config], I8))
    _call(k, "ldtilecfg", k.pointer(room))


def configure_for(k: Kernel, layout: Layout) -> None:
    """The same for units of a layout."""
    configure(k, row_bytes(layout) // layout.subs, code_rows(layout) // layout.subs)


def multiply_all(k: Kernel) -> None:
    """One product of bytes into each of the sums."""
    for u, sums in enumerate(SUMS):
        _call(k, "tdpbssd", I8(sums), I8(ROWS[u % 2]), I8(CODES[u // 2]))


def release(k: Kernel) -> None:
    """Forget the registers, so that nobody saves them when threads change."""
    _call(k, "tilerelease")


@dataclass(frozen=True)
class Tiled:
    """The pass of a layout; `home` has room for the sums of all rows and tiles."""

    k: Kernel
    layout: Layout
    home: Val
    x: Val  # [MOST / HEIGHT, BATCH, HEIGHT, row_bytes]
    numbers: Val  # [MOST / HEIGHT, BATCH, HEIGHT, NUMBERS]
    codes: Val  # [BATCH, code_rows, LINE]
    scales: Val  # [BATCH, subs, TILE]
    minimums: Val  # [BATCH, TILE]
    sums: Val  # [UNITS, HEIGHT, TILE]

    @classmethod
    def of(cls, k: Kernel, layout: Layout, home: Val) -> "Tiled":
        """With working memory of its own."""
        rooms = [
            k.scratch(size)
            for size in (
                MOST * BATCH * row_bytes(layout), MOST * BATCH * NUMBERS,
                BATCH * code_rows(layout) * LINE, BATCH * layout.subs * LINE, BATCH * LINE,
                UNITS * HEIGHT * LINE,
            )
        ]  # fmt: skip
        return cls(k, layout, home, *rooms)

    @property
    def per_turn(self) -> int:
        """Blocks of a turn."""
        return UNITS // self.layout.subs

    @property
    def whole(self) -> bool:
        """Whether every batch has whole turns."""
        return self.layout.blocks % self.per_turn == 0

    def run(
        self, heights: Val, tile_at: Callable[[Val], Val], tiles: Val, row_at: Callable[[Val], Val]
    ) -> None:
        """Sums of whole heights of rows with `tiles` tiles of weights, left in `home`; addresses of
        a tile and of a row are `tile_at` and `row_at`."""
        k = self.k
        blocks = k.arg("k") // BLOCK
        for t in k.loop(0, tiles):
            for r in k.loop(0, heights * HEIGHT):
                k.store(self.home_of(t) + r * LINE, k.const(0.0, FLOATS))
        for first in k.loop(0, blocks, BATCH):
            count = k.minimum(blocks - first, BATCH)
            self._lay(heights, row_at, first * X_BLOCK, count)
            for t in k.loop(0, tiles):
                self._unpack(tile_at(t), first, count)
                over = t + 1 >= tiles
                tile = tile_at(k.select(over, k.const(0, I64), t + 1))
                following = self._run_at(tile, k.select(over, first + BATCH, first))
                self._batch(heights, count, self.home_of(t), following)

    def home_of(self, t: Val) -> Val:
        """Where the sums of a tile's rows lie."""
        return self.home + t * APART

    def place(self, h: Val, i: Val) -> Val:
        """The number of a block of a height."""
        return h * BATCH + i

    def _lay(self, heights: Val, row_at: Callable[[Val], Val], first: Val, count: Val) -> None:
        """A batch of all rows, which begins `first` bytes behind them, and its blocks' numbers."""
        k, a = self.k, self.layout
        for h in k.loop(0, heights):
            for r in k.loop(0, HEIGHT):
                row = row_at(h * HEIGHT + r) + first
                for i in k.loop(0, count):
                    at = self.place(h, i) * HEIGHT + r
                    to, numbers = self.x + at * row_bytes(a), self.numbers + at * NUMBERS
                    store_row(k, a, row + i * X_BLOCK, to, numbers)
        k.keep_order()

    def _unpack(self, tile: Val, first: Val, count: Val) -> None:
        """A batch's codes, its scales and minimums."""
        k, a = self.k, self.layout
        single = a.blocks == 1
        for i in k.loop(0, count):
            run = self._run_at(tile, first + i if single else first)
            block = Block(k, a, run, k.const(0, I64) if single else first % SUPER + i)
            store_codes(k, block, self.codes + i * (code_rows(a) * LINE))
            for sub in range(a.subs):
                k.store(self.scales + (i * a.subs + sub) * LINE, block.scales(sub, 0, HEIGHT))
            if a.stored_minimum:
                k.store(self.minimums + i * LINE, block.minimums(0, 0, HEIGHT))
        k.keep_order()

    def _run_at(self, tile: Val, block: Val) -> Val:
        """Address of the run in which a tile's block is."""
        return tile + block // self.layout.blocks * self.layout.run_bytes

    def _batch(self, heights: Val, count: Val, home: Val, following: Val) -> None:
        """Add a batch's columns to the sums of all rows of a tile. Asks for the batch that is
        unpacked next, at `following`, a share before each height: memory has time meanwhile."""
        k, subs = self.k, self.layout.subs
        behind = Following(k, self.layout, following, count)
        per, early = self.per_turn, subs + 1
        end = count if self.whole else (count + (per - 1)) // per * per

        def multiply(h: Val, i: Val, u: int) -> None:
            """The unit that is u further than block i of a height, perhaps in the next."""
            block = i + u // subs
            over = block >= end
            height = k.select(over, k.minimum(h + 1, heights - 1), h)
            block = k.select(over, block - end, block)
            inside = block if self.whole else k.minimum(block, count - 1)
            self._multiply(u % UNITS, height, inside, u % subs)

        zero = k.const(0, I64)
        for u in range(early):
            multiply(zero, zero, u)
        self._store(0)
        for h in k.loop(0, heights):
            behind.ask(h + 1, heights)
            own = home + h * (HEIGHT * LINE)
            sums = [k.var(k.load(own + r * LINE, FLOATS)) for r in range(HEIGHT)]
            for i in k.loop(0, end, per):
                for u in range(UNITS):
                    multiply(h, i, u + early)
                    self._store((u + 1) % UNITS)
                    k.keep_order()
                    block = i + u // subs
                    if self.whole or u < subs:
                        self._add(u, h, block, sums)
                        continue
                    with k.when(block < count):
                        self._add(u, h, block, sums)
            for r, total in enumerate(sums):
                k.store(own + r * LINE, total.value)

    def _multiply(self, u: int, h: Val, i: Val, sub: int) -> None:
        """Sums of a unit of a height, left in a register."""
        k, a = self.k, self.layout
        sums, codes, rows = SUMS[u], CODES[u % len(CODES)], ROWS[u % len(ROWS)]
        width, lines = row_bytes(a), code_rows(a)
        row = self.x + self.place(h, i) * (HEIGHT * width) + sub * (width // a.subs)
        stored = self.codes + (i * lines + sub * (lines // a.subs)) * LINE
        _call(k, "tilezero", I8(sums))
        _call(k, "tileloadd64", I8(rows), k.pointer(row), I64(width))
        _call(k, "tileloadd64", I8(codes), k.pointer(stored), I64(LINE))
        name = "tdpbf16ps" if floating(a) else "tdpbssd"
        _call(k, name, I8(sums), I8(rows), I8(codes))

    def _store(self, u: int) -> None:
        """Sums of a unit to memory: totals are made of them from there."""
        at = self.k.pointer(self.sums + u * (HEIGHT * LINE))
        _call(self.k, "tilestored64", I8(SUMS[u]), at, I64(LINE))

    def _add(self, u: int, h: Val, i: Val, sums: Sequence[Var]) -> None:
        """Add a unit to the sums of its rows, and the block's minimums with the last one."""
        k, a = self.k, self.layout
        sub = u % a.subs
        scales = k.load(self.scales + (i * a.subs + sub) * LINE, FLOATS)
        last = a.stored_minimum and sub == a.subs - 1
        minimums = k.load(self.minimums + i * LINE, FLOATS) if last else None
        numbers = k.opaque(self.numbers + self.place(h, i) * (HEIGHT * NUMBERS))
        for r, total in enumerate(sums):
            row = numbers + r * NUMBERS
            found = k.load(self.sums + (u * HEIGHT + r) * LINE, FLOATS if floating(a) else INTS)
            found = found if floating(a) else k.cast("sitofp", found, FLOATS)
            scale = scales * words.broadcast(k, row, HEIGHT)
            total.value = words.fma(k, found, scale, total.value)
            if minimums is not None:
                less = words.broadcast(k, row + (X_SUM - X_SCALE), HEIGHT)
                total.value = words.fma(k, minimums, less, total.value)
            if r % 4 == 3:  # else all loads come first, and registers spill
                k.keep_order()
