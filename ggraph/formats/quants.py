"""The meaning of a block's bytes: dequantise, in chunks (`quantise` is the way back).

Legend: N blocks, rows of uint8 [N, block_bytes] in, float32 [N, block] out. All scales are
little-endian float16. Bit-exact to the `gguf` package, which follows ggml's C code.
Source: the block layouts of ggml (`ggml-common.h`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ggraph.door import checked
from ggraph.dtype import (
    BF16,
    E5M2,
    E8M0,
    F16,
    F32,
    FP8,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    DType,
)  # fmt: skip
from ggraph.errors import FormatError
from ggraph.formats.iquants import (
    read_iq1_m,
    read_iq1_s,
    read_iq2_s,
    read_iq2_xs,
    read_iq2_xxs,
    read_iq3_s,
    read_iq3_xxs,
    read_nvfp4,
    read_q1_0,
)
from ggraph.formats.levels import FP4_VALUES, NL_VALUES
from ggraph.formats.quantise import quantize
from ggraph.formats.ternary import half, read_tq1_0, read_tq2_0

__all__ = ["dequantize", "quantize"]

Array = np.ndarray[Any, Any]
CHUNK = 1 << 14  # blocks that are converted at a time; bounds the temporaries


@checked
def dequantize(raw: Array, dtype: DType) -> Array:
    """Float32 values [..., n] of storage bytes [..., row_bytes]. FormatError for odd lengths."""
    if dtype is F32:
        return np.ascontiguousarray(raw).view("<f4").copy()
    if dtype is F16:
        return np.ascontiguousarray(raw).view("<f2").astype(np.float32)
    if dtype is BF16:
        bits = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if dtype in (*FP8, E8M0):
        values: Array = _eights(dtype)[np.ascontiguousarray(raw).view(np.uint8)]
        return values
    decode = _DECODERS.get(dtype)
    if decode is None:
        raise FormatError(f"{dtype} has no float values; known: {', '.join(map(repr, _DECODERS))}")
    if raw.shape[-1] % dtype.block_bytes:
        raise FormatError(f"{dtype}: {raw.shape[-1]} bytes are not whole blocks")
    shape = (*raw.shape[:-1], raw.shape[-1] // dtype.block_bytes * dtype.block)
    blocks = np.ascontiguousarray(raw).reshape(-1, dtype.block_bytes)
    out = np.empty((len(blocks), dtype.block), np.float32)
    with np.errstate(all="ignore"):  # damaged scales may be infinite; that is the file's value
        for i in range(0, len(blocks), CHUNK):
            out[i : i + CHUNK] = decode(blocks[i : i + CHUNK])
    return out.reshape(shape)


def _eights(dtype: DType) -> Array:
    """The numbers of each code of 8 bits, float32 [256]."""
    codes = np.arange(256, dtype=np.uint32)
    if dtype is E5M2:  # the upper half of a half
        return (codes.astype("<u2") << 8).view("<f2").astype(np.float32)
    if dtype is E8M0:
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    # E4M3 as a half: two bits of exponent more, so that its bias grows from 7 to 15.
    halves = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).astype("<u2").view("<f2")
    values = halves.astype(np.float32) * np.float32(256)
    return np.where((codes & 0x7F) == 0x7F, np.float32(np.nan), values)


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32 [N, 1]."""
    return half(blocks[:, at : at + 2])


def _nibbles(packed: Array) -> Array:
    """[N, k] -> [N, 2k]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """Bit j of the 32-bit word at byte `at`, as 0 or 16: [N, 32]."""
    word = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")  # [N, 1]
    bits = (word >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return (bits << np.uint32(4)).astype(np.uint8)


def _q4_0(b: Array) -> Array:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(b: Array) -> Array:
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Array) -> Array:
    q = (_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(np.int8) - np.int8(16)
    return _half(b, 0) * q.astype(np.float32)


def _q5_1(b: Array) -> Array:
    q = _nibbles(b[:, 8:]) | _fifth_bits(b, 4)
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: Array) -> Array:
    return b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _shifted(packed: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """[N, groups, k] -> [N, groups, shifts, k]: the fields of every byte."""
    steps = np.array(shifts, np.uint8)[None, None, :, None]
    return (packed[:, :, None, :] >> steps) & np.uint8(mask)


def _q2_k(b: Array) -> Array:
    scales, d, dmin = b[:, :16], _half(b, 80), _half(b, 82)
    q = _shifted(b[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    step = (d * (scales & 15).astype(np.float32))[:, :, None]
    least = (dmin * (scales >> 4).astype(np.float32))[:, :, None]
    values: Array = (step * q.astype(np.float32) - least).reshape(-1, 256)
    return values


def _q3_scales(packed: Array) -> Array:
    """12 bytes hold 16 six-bit scales, 32 added: [N, 12] -> int8 [N, 16]."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = _shifted(packed[:, None, 8:], (0, 2, 4, 6), 3).reshape(-1, 16)
    values: Array = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return values


def _q3_k(b: Array) -> Array:
    d = _half(b, 108) * _q3_scales(b[:, 96:108]).astype(np.float32)  # [N, 16]
    low = _shifted(b[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    high = _shifted(b[:, None, :32], tuple(range(8)), 1).reshape(-1, 16, 16) ^ 1
    q = low.astype(np.int8) - (high << 2).astype(np.int8)
    return (d[:, :, None] * q.astype(np.float32)).reshape(-1, 256)


def _k4_scales(packed: Array) -> tuple[Array, Array]:
    """12 bytes hold 8 six-bit scales and 8 six-bit minimums: two uint8 [N, 8]."""
    d, m, dm = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([d & 63, (dm & 15) | ((d >> 2) & 48)], axis=1)
    least = np.concatenate([m & 63, (dm >> 4) | ((m >> 2) & 48)], axis=1)
    return scale, least


def _q4_k(b: Array) -> Array:
    scale, least = _k4_scales(b[:, 4:16])
    q = _shifted(b[:, 16:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    return _k_values(b, scale, least, q)


def _q5_k(b: Array) -> Array:
    scale, least = _k4_scales(b[:, 4:16])
    low = _shifted(b[:, 48:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(b[:, None, 16:48], tuple(range(8)), 1).reshape(-1, 8, 32)
    return _k_values(b, scale, least, low | (high << 4))


def _k_values(b: Array, scale: Array, least: Array, q: Array) -> Array:
    step = (_half(b, 0) * scale.astype(np.float32))[:, :, None]
    floor = (_half(b, 2) * least.astype(np.float32))[:, :, None]
    values: Array = (step * q.astype(np.float32) - floor).reshape(-1, 256)
    return values


def _q6_k(b: Array) -> Array:
    low = _shifted(b[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(b[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    q = (low | (high << 4)).astype(np.int8) - np.int8(32)
    step = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)  # [N, 16]
    values: Array = (step[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)
    return values


def _iq4_nl(b: Array) -> Array:
    return _half(b, 0) * NL_VALUES[_nibbles(b[:, 2:])].astype(np.float32)


def _iq4_xs(b: Array) -> Array:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2")  # [N, 1]
    high = ((high >> (2 * np.arange(8, dtype=np.uint16))) & 3).astype(np.uint8)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scale = (low | (high << 4)).astype(np.int8) - np.int8(32)
    step = (_half(b, 0) * scale.astype(np.float32))[:, :, None]
    packed = b[:, 8:].reshape(-1, 8, 16)
    q = np.concatenate([packed & 15, packed >> 4], axis=2)  # [N, 8, 32]
    values: Array = (step * NL_VALUES[q].astype(np.float32)).reshape(-1, 256)
    return values


def _mxfp4(b: Array) -> Array:
    e = b[:, :1].astype(np.uint32)
    tiny = np.uint32(0x00200000) << e  # halves of 2^-127 and 2^-126 are subnormal
    bits = np.where(e < 2, tiny, (e - np.uint32(1)) << np.uint32(23))
    step = bits.astype(np.uint32).view(np.float32)
    return step * FP4_VALUES[_nibbles(b[:, 1:])].astype(np.float32)


_DECODERS: dict[DType, Callable[[Array], Array]] = {
    Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q8_0: _q8_0, Q2_K: _q2_k, Q3_K: _q3_k,
    Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k, IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs, MXFP4: _mxfp4,
    TQ1_0: read_tq1_0, TQ2_0: read_tq2_0, IQ1_S: read_iq1_s, IQ1_M: read_iq1_m,
    IQ2_XXS: read_iq2_xxs, IQ2_XS: read_iq2_xs, IQ2_S: read_iq2_s, IQ3_XXS: read_iq3_xxs,
    IQ3_S: read_iq3_s, NVFP4: read_nvfp4, Q1_0: read_q1_0,
}  # fmt: skip
