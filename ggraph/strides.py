"""Strides in bytes, and the bytes that they show."""

from collections.abc import Sequence
from math import prod

from ggraph.dtype import DType
from ggraph.errors import ShapeError

MAX_BYTES = 1 << 62  # sizes beyond this are refused instead of overflowing somewhere later


def contiguous(shape: Sequence[int], dtype: DType) -> tuple[int, ...]:
    """Row-major strides in bytes; the last is one element or one block."""
    if not shape:
        return ()
    if min(shape) < 0:
        raise ShapeError(f"negative size in shape {tuple(shape)}")
    strides, step = [dtype.block_bytes], dtype.row_bytes(shape[-1])
    for n in shape[-2::-1]:
        strides.append(step)
        step *= n
    if step > MAX_BYTES:
        raise ShapeError(f"{dtype}{list(shape)} needs more than {MAX_BYTES} bytes")
    return tuple(strides[::-1])


def runs(
    shape: Sequence[int], strides: Sequence[int], dtype: DType, offset: int, limit: int
) -> tuple[tuple[int, int], ...] | None:
    """The half-open byte ranges of what begins at `offset`, merged and in order; None where there
    are more than `limit` before those that touch are merged."""
    counts = (*shape[:-1], shape[-1] // dtype.block) if shape else ()
    axes = sorted((s, n) for n, s in zip(counts, strides, strict=True) if n > 1)
    length = dtype.block_bytes
    rest: list[tuple[int, int]] = []
    for stride, n in axes:
        if stride <= length:  # and so were all that are smaller
            length += stride * (n - 1)
        else:
            rest.append((stride, n))
    if prod(n for _, n in rest) > limit:
        return None
    starts = [offset]
    for stride, n in rest:
        starts = [s + i * stride for s in starts for i in range(n)]
    return _merged(sorted((s, s + length) for s in starts))


def _merged(found: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    out = [found[0]]
    for start, stop in found[1:]:
        if start <= out[-1][1]:
            out[-1] = (out[-1][0], stop)  # all are of one length
        else:
            out.append((start, stop))
    return tuple(out)
