"""Reads 32 weights of a block of each GGUF type, as codes, scales and minimum.

Layouts of the bytes are those of ggml's `ggml-common.h` (block_q4_0 ... block_mxfp4). Nothing is
rounded: scales stay what the file has, halves, exponents, or integers beside their super-scales.

Legend: `at` address of a block of the file; j which 32 of its weights, 0 where it has no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph import dtype as dt
from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I8, I16, I32, Kernel, Val, vec
from ggraph.dtype import DType

I8X16, I8X32 = vec(I8, 16), vec(I8, 32)
ALL32 = range(32)
HALF_SIGN = -(1 << 15)  # minimums are taken off a weight


@dataclass
class Codes:
    """32 codes in column order, not negative; one or two scales, and the minimum if one is stored,
    as bits of halves or integers of 8 bits; then the bits of their super-scales."""

    codes: Val
    scales: list[Val]
    minimum: Val | None = None
    supers: Sequence[Val] = ()


Reader = Callable[[Kernel, Val, int], Codes]


def _half(k: Kernel, address: Val) -> Val:
    return k.load(address, I16)


def _nibbles32(k: Kernel, address: Val) -> Val:
    """16 bytes as 32 codes: all low nibbles, then all high ones."""
    packed = k.load(address, I8X16)
    return k.shuffle(words.low_nibbles(packed), words.high_nibbles(k, packed), ALL32)


def _fifth_bits32(k: Kernel, address: Val) -> Val:
    """Bit i of the 32-bit word becomes 16 in lane i."""
    word = k.splat(k.load(address, I32), 32)
    bits = [1 << i if i < 31 else -(1 << 31) for i in ALL32]
    return k.cast("zext", (word & k.consts(bits, I32)).ne(0), I8X32) * 16


def _q4_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 2), [_half(k, at)])


def _q4_1(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 4), [_half(k, at)], _half(k, at + 2))


def _q5_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 6) | _fifth_bits32(k, at + 2), [_half(k, at)])


def _q5_1(k: Kernel, at: Val, j: int) -> Codes:
    codes = _nibbles32(k, at + 8) | _fifth_bits32(k, at + 4)
    return Codes(codes, [_half(k, at)], _half(k, at + 2))


def _q8_0(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(k.load(at + 2, I8X32) ^ words.SIGN, [_half(k, at)])


def _k4_scales(k: Kernel, at: Val, j: int) -> tuple[Val, Val]:
    """The 6-bit scale and minimum of block j out of 12 bytes (`get_scale_min_k4`)."""
    first, second = k.load(at + j, I8), k.load(at + j + 4, I8)
    if j < 4:
        return first & 63, second & 63
    before = k.load(at + j - 4, I8)
    return (second & 15) | ((before >> 6) << 4), (second >> 4) | ((first >> 6) << 4)


def _k4_block(k: Kernel, at: Val, j: int, codes: Val) -> Codes:
    scale, minimum = _k4_scales(k, at + 4, j)
    return Codes(codes, [scale], minimum, [_half(k, at), _half(k, at + 2) ^ HALF_SIGN])


def _bits_at(k: Kernel, at: Val, start: int, to: int, bits: int) -> Val:
    """`bits` bits of each of 32 bytes from bit `start` on, moved to bit `to`."""
    return words.field(k, k.load(at, I8X32), start, to, bits)


def _q4_k(k: Kernel, at: Val, j: int) -> Codes:
    return _k4_block(k, at, j, _bits_at(k, at + 16 + j // 2 * 32, j % 2 * 4, 0, 4))


def _q5_k(k: Kernel, at: Val, j: int) -> Codes:
    low = _bits_at(k, at + 48 + j // 2 * 32, j % 2 * 4, 0, 4)
    return _k4_block(k, at, j, low | _bits_at(k, at + 16, j, 4, 1))


def _q6_k(k: Kernel, at: Val, j: int) -> Codes:
    half, part = j // 4, j % 4
    low = _bits_at(k, at + half * 64 + part % 2 * 32, part // 2 * 4, 0, 4)
    codes = low | _bits_at(k, at + 128 + half * 32, part * 2, 4, 2)
    scales = [k.load(at + 192 + j * 2 + s, I8) for s in (0, 1)]
    return Codes(codes, scales, supers=[_half(k, at + 208)])


def _q3_scale(k: Kernel, at: Val, i: int) -> Val:
    """The i-th of 16 signed 6-bit scales out of 12 bytes."""
    low = (k.load(at + i % 8, I8) >> (i // 8 * 4)) & 15
    high = (k.load(at + 8 + i % 4, I8) >> (i // 4 * 2)) & 3
    return (low | (high << 4)) - 32


def _q3_k(k: Kernel, at: Val, j: int) -> Codes:
    low = _bits_at(k, at + 32 + j // 4 * 32, j % 4 * 2, 0, 2)
    scales = [_q3_scale(k, at + 96, j * 2 + s) for s in (0, 1)]
    return Codes(low | _bits_at(k, at, j, 2, 1), scales, supers=[_half(k, at + 108)])


def _iq4_xs(k: Kernel, at: Val, j: int) -> Codes:
    low = (k.load(at + 4 + j // 2, I8) >> (j % 2 * 4)) & 15
    high = (k.load(at + 2 + j // 4, I8) >> (j % 4 * 2)) & 3
    scale = (low | (high << 4)) - 32
    return Codes(_nibbles32(k, at + 8 + j * 16), [scale], supers=[_half(k, at)])


def _mxfp4(k: Kernel, at: Val, j: int) -> Codes:
    return Codes(_nibbles32(k, at + 1), [k.load(at, I8)])


READERS: dict[DType, Reader] = {
    dt.Q4_0: _q4_0, dt.Q4_1: _q4_1, dt.Q5_0: _q5_0, dt.Q5_1: _q5_1, dt.Q8_0: _q8_0,
    dt.Q3_K: _q3_k, dt.Q4_K: _q4_k, dt.Q5_K: _q5_k, dt.Q6_K: _q6_k,
    dt.IQ4_NL: _q4_0, dt.IQ4_XS: _iq4_xs, dt.MXFP4: _mxfp4,
}  # fmt: skip
