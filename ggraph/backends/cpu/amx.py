"""Products of many rows by AMX: 16 rows of x with 16 outputs in one instruction.

A pass is up to `MOST` rows with up to `TILES` tiles of weights. It goes through the columns in
batches: of each tile a batch's codes are unpacked once for all rows, into the very form that the
instruction reads (groups of four columns), while the batch's part of x stays in the nearest cache.
The integer sums of a scale's columns, a unit, are those of `words.Dot`, and what is made of them is
what `matmul` makes, in the same order, so that all bits are.

For some 500 cycles behind any instruction of AMX a core of Sapphire Rapids has one port for
512-bit arithmetic instead of two, so that the floats of a unit, 64 instructions where there are
minimums, are the bound: everything else must wait for nothing and keep off their port. So a unit's
tile is multiplied two units and stored one unit early, a height's sums stay in registers through a
batch, and rows of x are found by adding multiples of their distance that are at hand.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
Legend: SUMS, CODES, ROWS are numbers of tile registers; h number of a height, u of a unit in a
turn of the loop, i of a block in its batch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import Block, ask_ahead
from ggraph.backends.cpu.simd import F32, I8, I32, I64, Kernel, Val, Var, vec
from ggraph.backends.cpu.tiles import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    SUPER,
    TILE,
    X_BLOCK,
    X_SCALE,
    X_SUM,
    Layout,
)

SUMS, CODES, ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
UNITS = len(SUMS)  # of a turn
EARLY, STORED = 2, 1  # units between a product, its being stored, and its use
HEIGHT = 16  # rows of x in one instruction
MOST = 64  # rows that share what is unpacked
TILES = 8  # of weights that share a batch of x
BATCH = SUPER  # blocks of a batch
LINE = TILE * 4  # bytes of a row's sums
FLOATS, INTS = vec(F32, TILE), vec(I32, TILE)


def _call(k: Kernel, name: str, *values: Val | ir.Value) -> None:
    k.intrinsic("llvm.x86." + name, ir.VoidType(), *values)


def configure(k: Kernel, layout: Layout) -> None:
    """Give the registers their sizes; until `release`."""
    columns = GROUPS // layout.subs * GROUP
    widths, heights = [0] * 16, [0] * 16
    for registers, width, height in (
        (SUMS, LINE, HEIGHT), (CODES, LINE, columns // GROUP), (ROWS, columns, HEIGHT)
    ):  # fmt: skip
        for register in registers:
            widths[register], heights[register] = width, height
    config = struct.pack("<B15x16H16B", 1, *widths, *heights)
    room = k.scratch(len(config))
    k.store(room, k.consts([b - 256 * (b > 127) for b in config], I8))
    _call(k, "ldtilecfg", k.pointer(room))


def release(k: Kernel) -> None:
    """Forget the registers, so that nobody saves them when threads change."""
    _call(k, "tilerelease")


@dataclass(frozen=True)
class Rows:
    """Where rows of x lie: the k-th one `distance` * k bytes behind the first."""

    distance: Val
    odd: dict[int, Val]  # odd multiples of the distance

    @classmethod
    def of(cls, k: Kernel) -> "Rows":
        """A product's."""
        distance = k.opaque(k.arg("xs"))
        return cls(distance, {1: distance, **{i: k.opaque(distance * i) for i in (3, 5, 7)}})

    def from_first(self, k: Kernel, first: Val) -> list[Val]:
        """Addresses of a height's rows, each a register and a multiple of another at most."""
        found, eighth = [], k.opaque(first + self.distance * 8)
        for r in range(HEIGHT):
            base, left = (eighth, r - 8) if r > 8 and r % 2 else (first, r)
            times = left & -left  # 1, 2, 4 or 8
            found.append(base + self.odd[left // times] * times if left else base)
        return found


@dataclass(frozen=True)
class Tiled:
    """The pass of a layout; `home` has room for the sums of all rows and tiles."""

    k: Kernel
    layout: Layout
    home: Val
    tile_bytes: Val
    ahead: int
    rows: Rows
    codes: Val  # [BATCH, GROUPS, GROUP_BYTES]
    scales: Val  # [BATCH, subs, TILE]
    minimums: Val  # [BATCH, TILE]
    ints: Val  # [UNITS, HEIGHT, TILE]

    @classmethod
    def of(cls, k: Kernel, layout: Layout, home: Val, tile_bytes: Val, ahead: int) -> "Tiled":
        """With working memory of its own."""
        codes, scales, minimums, ints = (
            k.scratch(size)
            for size in (
                BATCH * GROUPS * GROUP_BYTES, BATCH * layout.subs * LINE, BATCH * LINE,
                UNITS * HEIGHT * LINE,
            )
        )  # fmt: skip
        rows = Rows.of(k)
        return cls(k, layout, home, tile_bytes, ahead, rows, codes, scales, minimums, ints)

    @property
    def per_turn(self) -> int:
        """Blocks of a turn."""
        return UNITS // self.layout.subs

    @property
    def whole(self) -> bool:
        """Whether every batch has whole turns."""
        return self.layout.blocks % self.per_turn == 0

    def run(self, heights: Val, tile: Val, tiles: Val, x: Val) -> None:
        """Sums of whole heights of rows with `tiles` tiles of weights, left in `home`."""
        k = self.k
        blocks = k.arg("k") // BLOCK
        for t in k.loop(0, tiles):
            for r in k.loop(0, heights * HEIGHT):
                k.store(self.home_of(t) + r * LINE, k.const(0.0, FLOATS))
        for first in k.loop(0, blocks, BATCH):
            count = k.minimum(blocks - first, BATCH)
            for t in k.loop(0, tiles):
                self._unpack(tile + t * self.tile_bytes, first, count)
                self._batch(heights, count, x + first * X_BLOCK, self.home_of(t))

    def home_of(self, t: Val) -> Val:
        """Where the sums of a tile's rows lie."""
        return self.home + t * (MOST * LINE)

    def _unpack(self, tile: Val, first: Val, count: Val) -> None:
        """A batch's codes, signed, its scales and minimums."""
        k, a = self.k, self.layout
        for i in k.loop(0, count):
            single = a.blocks == 1
            run = tile + (first + i if single else first // SUPER) * a.run_bytes
            block = Block(k, a, run, k.const(0, I64) if single else i)
            ask_ahead(block, self.ahead)
            for g in range(GROUPS):
                found = block.codes(g, 0)
                if a.zero:
                    found = found ^ words.SIGN if a.zero == -words.SIGN else found - a.zero
                k.store(self.codes + (i * GROUPS + g) * GROUP_BYTES, found)
            for sub in range(a.subs):
                k.store(self.scales + (i * a.subs + sub) * LINE, block.scales(sub, 0, TILE))
            if a.stored_minimum:
                k.store(self.minimums + i * LINE, block.minimums(0, TILE))
        k.keep_order()

    def _batch(self, heights: Val, count: Val, x: Val, home: Val) -> None:
        """Add a batch's columns to the sums of all rows of a tile."""
        k, subs = self.k, self.layout.subs
        per = self.per_turn
        end = count if self.whole else (count + (per - 1)) // per * per

        def multiply(h: Val, i: Val, u: int) -> None:
            """The unit that is u further than block i of a height, perhaps in the next."""
            block = i + u // subs
            over = block >= end
            height = k.select(over, k.minimum(h + 1, heights - 1), h)
            block = k.select(over, block - end, block)
            inside = block if self.whole else k.minimum(block, count - 1)
            self._multiply(u % UNITS, x + height * HEIGHT * self.rows.distance, inside, u % subs)

        zero = k.const(0, I64)
        for u in range(EARLY):
            multiply(zero, zero, u)
        for u in range(EARLY - STORED):
            self._store(u)
        for h in k.loop(0, heights):
            own = home + h * (HEIGHT * LINE)
            sums = [k.var(k.load(own + r * LINE, FLOATS)) for r in range(HEIGHT)]
            for i in k.loop(0, end, per):
                for u in range(UNITS):
                    multiply(h, i, u + EARLY)
                    self._store((u + EARLY - STORED) % UNITS)
                    k.keep_order()
                    block = i + u // subs
                    first = x + h * HEIGHT * self.rows.distance + block * X_BLOCK
                    if self.whole or u < subs:
                        self._add(u, block, first, sums)
                        continue
                    with k.when(block < count):
                        self._add(u, block, first, sums)
            for r, total in enumerate(sums):
                k.store(own + r * LINE, total.value)

    def _multiply(self, u: int, x: Val, i: Val, sub: int) -> None:
        """Sums of a unit of a height whose rows begin at `x`, left in a register."""
        k, count = self.k, GROUPS // self.layout.subs
        sums, codes, rows = SUMS[u], CODES[u % len(CODES)], ROWS[u % len(ROWS)]
        row = x + i * X_BLOCK + sub * count * GROUP
        stored = self.codes + (i * GROUPS + sub * count) * GROUP_BYTES
        _call(k, "tilezero", I8(sums))
        _call(k, "tileloadd64", I8(rows), k.pointer(row), self.rows.distance)
        _call(k, "tileloadd64", I8(codes), k.pointer(stored), I64(GROUP_BYTES))
        _call(k, "tdpbssd", I8(sums), I8(rows), I8(codes))

    def _store(self, u: int) -> None:
        """Sums of a unit to memory: floats are made of them from there."""
        at = self.k.pointer(self.ints + u * (HEIGHT * LINE))
        _call(self.k, "tilestored64", I8(SUMS[u]), at, I64(LINE))

    def _add(self, u: int, i: Val, x: Val, sums: Sequence[Var]) -> None:
        """Add a unit to the sums of its rows, and the block's minimums with the last one."""
        k, subs, sub = self.k, self.layout.subs, u % self.layout.subs
        scales = k.load(self.scales + (i * subs + sub) * LINE, FLOATS)
        last = self.layout.stored_minimum and sub == subs - 1
        minimums = k.load(self.minimums + i * LINE, FLOATS) if last else None
        for r, row in enumerate(self.rows.from_first(k, k.opaque(x))):
            ints = k.load(self.ints + (u * HEIGHT + r) * LINE, INTS)
            scale = scales * words.broadcast(k, row + X_SCALE, TILE)
            total = words.fma(k, k.cast("sitofp", ints, FLOATS), scale, sums[r].value)
            if minimums is not None:
                total = words.fma(k, minimums, words.broadcast(k, row + X_SUM, TILE), total)
            sums[r].value = total
            if r % 4 == 3:  # else all loads come first, and registers spill
                k.keep_order()
