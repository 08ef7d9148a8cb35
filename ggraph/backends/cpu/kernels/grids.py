"""Reads 32 weights of a block whose bytes are rows of a grid, as codes and scales.

A code is a number's place among its grid's levels, and above it a bit: its sign, or, of IQ1,
whether it moves down. So codes have three or four bits, which tiles hold as they do other types'.

Legend: `at` address of a block of the file; j which 32 of its weights; an octet is eight of them.
"""

from collections.abc import Sequence

from llvmlite import ir

from ggraph import dtype as dt
from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I8, I16, I32, I64, Kernel, Val, vec
from ggraph.backends.cpu.kernels.codes import I8X32, Codes, Reader, bits32, half
from ggraph.formats import grids
from ggraph.formats.grids import Grid

OCTETS = range(4)


def _word(k: Kernel, address: Val, kind: ir.Type = I8) -> Val:
    """A byte, or two, as int32 without a sign."""
    return k.cast("zext", k.load(address, kind), I32)


def _codes(k: Kernel, grid: Grid, rows: Sequence[Val], upper: Val) -> Val:
    """The places of these rows of a grid, with an upper bit each, which is bit i of a word."""
    places = grids.places(grid)
    table = words.table(k, f"grid_{grids.FILE.index(grid)}", places.tobytes())
    kind = I64 if grid.width == 8 else I32
    found = k.const(0, vec(kind, len(rows)))
    for i, row in enumerate(rows):
        part = k.load(table + k.cast("zext", row, I64) * grid.width, kind)
        found = Val(k, k.b.insert_element(found.v, part.v, I32(i)))
    return k.cast("bitcast", found, I8X32) | (bits32(k, upper) << grid.bits)


def _odd(k: Kernel, scale: Val) -> Val:
    """2 * scale + 1, as a byte."""
    return k.cast("trunc", scale * 2 + 1, I8)


def _octet_signs(k: Kernel, sevens: Sequence[Val]) -> Val:
    """Seven signs of each octet as a word of 32: it has an even number of minuses."""
    word = k.const(0, I32)
    for i, seven in enumerate(sevens):
        odd = k.intrinsic("llvm.ctpop.i32", I32, seven) & 1
        word = word | ((seven | (odd << 7)) << (8 * i))
    return word


def _fields(word: Val) -> tuple[list[Val], Val]:
    """Four times seven signs of a word, and the scale above them."""
    return [(word >> (7 * i)) & 127 for i in OCTETS], (word >> 28) & 15


def _iq2_xxs(k: Kernel, at: Val, j: int) -> Codes:
    here = at + (2 + 8 * j)
    sevens, scale = _fields(k.load(here + 4, I32))
    rows = [_word(k, here + i) for i in OCTETS]
    codes = _codes(k, grids.IQ2_XXS, rows, _octet_signs(k, sevens))
    return Codes(codes, [_odd(k, scale)], supers=[half(k, at)])


def _nibble_scales(k: Kernel, address: Val) -> list[Val]:
    both = _word(k, address)
    return [_odd(k, both & 15), _odd(k, both >> 4)]


def _iq2_xs(k: Kernel, at: Val, j: int) -> Codes:
    both = [_word(k, at + (2 + 8 * j + 2 * i), I16) for i in OCTETS]
    signs = _octet_signs(k, [b >> 9 for b in both])
    codes = _codes(k, grids.IQ2_XS, [b & 511 for b in both], signs)
    return Codes(codes, _nibble_scales(k, at + (66 + j)), supers=[half(k, at)])


def _iq2_s(k: Kernel, at: Val, j: int) -> Codes:
    upper = _word(k, at + (66 + j))
    rows = [_word(k, at + (2 + 4 * j + i)) | (((upper >> (2 * i)) & 3) << 8) for i in OCTETS]
    codes = _codes(k, grids.IQ2_S, rows, k.load(at + (34 + 4 * j), I32))
    return Codes(codes, _nibble_scales(k, at + (74 + j)), supers=[half(k, at)])


def _iq3_xxs(k: Kernel, at: Val, j: int) -> Codes:
    sevens, scale = _fields(k.load(at + (66 + 4 * j), I32))
    rows = [_word(k, at + (2 + 8 * j + i)) for i in range(8)]
    codes = _codes(k, grids.IQ3_XXS, rows, _octet_signs(k, sevens))
    return Codes(codes, [_odd(k, scale)], supers=[half(k, at)])


def _iq3_s(k: Kernel, at: Val, j: int) -> Codes:
    upper = _word(k, at + (66 + j))
    rows = [_word(k, at + (2 + 8 * j + i)) | (((upper >> i) & 1) << 8) for i in range(8)]
    codes = _codes(k, grids.IQ3_S, rows, k.load(at + (74 + 4 * j), I32))
    scale = (_word(k, at + (106 + j // 2)) >> (j % 2 * 4)) & 15
    return Codes(codes, [_odd(k, scale)], supers=[half(k, at)])


def _iq1_s(k: Kernel, at: Val, j: int) -> Codes:
    both = _word(k, at + (34 + 2 * j), I16)
    rows = [_word(k, at + (2 + 4 * j + i)) | (((both >> (3 * i)) & 7) << 8) for i in OCTETS]
    codes = _codes(k, grids.IQ1, rows, -(both >> 15))
    return Codes(codes, [_odd(k, (both >> 12) & 7)], supers=[half(k, at)])


def _iq1_m(k: Kernel, at: Val, j: int) -> Codes:
    fours = [_word(k, at + (32 + 2 * j + i // 2)) >> (i % 2 * 4) for i in OCTETS]
    rows = [_word(k, at + (4 * j + i)) | ((four & 7) << 8) for i, four in enumerate(fours)]
    moves, super_ = k.const(0, I32), k.const(0, I32)
    for i, four in enumerate(fours):
        moves = moves | ((((four >> 3) & 1) * 255) << (8 * i))
        super_ = super_ | ((_word(k, at + (48 + 2 * i), I16) >> 12) << (4 * i))
    own = _word(k, at + (48 + 2 * (j // 2)), I16)
    scales = [_odd(k, (own >> (3 * (2 * (j % 2) + s))) & 7) for s in (0, 1)]
    codes = _codes(k, grids.IQ1, rows, moves)
    return Codes(codes, scales, supers=[k.cast("trunc", super_, I16)])


GRIDDED: dict[dt.DType, Reader] = {
    dt.IQ1_S: _iq1_s, dt.IQ1_M: _iq1_m, dt.IQ2_XXS: _iq2_xxs, dt.IQ2_XS: _iq2_xs,
    dt.IQ2_S: _iq2_s, dt.IQ3_XXS: _iq3_xxs, dt.IQ3_S: _iq3_s,
}  # fmt: skip
