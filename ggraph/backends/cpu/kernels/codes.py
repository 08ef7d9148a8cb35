"""Reads 32 weights of a block of each GGUF type, as codes, scales and minimum.

Layouts of the bytes are those of ggml's `ggml-common.h` (block_q4_0 ... block_mxfp4). Nothing is
rounded: scales stay what the file has, halves, exponents, or integers beside their super-scales.
Blocks that hold indices of a grid are read in `grids.py`.

Legend: `at` address of a block of the file; j which 32 of its weights, 0 where it has no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph import dtype as dt
from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I8, I16, I32, I64, Kernel, Val, vec
from ggraph.dtype import DType
from ggraph.formats.iquants import ue4m3_halves

I8X16, I8X32 = vec(I8, 16), vec(I8, 32)
ALL32 = range(32)
HALF_SIGN = -(1 << 15)  # minimums are taken off a weight


@dataclass
class Codes:
    """32 codes in column order, not negative; one or two scales, and the minimum if one is stored
    apart from them, as bits of halves or integers of 8 bits; the bits of their super-scales."""

    codes: Val
    scales: list[Val]
    minimum: Val | None = None
    supers: Sequence[Val] = ()


Reader = Callable[[Kernel, Val, int], Codes]


def half(k: Kernel, address: Val) -> Val:
    """The bits of a float16."""
    return k.load(address, I16)


def _nibbles32(k: Kernel, address: Val) -> Val:
    """16 bytes as 32 codes: all low nibbles, then all high ones."""
    packed = k.load(address, I8X16)
    return k.shuffle(words.low_nibbles(packed), words.high_nibbles(k, packed), ALL32)


def bits32(k: Kernel, word: Val) -> Val:
    """Bit i of a word of 32 as 0 or 1 in lane i."""
    bits = [1 << i if i < 31 else -(1 << 31) for i in ALL32]
    return k.cast("zext", (k.splat(word, 32) & k.consts(bits, I32)).ne(0), I8X32)


def _fifth_bits32(k: Kernel, address: Val) -> Val:
    return bits32(k, k.load(address, I32)) * 16


def _q4_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 2), [half(k, at)])


def _q4_1(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 4), [half(k, at)], half(k, at + 2))


def _q5_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 6) | _fifth_bits32(k, at + 2), [half(k, at)])


def _q5_1(k: Kernel, at: Val, j: int) -> Codes:
    codes = _nibbles32(k, at + 8) | _fifth_bits32(k, at + 4)
    return Codes(codes, [half(k, at)], half(k, at + 2))


def _q8_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(k.load(at + 2, I8X32) ^ words.SIGN, [half(k, at)])


def _k4_scales(k: Kernel, at: Val, j: int) -> tuple[Val, Val]:
    """The 6-bit scale and minimum of block j out of 12 bytes (`get_scale_min_k4`)."""
    first, second = k.load(at + j, I8), k.load(at + j + 4, I8)
    if j < 4:
        return first & 63, second & 63
    before = k.load(at + j - 4, I8)
    return (second & 15) | ((before >> 6) << 4), (second >> 4) | ((first >> 6) << 4)


def _k4_block(k: Kernel, at: Val, j: int, codes: Val) -> Codes:
    scale, minimum = _k4_scales(k, at + 4, j)
    return Codes(codes, [scale], minimum, [half(k, at), half(k, at + 2) ^ HALF_SIGN])


def _bits_at(k: Kernel, at: Val, start: int, to: int, bits: int) -> Val:
    """`bits` bits of each of 32 bytes from bit `start` on, moved to bit `to`."""
    return words.field(k, k.load(at, I8X32), start, to, bits)


def _q4_k(k: Kernel, at: Val, j: int) -> Codes:
    return _k4_block(k, at, j, _bits_at(k, at + 16 + j // 2 * 32, j % 2 * 4, 0, 4))


def _q5_k(k: Kernel, at: Val, j: int) -> Codes:
    low = _bits_at(k, at + 48 + j // 2 * 32, j % 2 * 4, 0, 4)
    return _k4_block(k, at, j, low | _bits_at(k, at + 16, j, 4, 1))


def _q6_k(k: Kernel, at: Val, j: int) -> Codes:
    upper, part = j // 4, j % 4
    low = _bits_at(k, at + upper * 64 + part % 2 * 32, part // 2 * 4, 0, 4)
    codes = low | _bits_at(k, at + 128 + upper * 32, part * 2, 4, 2)
    scales = [k.load(at + 192 + j * 2 + s, I8) for s in (0, 1)]
    return Codes(codes, scales, supers=[half(k, at + 208)])


def _q3_scale(k: Kernel, at: Val, i: int) -> Val:
    """The i-th of 16 signed 6-bit scales out of 12 bytes."""
    low = (k.load(at + i % 8, I8) >> (i // 8 * 4)) & 15
    high = (k.load(at + 8 + i % 4, I8) >> (i // 4 * 2)) & 3
    return (low | (high << 4)) - 32


def _q3_k(k: Kernel, at: Val, j: int) -> Codes:
    low = _bits_at(k, at + 32 + j // 4 * 32, j % 4 * 2, 0, 2)
    scales = [_q3_scale(k, at + 96, j * 2 + s) for s in (0, 1)]
    return Codes(low | _bits_at(k, at, j, 2, 1), scales, supers=[half(k, at + 108)])


def _iq4_xs(k: Kernel, at: Val, j: int) -> Codes:
    low = (k.load(at + 4 + j // 2, I8) >> (j % 2 * 4)) & 15
    high = (k.load(at + 2 + j // 4, I8) >> (j % 4 * 2)) & 3
    scale = (low | (high << 4)) - 32
    return Codes(_nibbles32(k, at + 8 + j * 16), [scale], supers=[half(k, at)])


def _mxfp4(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 1), [k.load(at, I8)])


def _nvfp4(k: Kernel, at: Val, j: int) -> Codes:
    """Of 64: eight bytes of each 16, and a byte for each scale, which is a half, too."""
    packed = k.load(at + (4 + 16 * j), I8X16)
    lanes = [i + j for i in (0, 8) for j in (*range(8), *range(16, 24))]
    codes = k.shuffle(words.low_nibbles(packed), words.high_nibbles(k, packed), lanes)
    halves = words.table(k, "halves_of_ue4m3", ue4m3_halves().tobytes())
    scales = [k.load(at + (2 * j + s), I8) for s in (0, 1)]
    return Codes(codes, [k.load(halves + k.cast("zext", s, I64) * 2, I16) for s in scales])


def _q1_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(bits32(k, k.load(at + (2 + 4 * j), I32)), [half(k, at)])


def _q2_k(k: Kernel, at: Val, j: int) -> Codes:
    scales = [k.load(at + (2 * j + s), I8) for s in (0, 1)]
    codes = _bits_at(k, at + 16 + j // 4 * 32, j % 4 * 2, 0, 2)
    return Codes(codes, scales, supers=[half(k, at + 80), half(k, at + 82) ^ HALF_SIGN])


def _trits(k: Kernel, stored: Val, digit: int) -> Val:
    """A digit of bytes that are fractions in base 3."""
    rest = k.cast("zext", stored * 3**digit, vec(I16, stored.v.type.count)) * 3
    return k.cast("trunc", Val(k, k.b.lshr(rest.v, k.const(8, rest.v.type).v)), stored.v.type)


def _last_trits(k: Kernel, at: Val) -> Val:
    """Four digits of four bytes."""
    four = [_trits(k, k.load(at, vec(I8, 4)), digit) for digit in range(4)]
    two = [k.shuffle(a, b, range(8)) for a, b in (four[:2], four[2:])]
    return k.shuffle(two[0], two[1], range(16))


def _tq1_0(k: Kernel, at: Val, j: int) -> Codes:
    """32 bytes of five digits, then 16 of five, then four of four: the digits of equal place of
    bytes beside each other are values beside each other."""
    if j < 5:
        codes = _trits(k, k.load(at, I8X32), j)
    else:
        sixteen, digit = k.load(at + 32, I8X16), 2 * (j - 5)
        upper = _last_trits(k, at + 48) if j == 7 else _trits(k, sixteen, digit + 1)
        codes = k.shuffle(_trits(k, sixteen, digit), upper, ALL32)
    return Codes(codes, [k.const(1, I8)], supers=[half(k, at + 52)])


def _tq2_0(k: Kernel, at: Val, j: int) -> Codes:
    codes = _bits_at(k, at + j // 4 * 32, j % 4 * 2, 0, 2)
    return Codes(codes, [k.const(1, I8)], supers=[half(k, at + 64)])


READERS: dict[DType, Reader] = {
    dt.Q4_0: _q4_0, dt.Q4_1: _q4_1, dt.Q5_0: _q5_0, dt.Q5_1: _q5_1, dt.Q8_0: _q8_0,
    dt.Q3_K: _q3_k, dt.Q4_K: _q4_k, dt.Q5_K: _q5_k, dt.Q6_K: _q6_k,
    dt.IQ4_NL: _q4_0, dt.IQ4_XS: _iq4_xs, dt.MXFP4: _mxfp4, dt.NVFP4: _nvfp4,
    dt.Q1_0: _q1_0, dt.Q2_K: _q2_k, dt.TQ1_0: _tq1_0, dt.TQ2_0: _tq2_0,
}  # fmt: skip
