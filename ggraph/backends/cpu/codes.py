"""Reads one block of 32 weights of each GGUF type, as codes, scales and minimum.

Layouts of the bytes are those of ggml's `ggml-common.h` (block_q4_0 ... block_mxfp4). Nothing is
rounded: scales stay what the file has, halves, exponents, or integers beside their super-scales.

Legend: j number of a block of 32 inside a super-block of 256; d, dmin super-scales.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph import dtype as dt
from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import I8, I16, I32, I64, Kernel, Val, vec
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


Reader = Callable[[Kernel, Val, Val], Codes]


def _half(k: Kernel, address: Val) -> Val:
    return k.load(address, I16)


def _byte(k: Kernel, address: Val) -> Val:
    return k.cast("zext", k.load(address, I8), I64)


def _small(k: Kernel, value: Val) -> Val:
    return k.cast("trunc", value, I8)


def _nibbles32(k: Kernel, address: Val) -> Val:
    """16 bytes as 32 codes: all low nibbles, then all high ones."""
    packed = k.load(address, I8X16)
    return k.shuffle(words.low_nibbles(packed), words.high_nibbles(k, packed), ALL32)


def _bits32(k: Kernel, address: Val, value: int) -> Val:
    """Bit i of the 32-bit word becomes `value` in lane i."""
    word = k.splat(k.load(address, I32), 32)
    bits = [1 << i if i < 31 else -(1 << 31) for i in ALL32]
    return k.cast("zext", (word & k.consts(bits, I32)).ne(0), I8X32) * value


def _q4_0(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 18
    return Codes(_nibbles32(k, at + 2), [_half(k, at)])


def _q4_1(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 20
    return Codes(_nibbles32(k, at + 4), [_half(k, at)], _half(k, at + 2))


def _q5_0(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 22
    return Codes(_nibbles32(k, at + 6) | _bits32(k, at + 2, 16), [_half(k, at)])


def _q5_1(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 24
    codes = _nibbles32(k, at + 8) | _bits32(k, at + 4, 16)
    return Codes(codes, [_half(k, at)], _half(k, at + 2))


def _q8_0(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 34
    return Codes(k.load(at + 2, I8X32) ^ words.SIGN, [_half(k, at)])


def _k4_scales(k: Kernel, at: Val, j: Val) -> tuple[Val, Val]:
    """The 6-bit scale and minimum of block j out of 12 bytes (`get_scale_min_k4`)."""
    q = [_byte(k, at + k.minimum(j + o, 11)) for o in (0, 4)]
    before = _byte(k, at + k.maximum(j - 4, 0))
    first = j < 4
    scale = k.select(first, q[0] & 63, (q[1] & 15) | ((before >> 6) << 4))
    minimum = k.select(first, q[1] & 63, (q[1] >> 4) | ((q[0] >> 6) << 4))
    return _small(k, scale), _small(k, minimum)


def _k4_block(k: Kernel, at: Val, j: Val, codes: Val) -> Codes:
    scale, minimum = _k4_scales(k, at + 4, j)
    return Codes(codes, [scale], minimum, [_half(k, at), _half(k, at + 2) ^ HALF_SIGN])


def _shifted(k: Kernel, codes: Val, shift: Val, mask: int) -> Val:
    """Each byte shifted right by `shift`, then masked."""
    wide = k.cast("zext", codes, vec(I16, 32)) >> k.splat(k.cast("trunc", shift, I16), 32)
    return k.cast("trunc", wide & mask, I8X32)


def _q4_k(k: Kernel, row: Val, b: Val) -> Codes:
    at, j = row + (b // 8) * 144, b % 8
    qs = k.load(at + 16 + (j // 2) * 32, I8X32)
    return _k4_block(k, at, j, _shifted(k, qs, (j % 2) * 4, 15))


def _q5_k(k: Kernel, row: Val, b: Val) -> Codes:
    at, j = row + (b // 8) * 176, b % 8
    qs = k.load(at + 48 + (j // 2) * 32, I8X32)
    high = _shifted(k, k.load(at + 16, I8X32), j, 1)
    return _k4_block(k, at, j, _shifted(k, qs, (j % 2) * 4, 15) | (high << 4))


def _q6_k(k: Kernel, row: Val, b: Val) -> Codes:
    at, j = row + (b // 8) * 210, b % 8
    half, part = j // 4, j % 4
    low = k.load(at + half * 64 + (part % 2) * 32, I8X32)
    high = k.load(at + 128 + half * 32, I8X32)
    codes = _shifted(k, low, (part // 2) * 4, 15) | (_shifted(k, high, part * 2, 3) << 4)
    scales = [k.load(at + 192 + j * 2 + s, I8) for s in (0, 1)]
    return Codes(codes, scales, supers=[_half(k, at + 208)])


def _q3_scale(k: Kernel, at: Val, i: Val) -> Val:
    """The i-th of 16 signed 6-bit scales out of 12 bytes."""
    low = (_byte(k, at + i % 8) >> ((i // 8) * 4)) & 15
    high = (_byte(k, at + 8 + i % 4) >> ((i // 4) * 2)) & 3
    return _small(k, (low | (high << 4)) - 32)


def _q3_k(k: Kernel, row: Val, b: Val) -> Codes:
    at, j = row + (b // 8) * 110, b % 8
    low = _shifted(k, k.load(at + 32 + (j // 4) * 32, I8X32), (j % 4) * 2, 3)
    high = _shifted(k, k.load(at, I8X32), j, 1)
    scales = [_q3_scale(k, at + 96, j * 2 + s) for s in (0, 1)]
    return Codes(low | (high << 2), scales, supers=[_half(k, at + 108)])


def _iq4_xs(k: Kernel, row: Val, b: Val) -> Codes:
    at, j = row + (b // 8) * 136, b % 8
    low = (_byte(k, at + 4 + j // 2) >> ((j % 2) * 4)) & 15
    high = (_byte(k, at + 2 + j // 4) >> ((j % 4) * 2)) & 3
    scale = _small(k, (low | (high << 4)) - 32)
    return Codes(_nibbles32(k, at + 8 + j * 16), [scale], supers=[_half(k, at)])


def _mxfp4(k: Kernel, row: Val, b: Val) -> Codes:
    at = row + b * 17
    return Codes(_nibbles32(k, at + 1), [k.load(at, I8)])


READERS: dict[DType, Reader] = {
    dt.Q4_0: _q4_0, dt.Q4_1: _q4_1, dt.Q5_0: _q5_0, dt.Q5_1: _q5_1, dt.Q8_0: _q8_0,
    dt.Q3_K: _q3_k, dt.Q4_K: _q4_k, dt.Q5_K: _q5_k, dt.Q6_K: _q6_k,
    dt.IQ4_NL: _q4_0, dt.IQ4_XS: _iq4_xs, dt.MXFP4: _mxfp4,
}  # fmt: skip
