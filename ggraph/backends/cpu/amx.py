"""Products of many rows by AMX: 16 rows of x with 16 outputs in one instruction.

A block's codes are unpacked once for up to `MOST` rows, into the very form that the instruction
reads (groups of four columns); its integer sums are those of `words.Dot`, and what is made of them
is what `matmul` makes, in the same order, so that all bits are.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
Legend: SUMS, CODES, ROWS are numbers of tile registers.
"""

import struct
from collections.abc import Callable

from llvmlite import ir

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import Block, ask, blocks_of
from ggraph.backends.cpu.simd import F32, I8, I32, I64, Kernel, Val, vec
from ggraph.backends.cpu.tiles import (
    GROUP,
    GROUP_BYTES,
    GROUPS,
    TILE,
    X_SCALE,
    X_SUM,
    Layout,
)

SUMS, CODES, ROWS = range(3)
HEIGHT = 16  # rows of x in one instruction
MOST = 64  # rows that share what is unpacked: their sums stay in the nearest cache
UNROLLED = 4
AHEAD = 128  # bytes of a row of x that are asked for early: rows lie too far apart for hardware
LINE = TILE * 4  # bytes of a row's sums
FLOATS, INTS = vec(F32, TILE), vec(I32, TILE)
TiledPass = Callable[[Val, Val, Val], None]


def _call(k: Kernel, name: str, *values: Val | ir.Value) -> None:
    k.intrinsic("llvm.x86." + name, ir.VoidType(), *values)


def configure(k: Kernel, layout: Layout) -> None:
    """Give the three registers their sizes; until `release`."""
    columns = GROUPS // layout.subs * GROUP
    widths, heights = [0] * 16, [0] * 16
    for register, width, height in (
        (SUMS, LINE, HEIGHT), (CODES, LINE, columns // GROUP), (ROWS, columns, HEIGHT)
    ):  # fmt: skip
        widths[register], heights[register] = width, height
    config = struct.pack("<B15x16H16B", 1, *widths, *heights)
    room = k.scratch(len(config))
    k.store(room, k.consts([b - 256 * (b > 127) for b in config], I8))
    _call(k, "ldtilecfg", k.pointer(room))


def release(k: Kernel) -> None:
    """Forget the registers, so that nobody saves them when threads change."""
    _call(k, "tilerelease")


def tiled_pass(k: Kernel, layout: Layout, home: Val, ahead: int) -> TiledPass:
    """Sums of whole heights of rows, left in `home` (`MOST` rows)."""
    codes, ints = k.scratch(GROUPS * GROUP_BYTES), k.scratch(HEIGHT * LINE)

    def run(heights: Val, tile: Val, x: Val) -> None:
        for r in k.loop(0, heights * HEIGHT):
            k.store(home + r * LINE, k.const(0.0, FLOATS))
        for block, at in blocks_of(k, layout, tile, ahead):
            for sub in range(layout.subs):
                _unpack(k, block, sub, codes)
                _add(k, block, sub, heights, x + at, home, ints)

    return run


def _unpack(k: Kernel, block: Block, sub: int, codes: Val) -> None:
    """A scale's columns, signed, to the register of codes."""
    count, zero = GROUPS // block.layout.subs, block.layout.zero
    for g in range(count):
        found = block.codes(sub * count + g, 0)
        if zero:
            found = found ^ words.SIGN if zero == -words.SIGN else found - zero
        k.store(codes + g * GROUP_BYTES, found)
    k.keep_order()
    _call(k, "tileloadd64", I8(CODES), k.pointer(codes), I64(GROUP_BYTES))


def _add(k: Kernel, block: Block, sub: int, heights: Val, x: Val, home: Val, ints: Val) -> None:
    """Add a scale's columns to the sums of all rows, and the block's minimums with the last."""
    xs, subs = k.arg("xs"), block.layout.subs
    scales = block.scales(sub, 0, TILE)
    minimums = block.minimums(0, TILE) if block.layout.stored_minimum else None
    for h in k.loop(0, heights):
        rows = x + h * (xs * HEIGHT)
        _call(k, "tilezero", I8(SUMS))
        at = k.pointer(rows + sub * (GROUPS // subs * GROUP))
        _call(k, "tileloadd64", I8(ROWS), at, xs)
        _call(k, "tdpbssd", I8(SUMS), I8(ROWS), I8(CODES))
        _call(k, "tilestored64", I8(SUMS), k.pointer(ints), I64(LINE))
        k.keep_order()
        for first in k.loop(0, HEIGHT, UNROLLED):
            for r in range(UNROLLED):
                row, own = rows + xs * (first + r), home + (h * HEIGHT + first + r) * LINE
                product = k.cast("sitofp", k.load(ints + (first + r) * LINE, INTS), FLOATS)
                scale = scales * words.broadcast(k, row + X_SCALE, TILE)
                total = words.fma(k, product, scale, k.load(own, FLOATS))
                if minimums is not None:
                    total = words.fma(k, minimums, words.broadcast(k, row + X_SUM, TILE), total)
                k.store(own, total)
                ask(k, row + AHEAD)
