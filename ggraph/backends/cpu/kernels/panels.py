"""What AMX multiplies: a batch of rows of x, and a tile's codes, as its registers read them.

Integers, as they are stored; but where a block has minimums, or two scales, its codes, of up to 6
bits, become bfloat16, in which they and x's 8 bits are exact; sums of their products stay below
2^24 and so are exact too, and are floats already. Those of other types are sooner converted.

A register's row is a pair of columns, of integers four, of 16 outputs. Pairs are columns 4g and 4g
+ 2 of each group g of a unit, then 4g + 1 and 4g + 3: words of what is stored, low bytes first.

Legend: g number of a group, half 0 or 1: which bytes of words; s first bit of a field.
"""

import struct
from collections.abc import Iterator

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, I8, I16, I32, I64, Kernel, Val, vec
from ggraph.backends.cpu.kernels.blocks import Block
from ggraph.backends.cpu.kernels.tiles import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    TILE,
    X_SCALE,
    Layout,
)

LINE = TILE * 4  # bytes of a register's row
NUMBERS = 8  # bytes of a block's scale and sum
BYTES, WORDS, INTS, FLOATS = vec(I8, LINE), vec(I16, LINE // 2), vec(I32, TILE), vec(F32, TILE)
TABLE = LINE // 2  # words of a vector


def floating(layout: Layout) -> bool:
    """Whether codes become bfloat16."""
    return layout.stored_minimum or layout.subs > 1


def row_bytes(layout: Layout) -> int:
    """Bytes of a row's block."""
    return BLOCK * (1 + floating(layout))


def code_rows(layout: Layout) -> int:
    """Rows of registers that a block's codes fill."""
    return GROUPS * (1 + floating(layout))


def _pairs(layout: Layout) -> Iterator[tuple[int, int]]:
    """The (group, half) of each row of a block's codes, in order."""
    per = GROUPS // layout.subs
    for first in range(0, GROUPS, per):
        for half in (0, 1):
            yield from ((g, half) for g in range(first, first + per))


def store_row(k: Kernel, layout: Layout, block: Val, to: Val, numbers: Val) -> None:
    """A block of a row of x: its codes, and its scale and sum."""
    k.store(numbers, k.load(block + X_SCALE, I64))
    codes = k.load(block, vec(I8, BLOCK))
    if not floating(layout):
        k.store(to, codes)
        return
    first, second = (
        _bits_of(k, k.shuffle(codes, codes, [g * GROUP + half + at for g, half in _pairs(layout)]))
        for at in (0, 2)
    )
    k.store(to, (first >> 16) | (second & -(1 << 16)))


def _bits_of(k: Kernel, codes: Val) -> Val:
    """Bits of integers of 8 bits as float32: the lower half is 0."""
    return k.cast("bitcast", words.floats_of(k, codes), INTS)


def store_codes(k: Kernel, block: Block, to: Val) -> None:
    """A block's codes, without `zero`."""
    a = block.layout
    if not floating(a):
        for g in range(GROUPS):
            k.store(to + g * GROUP_BYTES, block.codes(g, 0) - a.zero)
        return
    tables = _tables(k, a)
    for i, (g, half) in enumerate(_pairs(a)):
        index = k.cast("bitcast", _index(k, block, g, half), WORDS)
        if len(tables) == 1:
            found = k.intrinsic("llvm.x86.avx512.permvar.hi.512", WORDS, tables[0], index)
        else:
            name = "llvm.x86.avx512.vpermi2var.hi.512"
            found = k.intrinsic(name, WORDS, tables[0], index, tables[1])
        k.store(to + i * LINE, found)


def _tables(k: Kernel, layout: Layout) -> list[Val]:
    """Codes as bfloat16, again and again: bits above a code choose the same."""
    count = 1 << sum(layout.planes)
    numbers = (code - layout.zero for code in range(count))
    bits = [struct.unpack("<i", struct.pack("<f", n))[0] >> 16 for n in numbers]
    bits *= max(TABLE // count, 1)
    return [k.consts(bits[i : i + TABLE], I16) for i in range(0, len(bits), TABLE)]


def _index(k: Kernel, block: Block, g: int, half: int) -> Val:
    """Words that begin with the codes of columns 4g + half and 4g + half + 2; what follows them in
    a word is anything."""
    found, low, plane = None, 0, block.codes_at
    for bits in block.layout.planes:
        stored = k.load(plane + g % bits * GROUP_BYTES, BYTES)
        own = _moved(k, stored, g // bits * bits - low + 8 * half)
        if found is not None:
            below = (1 << low) - 1
            wide = [k.cast("bitcast", v, WORDS) for v in (found, own)]
            own = (wide[0] & below) | (wide[1] & ~below)
        found, low, plane = own, low + bits, plane + bits * GROUP_BYTES
    assert found is not None, f"layout {block.layout.name} has no planes"
    return found


def _moved(k: Kernel, stored: Val, s: int) -> Val:
    """Words whose bit 0 was bit s, in one instruction that is no arithmetic to the processor."""
    if s == 0:
        return stored
    starts = [(8 * byte + s) % 64 for byte in range(8)] * 8
    return k.intrinsic("llvm.x86.avx512.pmultishift.qb.512", BYTES, k.consts(starts, I8), stored)
