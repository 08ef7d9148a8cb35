"""Codes, zeros and scales to one tensor: what all families share.

Legend: n rows and k columns of a weight, [.., n, k], in G groups of columns. A value is
scale * (code - zero).

What a weight is made of is checked at once; its rows are made when they are read (`LazyArray`).

A weight becomes the smallest type that loses no more than rounding to half precision does, and half
precision where there is none. Codes of 4 bits are Q4_0's where zero is 8, and Q4_1's elsewhere;
codes of 8 bits are Q8_0's where zero is 128: blocks of 32 hold the codes as they are, and the scale
in half precision. Codes of FP8 fit no type of blocks: 4 bits of precision and 4 of exponent. Those
of FP4 are NVFP4's and MXFP4's, with the scales that they have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from ggraph.dtype import BF16, F16, FP8, I32, Q4_0, Q4_1, Q8_0, DType
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import Array, LazyArray, Read, Storage, rows_of, windows_of
from ggraph.formats.quants import dequantize, quantize

Told = Mapping[str, Any]
LEAST, MOST = 2.0**-14, 65504.0  # between them half precision has all of its bits
BLOCK = 32  # columns of a block of Q4_0, Q4_1 and Q8_0


@dataclass(frozen=True)
class Family:
    """How one method stores weights.

    `ends` are what follows a weight's name in those of its parts, longer ones first; the rest of
    the name is what `weight` gets, with the parts by their ends ("" for the name itself). Tensors
    whose names end in `unused` are about activations or caches, which are not computed in codes.
    `plain` is the end under which a weight that is not coded stands alone.
    """

    ends: tuple[str, ...]
    weight: Callable[[str, Mapping[str, RawTensor]], RawTensor]
    unused: tuple[str, ...] = ()
    plain: str = ""


def part(name: str, parts: Mapping[str, RawTensor], end: str) -> RawTensor:
    """A part that must be there. FormatError."""
    if end not in parts:
        there = ", ".join(f"{name}{e}" for e in parts)
        raise FormatError(f"{name + end!r} is missing beside {there}")
    return parts[end]


def shaped(t: RawTensor, *shapes: tuple[int, ...]) -> RawTensor:
    """The tensor, if it has one of these shapes. FormatError."""
    if t.shape not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise FormatError(f"{t.name!r}: expected shape {wanted}, got {t.dtype}{list(t.shape)}")
    return t


def numbers(t: RawTensor) -> Array:
    """Scales as float32. FormatError where one is none, or not finite."""
    if not t.dtype.is_float or t.dtype.is_block:
        raise FormatError(f"{t.name!r}: expected scales, got {t.dtype}{list(t.shape)}")
    values = t.float32()
    if not np.isfinite(values).all():
        raise FormatError(f"{t.name!r}: a scale is not a finite number")
    return values


def numbers_by_row(t: RawTensor, *, turned: bool = False) -> LazyArray:
    """Scales [n, G], stored as [G, n] where they are turned, checked here and read with the rows: a
    copy in float32 would take a sixteenth of codes of 4 bits in groups of 128. FormatError."""
    numbers(t)
    held = t.data.T if turned else t.data

    def read(i: int, j: int) -> Array:
        own = np.ascontiguousarray(held[i:j])
        return RawTensor(t.name, t.dtype, own.shape, own).float32()

    return LazyArray(held.shape, np.dtype(np.float32), read, (t.data,))


def count(told: Told, key: str, known: tuple[int, ...] = (), *, default: object = None) -> int:
    """An integer of the config, one of `known` where there are such. FormatError."""
    value = told.get(key, default)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (known and value not in known) or not -1 <= value < 1 << 31:
        wanted = " or ".join(map(str, known)) or "a count"
        raise FormatError(f"{key} is {shown(value)}: expected {wanted}")
    return int(value)


def words(t: RawTensor) -> Array:
    """Packed words, int32 [r, c]. FormatError."""
    if t.dtype is not I32 or len(t.shape) != 2:
        raise FormatError(f"{t.name!r}: expected a matrix of i32, got {t.dtype}{list(t.shape)}")
    return t.data


def coded(shape: tuple[int, int], read: Read, *windows: Array) -> LazyArray:
    """Codes [n, k] that are made of these windows."""
    return LazyArray(shape, np.dtype(np.uint8), read, windows)


def fields(packed: Array, bits: int, *, down: bool = False, order: Sequence[int] = ()) -> Array:
    """The p fields of words [r, c], lowest first or in this order: uint8 [r, c * p], one behind the
    other, or [r * p, c], one below the other."""
    (r, c), p = packed.shape, 32 // bits
    each = np.ascontiguousarray(packed).view(np.uint8).reshape(r, c, 4)  # little-endian
    out = np.empty((r, p, c) if down else (r, c, p), np.uint8)
    for i, field in enumerate(order or range(p)):
        to, byte, shift = out[:, i] if down else out[..., i], *divmod(field * bits, 8)
        np.right_shift(each[..., byte], shift, out=to)
        if bits < 8:
            to &= (1 << bits) - 1
    return out.reshape((r * p, c) if down else (r, c * p))


def unscaled(t: RawTensor) -> RawTensor:
    """A tensor of FP8 without scales in half precision, which holds each of its numbers."""
    if t.dtype not in FP8:
        return t
    table, flat = _table(t.dtype).astype(np.float16), t.data.reshape(-1, *t.shape[-1:])
    if len(t.shape) < 2:
        return RawTensor(t.name, F16, t.shape, table[t.data])
    held = LazyArray(t.shape, F16.np, lambda i, j: table[flat[i:j]], (flat,))
    return RawTensor(t.name, F16, t.shape, held)


def scaled(name: str, codes: Array, table: Array, scale: Array, tile: tuple[int, int]) -> RawTensor:
    """Codes uint8 [.., n, k], each a place in `table` [256], times the scale of their tile of so
    many rows and columns, [.., ceil(n / rows), ceil(k / columns)] or without the leading axes.

    Each tile has a table of its own: 256 numbers are rounded, not all of the weight's.
    """
    (*lead, n, k), (rows, columns) = codes.shape, tile
    finite = table[np.isfinite(table)]
    dtype = half_type(float(np.abs(finite).max() * np.abs(scale).max(initial=0.0)))
    grid = np.broadcast_to(scale, (*lead, *scale.shape[-2:])).reshape(-1, scale.shape[-1])
    flat, at, high = codes.reshape(-1, k), np.arange(k) // columns * len(table), ceil(n / rows)

    def read(first: int, stop: int) -> Array:
        out, i = np.empty((stop - first, k), dtype.np), first
        while i < stop:
            e, row = divmod(i, n)
            end = min(i - row + min((row // rows + 1) * rows, n), stop)  # of this row of tiles
            with np.errstate(all="ignore"):  # codes that are no number are the file's values
                each = rounded(grid[e * high + row // rows, :, None] * table, dtype).reshape(-1)
            np.take(each, flat[i:end] + at, out=out[i - first : end - first], mode="clip")
            i = end
        return out

    return RawTensor(name, dtype, codes.shape, LazyArray(codes.shape, dtype.np, read, (codes,)))


def half_type(most: float) -> DType:
    """The type for values of at most so much: half precision, or bfloat16 where these are too great
    for it, or all so small that it would lose more."""
    return F16 if most == 0.0 or LEAST <= most <= MOST else BF16


def rounded(values: Array, dtype: DType) -> Array:
    """Float32 values as storage of one of these two types."""
    with np.errstate(all="ignore"):  # as those that are no number
        return values.astype(np.float16) if dtype is F16 else quantize(values, BF16).view(np.uint16)


def halves(
    name: str, shape: tuple[int, ...], most: float, values: Read, *windows: Array
) -> RawTensor:
    """Rows of float32 `values` of at most so much, made of `windows`, in the type for such."""
    dtype = half_type(most)
    held = LazyArray(shape, dtype.np, lambda i, j: rounded(values(i, j), dtype), windows)
    return RawTensor(name, dtype, shape, held)


@dataclass(frozen=True, eq=False)
class Integers:
    """A weight in integers: codes uint8 [n, k] of so many bits, scale float32 [n, G], zero [n, G]
    or None for the middle of the codes; `of` is each column's group [k], None for G of `size`."""

    codes: LazyArray
    bits: int
    scale: Storage
    size: int
    zero: Array | None = None
    of: Array | None = None

    def tensor(self, name: str) -> RawTensor:
        """The weight in the smallest type that is good enough."""
        middle = 1 << (self.bits - 1)
        central = self.zero is None or bool((self.zero == middle).all())
        k, most = self.codes.shape[1], float(np.abs(np.asarray(self.scale)).max(initial=0.0))
        whole = self.of is None and k % BLOCK == 0 and self.size % BLOCK == 0
        fits = most == 0.0 or LEAST <= most <= MOST / (1 << self.bits)
        if whole and fits and self.bits == 4:
            return self._blocks(name, Q4_0 if central else Q4_1)
        if whole and fits and self.bits == 8 and central:
            return self._blocks(name, Q8_0)
        most *= 1 << self.bits
        return halves(name, self.codes.shape, most, self._values, *self._windows())

    def _windows(self) -> tuple[Array, ...]:
        return (*self.codes.windows, *windows_of(self.scale))

    def _columns(self) -> Array:
        k = self.codes.shape[1]
        return np.arange(k) // self.size if self.of is None else self.of

    def _values(self, i: int, j: int) -> Array:
        of, middle = self._columns(), np.float32(1 << (self.bits - 1))
        rows = self.codes.read(i, j).astype(np.float32)
        rows -= middle if self.zero is None else self.zero[i:j, of]
        rows *= rows_of(self.scale)(i, j)[:, of]
        return rows

    def _blocks(self, name: str, dtype: DType) -> RawTensor:
        """Blocks: the scale, the least value for Q4_1, then the codes, j low and j + 16 high."""
        (n, k), of = self.codes.shape, self._columns()[::BLOCK]

        def read(i: int, j: int) -> Array:
            out = np.empty((j - i, k // BLOCK, dtype.block_bytes), np.uint8)
            scale = rows_of(self.scale)(i, j)  # [rows, G]
            out[..., :2] = scale.astype("<f2")[:, of, None].view(np.uint8)
            if dtype is Q4_1:
                least = -scale * (8 if self.zero is None else self.zero[i:j])
                out[..., 2:4] = least.astype("<f2")[:, of, None].view(np.uint8)
            codes = self.codes.read(i, j).reshape(j - i, -1, BLOCK)
            if dtype is Q8_0:
                np.bitwise_xor(codes, 128, out=out[..., 2:])  # from 0..255 to int8
            else:
                eights = np.ascontiguousarray(codes).view("<u8")  # no code's 4 bits leave its byte
                pairs = np.empty((*codes.shape[:2], 2), "<u8")
                for x in (0, 1):  # loops along a row are longer than those along a block
                    np.bitwise_or(eights[..., x], eights[..., 2 + x] << 4, out=pairs[..., x])
                out[..., -16:] = pairs.view(np.uint8)
            return out.reshape(j - i, -1)

        shape = (n, dtype.row_bytes(k))
        held = LazyArray(shape, np.dtype(np.uint8), read, self._windows())
        return RawTensor(name, dtype, (n, k), held)


def groups(told: int, k: int) -> tuple[int, int]:
    """Columns of a group and their number, of `told` columns, -1 for all of them. FormatError."""
    size = k if told == -1 else told
    if size < 1:
        raise FormatError(f"group_size is {told}: expected a count, or -1 for whole rows")
    return size, ceil(k / size)


def _table(dtype: DType) -> Array:
    return dequantize(np.arange(256, dtype=np.uint8), dtype)


def fp8_codes(t: RawTensor) -> tuple[Array, Array]:
    """Codes and their table of a tensor of FP8. FormatError for another type."""
    if t.dtype not in FP8 or len(t.shape) < 2:
        raise FormatError(f"{t.name!r}: expected a matrix of FP8, got {t.dtype}{list(t.shape)}")
    return t.data, _table(t.dtype)
