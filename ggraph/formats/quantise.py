"""Float32 values to blocks.

Legend: N blocks; float32 [N, block] in, uint8 [N, block_bytes] out; d scale, m minimum.

The types with blocks of 32 and the ternary ones round as the `gguf` package does, bit for bit. The
K types and IQ4 are ours: per sub-block a few candidate scales are tried and each is refined by
least squares, then the sub-block scales are rounded and the values fitted again to what will be
read back. Where columns have an importance, squares count by it, and the types of 4 and 5 bits
with blocks of 32 are fitted, too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.door import checked
from ggraph.dtype import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
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
from ggraph.env import thread_count
from ggraph.errors import FormatError
from ggraph.formats.levels import FP4_VALUES, NL_VALUES
from ggraph.formats.ternary import write_tq1_0, write_tq2_0
from ggraph.lazy import lazy

if TYPE_CHECKING:
    from concurrent import futures
else:
    futures = lazy("concurrent.futures")

Array = np.ndarray[Any, Any]
Weights = Array | None  # of a value's squared error; None: all alike
CHUNK = 1 << 16  # values at a time: of half and of eight times as many a K type takes 1.0 and 1.7


@checked
def quantize(values: Array, dtype: DType, importance: Array | None = None) -> Array:
    """Storage bytes uint8 [..., row_bytes] of float32 values [..., n].

    `importance` [..., n], of one row or of each: by how much the square of a column's error counts,
    where the type is fitted; blocks in which nothing counts are taken as if all did. Raises
    FormatError for a type that cannot be written, for rows that are not whole blocks, and for an
    importance of another shape, below 0 or not finite.
    """
    values = np.ascontiguousarray(values, np.float32)
    if dtype in (F32, F16):
        return values.astype(dtype.np).view(np.uint8)
    if dtype is BF16:
        return _bf16(values).view(np.uint8)
    if dtype not in _FITTED and dtype not in _ROUNDED:
        known = ", ".join(t.name for t in WRITABLE)
        raise FormatError(f"{dtype} cannot be written; known: {known}")
    if values.shape[-1] % dtype.block:
        raise FormatError(f"{dtype}: rows of {values.shape[-1]} are not blocks of {dtype.block}")
    blocks = values.reshape(-1, dtype.block)
    weights = None if importance is None else _weights(importance, values.shape, dtype.block)
    out = np.empty((len(blocks), dtype.block_bytes), np.uint8)
    size = CHUNK // dtype.block

    def write(i: int) -> None:
        part = slice(i, i + size)
        own = None if weights is None else weights[part]
        with np.errstate(all="ignore"):
            if dtype in _FITTED and (own is not None or dtype not in _ROUNDED):
                out[part] = _FITTED[dtype](blocks[part], own)
            else:
                out[part] = _ROUNDED[dtype](blocks[part])

    with futures.ThreadPoolExecutor(thread_count()) as pool:  # NumPy's loops hold no lock
        list(pool.map(write, range(0, len(blocks), size)))
    return out.reshape(*values.shape[:-1], dtype.row_bytes(values.shape[-1]))


def _weights(importance: Array, shape: tuple[int, ...], block: int) -> Array:
    """The importance of each value, [N, block]; 1 where a block has none."""
    try:
        every = np.broadcast_to(np.asarray(importance, np.float32), shape).reshape(-1, block)
    except ValueError:
        raise FormatError(f"importance of {np.shape(importance)} for rows {shape}") from None
    if not (np.isfinite(every).all() and (every >= 0).all()):
        raise FormatError("importance: expected finite numbers, none below 0")
    return np.where(every.any(axis=1, keepdims=True), every, np.float32(1))


def _bf16(values: Array) -> Array:
    """Rounded to nearest even; a NaN stays a quiet one."""
    bits = values.view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = np.where(nan, (bits & np.uint32(0xFFFF0000)) | np.uint32(64 << 16), bits)
    rounded = (bits.astype(np.uint64) + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype(np.uint16)


def _inverse(d: Array) -> Array:
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _half(values: Array) -> Array:
    """float32 [N, 1] as the two bytes of a float16."""
    return values.astype(np.float16).view(np.uint8)


def _packed(q: Array) -> Array:
    """[N, 32] values below 16 -> [N, 16]: first half low, second half high."""
    return q[:, :16] & np.uint8(15) | q[:, 16:] << np.uint8(4)


def _fifth(q: Array) -> Array:
    """Bit 4 of 32 values as a little-endian word: [N, 4]."""
    return np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _signed_peak(x: Array) -> Array:
    """The element of largest magnitude of the last axis, with its sign: [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _offset_codes(x: Array, half: int) -> tuple[Array, Array]:
    """Codes 0 .. 2*half-1 around `half`, and the scale."""
    d = _signed_peak(x) / -half
    q = np.trunc(x * _inverse(d) + np.float32(half + 0.5))
    return q.astype(np.uint8).clip(0, 2 * half - 1), d


def _ranged_codes(x: Array, top: int) -> tuple[Array, Array, Array]:
    """Codes 0 .. top from the minimum up, scale and minimum."""
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / top
    q = np.trunc((x - least) * _inverse(d) + np.float32(0.5))
    return q.astype(np.uint8).clip(0, top), d, least


def _q4_0(q: Array, d: Array) -> Array:
    return np.concatenate([_half(d), _packed(q)], axis=1)


def _q5_0(q: Array, d: Array) -> Array:
    return np.concatenate([_half(d), _fifth(q), _packed(q)], axis=1)


def _q4_1(q: Array, d: Array, least: Array) -> Array:
    return np.concatenate([_half(d), _half(least), _packed(q)], axis=1)


def _q5_1(q: Array, d: Array, least: Array) -> Array:
    return np.concatenate([_half(d), _half(least), _fifth(q), _packed(q)], axis=1)


def _q8_0(x: Array) -> Array:
    d = np.abs(x).max(axis=1, keepdims=True) / 127
    scaled = x * _inverse(d)
    size = np.abs(scaled)
    whole = np.floor(size)
    rounded = np.sign(scaled) * (whole + np.floor(2 * (size - whole)))  # halves away from zero
    return np.concatenate([_half(d), rounded.astype(np.int8).view(np.uint8)], axis=1)


def _mxfp4(x: Array) -> Array:
    peak = np.abs(x).max(axis=1, keepdims=True)
    e = np.where(peak > 0, np.floor(np.log2(peak)) - 2 + 127, 0).astype(np.uint8)
    wide = e.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - np.uint32(1)) << 23)
    step = bits.astype(np.uint32).view(np.float32)  # [N, 1]
    levels = step[:, :, None] * FP4_VALUES.astype(np.float32)  # [N, 1, 16]
    q = np.abs(levels - x[:, :, None]).argmin(axis=2).astype(np.uint8)
    return np.concatenate([e, _packed(q)], axis=1)


_REACH = 256  # halves to either side, beyond all levels
_NEAREST = np.searchsorted(
    NL_VALUES[1:].astype(int) + NL_VALUES[:-1], np.arange(-_REACH, _REACH + 1)
).astype(np.uint8)


def _nearest_nl(scaled: Array) -> Array:
    """Index of the nearest of the 16 non-linear levels; what lies between two is at halves."""
    halves = np.ceil(scaled * np.float32(2)).clip(-_REACH, _REACH).astype(np.int16)
    return _NEAREST[halves + _REACH]


def _sum(x: Array, w: Weights) -> Array:
    """Of the last axis, each by its weight: [..., 1]."""
    total: Array = (x if w is None else x * w).sum(-1, keepdims=True)
    return total


def _fit_symmetric(x: Array, half: int, w: Weights) -> Array:
    """Best scale for codes -half .. half-1: [..., 1]; tries scales around the peak's."""
    peak = _signed_peak(x)
    best, best_error = np.zeros_like(peak), np.full_like(peak, np.inf)
    for step in range(-9, 10):
        q = np.rint(x * -(half + 0.1 * step) * _inverse(peak)).clip(-half, half - 1)
        d = _sum(x * q, w) * _inverse(_sum(q * q, w))
        error = _sum((x - d * q) ** 2, w)
        better = error < best_error
        best, best_error = np.where(better, d, best), np.where(better, error, best_error)
    return best


def _fit_ranged(x: Array, top: int, w: Weights) -> tuple[Array, Array]:
    """Best scale and minimum (as a non-negative number to subtract) for codes 0 .. top."""
    least = np.minimum(x.min(axis=-1, keepdims=True), 0)
    reach = x.max(axis=-1, keepdims=True) - least
    best_d, best_m = reach / top, -least
    best_error, ones = np.full_like(reach, np.inf), np.ones_like(x)
    for step in range(-5, 16):
        q = np.rint((x - least) * (top + 0.1 * step) * _inverse(reach)).clip(0, top)
        n, sq, sqq = _sum(ones, w), _sum(q, w), _sum(q * q, w)
        sx, sxq = _sum(x, w), _sum(x * q, w)
        d = (n * sxq - sx * sq) * _inverse(n * sqq - sq * sq)
        m = (d * sq - sx) / n
        d = np.where(m < 0, sxq * _inverse(sqq), d)  # the minimum cannot be positive
        m = np.maximum(m, 0)
        error = _sum((d * q - m - x) ** 2, w)
        better = (error < best_error) & (d > 0)
        best_d, best_m = np.where(better, d, best_d), np.where(better, m, best_m)
        best_error = np.where(better, error, best_error)
    return best_d, best_m


def _fit_levels(x: Array, w: Weights) -> Array:
    """Best scale, as float16 has it, for the non-linear levels: [..., 1]."""
    peak = _signed_peak(x)
    best, best_error = np.zeros_like(peak), np.full_like(peak, np.inf)
    for step in range(-7, 8):
        q = NL_VALUES[_nearest_nl(x * _inverse(peak / (step + NL_VALUES[0])))].astype(np.float32)
        d = _sum(x * q, w) * _inverse(_sum(q * q, w))
        d = d.astype(np.float16).astype(np.float32)
        fitted = NL_VALUES[_nearest_nl(x * _inverse(d))].astype(np.float32)
        error = _sum((x - d * fitted) ** 2, w)
        better = error < best_error
        best, best_error = np.where(better, d, best), np.where(better, error, best_error)
    return best


def _iq4_nl(x: Array, w: Weights) -> Array:
    d = _fit_levels(x, w)
    return np.concatenate([_half(d), _packed(_nearest_nl(x * _inverse(d)))], axis=1)


def _iq4_xs(x: Array, w: Weights) -> Array:
    sub = x.reshape(-1, 8, 32)
    whole, d = _signed_steps(_fit_levels(sub, _parts(w, 8))[:, :, 0], -32)
    q = _packed(_nearest_nl(sub * _inverse((d * whole)[:, :, None])).reshape(-1, 32))
    raised = (whole + 32).astype(np.uint8)  # six bits: 2 bytes of the upper two, 4 of the lower
    upper = (raised >> np.uint8(4)).reshape(-1, 2, 4) << (2 * np.arange(4, dtype=np.uint8))
    low = raised[:, ::2] & np.uint8(15) | raised[:, 1::2] << np.uint8(4)
    parts = (_half(d), np.bitwise_or.reduce(upper, axis=2), low, q.reshape(-1, 128))
    return np.concatenate(parts, axis=1)


def _fitted_0(x: Array, w: Weights, half: int) -> tuple[Array, Array]:
    """Codes 0 .. 2*half-1 around `half` and their scale, as float16 has it."""
    d = _fit_symmetric(x, half, w).astype(np.float16).astype(np.float32)
    return (np.rint(x * _inverse(d)).clip(-half, half - 1) + half).astype(np.uint8), d


def _fitted_1(x: Array, w: Weights, top: int) -> tuple[Array, Array, Array]:
    """Codes 0 .. top from the minimum up, their scale and minimum, as float16 has them."""
    d, m = (v.astype(np.float16).astype(np.float32) for v in _fit_ranged(x, top, w))
    return np.rint((x + m) * _inverse(d)).clip(0, top).astype(np.uint8), d, -m


def _in_steps(values: Array, top: int) -> tuple[Array, Array]:
    """[N, subs, 1] -> codes 0 .. top as uint8 [N, subs], and the float16 scale [N, 1]."""
    d = (values[:, :, 0].max(axis=1, keepdims=True) / top).astype(np.float16).astype(np.float32)
    return np.rint(values[:, :, 0] * _inverse(d)).clip(0, top).astype(np.uint8), d


def _k_scales(scale: Array, least: Array) -> Array:
    """8 scales and 8 minimums of six bits each in 12 bytes."""
    low = scale[:, :4] | (scale[:, 4:] & 48) << 2
    middle = least[:, :4] | (least[:, 4:] & 48) << 2
    high = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return np.concatenate([low, middle, high], axis=1)


def _parts(w: Weights, count: int) -> Weights:
    """Weights of blocks by their parts: [N, count, ..]."""
    return None if w is None else w.reshape(len(w), count, -1)


def _floored(sub: Array, w: Weights, top: int, most: int) -> tuple[Array, Array, Array, Array]:
    """Codes 0 .. top, uint8 [N, subs, ..], of parts of blocks [N, subs, ..]; their scales and
    minimums 0 .. most, uint8 [N, subs]; the bytes of what those count in."""
    (sc, d), (mc, dmin) = (
        _in_steps(v, most) for v in _fit_ranged(sub, top, _parts(w, sub.shape[1]))
    )
    step = (d * sc.astype(np.float32))[:, :, None]
    floor = (dmin * mc.astype(np.float32))[:, :, None]
    q = np.rint((sub + floor) * _inverse(step)).clip(0, top).astype(np.uint8)
    return q, sc, mc, np.concatenate([_half(d), _half(dmin)], axis=1)


def _quarters(q: Array) -> Array:
    """[N, 256] codes of two bits -> [N, 64]: of each half four values that are 32 apart share a
    byte."""
    four = q.reshape(-1, 2, 4, 32) << (2 * np.arange(4, dtype=np.uint8))[:, None]
    packed: Array = np.bitwise_or.reduce(four, axis=2)
    return packed.reshape(-1, 64)


def _q2_k(x: Array, w: Weights) -> Array:
    q, scale, least, units = _floored(x.reshape(-1, 16, 16), w, 3, 15)
    return np.concatenate([scale | least << np.uint8(4), _quarters(q), units], axis=1)


def _signed_steps(scale: Array, least: int) -> tuple[Array, Array]:
    """[N, subs] -> integers from `least` to -least - 1, float32, and the float16 scale [N, 1]."""
    d = (_signed_peak(scale) / least).astype(np.float16).astype(np.float32)
    return np.rint(scale * _inverse(d)).clip(least, -least - 1), d


def _q3_k(x: Array, w: Weights) -> Array:
    sub = x.reshape(-1, 16, 16)
    whole, d = _signed_steps(_fit_symmetric(sub, 4, _parts(w, 16))[:, :, 0], -32)
    step = (d * whole)[:, :, None]
    q = (np.rint(sub * _inverse(step)).clip(-4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    raised = (whole + 32).astype(np.uint8)  # six bits: 8 bytes of lower four, 4 of upper two
    low = raised[:, :8] & np.uint8(15) | raised[:, 8:] << np.uint8(4)
    upper = (raised >> np.uint8(4)).reshape(-1, 4, 4) << (2 * np.arange(4, dtype=np.uint8))[:, None]
    third = (q >> np.uint8(2)).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    parts = (np.bitwise_or.reduce(third, axis=1), _quarters(q & np.uint8(3)), low)
    return np.concatenate([*parts, np.bitwise_or.reduce(upper, axis=1), _half(d)], axis=1)


def _pairs(q: Array) -> Array:
    """[N, 8, 32] nibbles -> [N, 128]: sub-blocks 2i and 2i+1 share 32 bytes."""
    four = q.reshape(-1, 4, 2, 32)
    packed: Array = (four[:, :, 0] & np.uint8(15)) | (four[:, :, 1] << np.uint8(4))
    return packed.reshape(-1, 128)


def _q4_k(x: Array, w: Weights) -> Array:
    q, scale, least, units = _floored(x.reshape(-1, 8, 32), w, 15, 63)
    return np.concatenate([units, _k_scales(scale, least), _pairs(q)], axis=1)


def _q5_k(x: Array, w: Weights) -> Array:
    q, scale, least, units = _floored(x.reshape(-1, 8, 32), w, 31, 63)
    bits = ((q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]).sum(1, dtype=np.uint8)
    return np.concatenate([units, _k_scales(scale, least), bits, _pairs(q & np.uint8(15))], axis=1)


def _q6_k(x: Array, w: Weights) -> Array:
    sub = x.reshape(-1, 16, 16)
    codes, d = _signed_steps(_fit_symmetric(sub, 32, _parts(w, 16))[:, :, 0], -128)  # [N, 16]
    step = (d * codes)[:, :, None]
    q = (np.rint(sub * _inverse(step)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & np.uint8(15), q >> np.uint8(4)  # [N, 2, 4, 32]
    ql = low[:, :, :2].reshape(-1, 2, 64) | low[:, :, 2:].reshape(-1, 2, 64) << np.uint8(4)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    sizes = codes.astype(np.int8).view(np.uint8)
    return np.concatenate([ql.reshape(-1, 128), qh.reshape(-1, 64), sizes, _half(d)], axis=1)


_ROUNDED: dict[DType, Callable[[Array], Array]] = {
    Q4_0: lambda x: _q4_0(*_offset_codes(x, 8)), Q4_1: lambda x: _q4_1(*_ranged_codes(x, 15)),
    Q5_0: lambda x: _q5_0(*_offset_codes(x, 16)), Q5_1: lambda x: _q5_1(*_ranged_codes(x, 31)),
    Q8_0: _q8_0, MXFP4: _mxfp4, TQ1_0: write_tq1_0, TQ2_0: write_tq2_0,
}  # fmt: skip
_FITTED: dict[DType, Callable[[Array, Weights], Array]] = {
    Q4_0: lambda x, w: _q4_0(*_fitted_0(x, w, 8)), Q4_1: lambda x, w: _q4_1(*_fitted_1(x, w, 15)),
    Q5_0: lambda x, w: _q5_0(*_fitted_0(x, w, 16)), Q5_1: lambda x, w: _q5_1(*_fitted_1(x, w, 31)),
    IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs, Q2_K: _q2_k, Q3_K: _q3_k, Q4_K: _q4_k, Q5_K: _q5_k,
    Q6_K: _q6_k,
}  # fmt: skip
WRITABLE: tuple[DType, ...] = (F32, F16, BF16, *(_ROUNDED | _FITTED))
