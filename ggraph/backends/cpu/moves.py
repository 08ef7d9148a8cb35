"""Lowerings of what only moves numbers."""

from math import prod

from ggraph.backends.cpu.lowering import Lowering
from ggraph.backends.cpu.needs import is_rows
from ggraph.backends.protocol import Launch
from ggraph.dtype import F32
from ggraph.tensor import Tensor


def row_step(t: Tensor) -> int | None:
    """Bytes from row to row where a float32 tensor's rows have no gaps and one distance."""
    if t.dtype is not F32 or len(t.shape) < 2 or t.strides[-1] != 4:
        return None
    counts, steps = t.shape[:-1], t.strides[:-1]
    even = all(
        n == 1 or a == b * m
        for n, a, b, m in zip(counts, steps, steps[1:], counts[1:], strict=False)
    )
    return steps[-1] if even else None


def copy(low: Lowering, x: Launch) -> bool:
    """Contiguous numbers of any type whose bytes are whole words, as words; or rows of float32."""
    a, y = x.sources[0].tensor, x.result.tensor
    if not y.is_contiguous:
        return False
    source, target, step = low.at(x.sources[0]), low.at(x.result), row_step(a)
    if a.is_contiguous and a.nbytes % 4 == 0:
        low.add("copy", x=source, y=target, m=1, n=a.nbytes // 4, xs=0, ys=0)
    elif step is not None:
        n = a.shape[-1]
        low.add("copy", x=source, y=target, m=prod(a.shape[:-1]), n=n, xs=step, ys=n * 4)
    else:
        return False
    return True


def concat(low: Lowering, x: Launch) -> bool:
    """Float rows side by side: one strided copy per source."""
    y = x.result.tensor
    axis = x.result.tensor.attrs["axis"]
    last = len(y.shape) - 1
    if axis not in (-1, last) or not all(is_rows(s.tensor) for s in x.sources):
        return False
    start, width = low.at(x.result), y.shape[-1]
    for s in x.sources:
        n = s.tensor.shape[-1]
        low.add("copy", x=low.at(s), y=start, m=s.tensor.size // n, n=n, xs=n * 4, ys=width * 4)
        start += n * 4
    return True


def repeat(low: Lowering, x: Launch) -> bool:
    """Rows [T, 1, n] as [T, H, n]."""
    a, y = x.sources[0].tensor, x.result.tensor
    if not is_rows(a) or len(a.shape) != 3 or a.shape != (y.shape[0], 1, y.shape[2]):
        return False
    low.add(
        "repeat_rows", x=low.at(x.sources[0]), y=low.at(x.result), m=y.shape[0] * y.shape[1],
        n=y.shape[2], times=y.shape[1],
    )  # fmt: skip
    return True
