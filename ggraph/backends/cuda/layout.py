"""Tensors as kernels see them: type numbers, four sizes, four byte strides."""

from collections.abc import Sequence
from math import prod

from ggraph.dtype import BF16, F16, F32, I32, I64, DType
from ggraph.tensor import Tensor

PLAIN: dict[DType, int] = {F32: 0, F16: 1, BF16: 2, I32: 3, I64: 4}  # enum Plain of common.cuh
FLOATS = (F32, F16, BF16)
Four = tuple[int, int, int, int]


def is_plain(*tensors: Tensor) -> bool:
    """Whether all are of a plain float type."""
    return all(t.dtype in FLOATS for t in tensors)


def is_flat(*tensors: Tensor, dtype: DType = F32) -> bool:
    """Whether all are of one type and lie without gaps."""
    return all(t.dtype is dtype and t.is_contiguous for t in tensors)


def fits(t: Tensor, axes: int = 4) -> bool:
    """Whether the kernels' four axes are enough."""
    return len(t.shape) <= axes


def has_rows(t: Tensor) -> bool:
    """Whether the elements of each row lie side by side, in at most four leading axes."""
    return 1 <= len(t.shape) <= 5 and (t.shape[-1] == 1 or t.strides[-1] == t.dtype.block_bytes)


def four(values: Sequence[int], fill: int) -> Four:
    """The values behind as many `fill` as are missing."""
    a, b, c, d = (*[fill] * (4 - len(values)), *values)
    return a, b, c, d


def sizes(t: Tensor) -> Four:
    """Four sizes, outermost first."""
    return four(t.shape, 1)


def steps(t: Tensor) -> Four:
    """Four byte strides."""
    return four(t.strides, 0)


def row_sizes(t: Tensor) -> Four:
    """Sizes of all axes but the last."""
    return four(t.shape[:-1], 1)


def row_steps(t: Tensor) -> Four:
    """Byte strides of all axes but the last."""
    return four(t.strides[:-1], 0)


def spread(t: Tensor, over: Tensor) -> Four:
    """Byte strides of `t` as it repeats into the shape of `over`."""
    strides = [0 if n == 1 else s for n, s in zip(t.shape, t.strides, strict=True)]
    return four([0] * (len(over.shape) - len(strides)) + strides, 0)


def row_count(t: Tensor) -> int:
    """Number of rows, all leading axes taken together."""
    return prod(t.shape[:-1])
