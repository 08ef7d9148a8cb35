"""Views: other shapes and windows of the same bytes; they cost nothing.

All but `view` say what they show by index, never by byte, so they can be applied again to a copy
of their source that lies elsewhere or has other strides. Block types keep whole blocks: their
last axis stays last and is cut at block borders only.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from ggraph.dtype import F16, I32, Q8_0, DType
from ggraph.ops.rules import expect, free, integers, rank, rule
from ggraph.strides import contiguous
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register


def _view(
    name: str,
    body: Callable[[Sequence[Tensor], Attrs], Meta],
    reference: Callable[..., Array],
    ggml: str | None,
    examples: tuple[Example, ...],
    doc: str,
) -> OpSpec:
    return register(
        OpSpec(
            name,
            infer=rule(name, "x", body),
            reference=reference,
            ggml=ggml,
            cost=free,
            view_of=0,
            examples=examples,
            doc=doc,
        )
    )


def _reshape_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, shape = sources[0], list(integers(attrs, "shape"))
    free_axes = [i for i, n in enumerate(shape) if n == -1]
    known = prod(n for n in shape if n != -1)
    expect(len(free_axes) <= 1 and min(shape, default=0) >= -1, f"shape {shape} is not a shape")
    if free_axes:
        fits = known > 0 and x.size % known == 0
        expect(fits, f"{x.size} elements do not fill shape {shape}")
        shape[free_axes[0]] = x.size // known
    expect(prod(shape) == x.size, f"{x.size} elements do not fill shape {shape}")
    if x.dtype.is_block and x.size:
        last = shape[-1] if shape else 0
        expect(last % x.dtype.block == 0, f"rows of {last} cut blocks of {x.dtype}")
    strides = contiguous(shape, x.dtype) if x.is_contiguous else _steps(x, shape)
    return Meta(tuple(shape), x.dtype, strides)


def _steps(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of x, which has gaps, in another shape. ShapeError where an axis has no regular step.

    An axis of size 1 that stays keeps what it has: by strides kernels are chosen, and one row of a
    window must have the same as many."""
    steps, found = list(zip(_blocks(x.shape, x.dtype), x.strides, strict=True)), list[int]()
    sizes = _blocks(shape, x.dtype)
    while len(found) < len(sizes):
        old, new = [steps.pop(0)] if steps else [], [sizes[len(found)]]
        while prod(n for n, _ in old) != prod(new):
            if prod(n for n, _ in old) < prod(new):
                old.append(steps.pop(0))
            else:
                new.append(sizes[len(found) + len(new)])
        long = [(n, s) for n, s in old if n != 1] or old[-1:]
        expect(
            all(a == n * b for (_, a), (n, b) in pairwise(long)),
            lambda: (
                f"{x.label} is not contiguous, and {list(x.shape)} as {list(shape)} would take a "
                "copy: use cont first"
            ),
        )
        step = long[-1][1] if long else x.dtype.block_bytes
        found += [step * prod(new[i + 1 :]) for i in range(len(new))]
    return tuple(found)


def _blocks(shape: Sequence[int], dtype: DType) -> list[int]:
    """Sizes, the last in blocks."""
    return [*shape[:-1], *(n // dtype.block for n in shape[-1:])]


def _reshape(x: Array, *, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


RESHAPE = _view(
    "reshape",
    _reshape_rule,
    _reshape,
    "RESHAPE",
    (
        Example((Arg((3, 4)),), {"shape": (2, 6)}),
        Example((Arg((2, 3, 4)),), {"shape": (-1, 4)}),
        Example((Arg((1,)),), {"shape": (1, 1, 1)}),
        Example((Arg((0, 4)),), {"shape": (2, 0, 2)}),
        Example((Arg((2, 64), Q8_0),), {"shape": (4, 32)}),
    ),
    "reshape(x, shape): the same elements in row-major order; one size may be -1.",
)


def _permute_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, axes = sources[0], integers(attrs, "axes")
    n = len(x.shape)
    axes = tuple(a + n if a < 0 else a for a in axes)
    expect(sorted(axes) == list(range(n)), f"axes {axes} are not an order of {n} axes")
    fixed = not x.dtype.is_block or n == 0 or axes[-1] == n - 1
    expect(fixed, f"the last axis of {x.dtype} must stay last, got axes {axes}")
    return Meta(tuple(x.shape[a] for a in axes), x.dtype, tuple(x.strides[a] for a in axes))


def _permute(x: Array, *, axes: tuple[int, ...]) -> Array:
    return x.transpose(axes)


PERMUTE = _view(
    "permute",
    _permute_rule,
    _permute,
    "PERMUTE",
    (
        Example((Arg((2, 3, 4)),), {"axes": (1, 0, 2)}),
        Example((Arg((2, 3, 4), F16),), {"axes": (2, 0, 1)}),
        Example((Arg((2, 3, 4, 5)),), {"axes": (0, -1, 1, 2)}),
        Example((Arg((1, 1)),), {"axes": (1, 0)}),
        Example((Arg((0, 4)),), {"axes": (1, 0)}),
        Example((Arg((3, 2, 32), Q8_0),), {"axes": (1, 0, 2)}),
    ),
    "permute(x, axes): axis i of the result is axis axes[i] of x, as in NumPy's transpose.",
)


def _transpose_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    rank(sources[0], 2)
    n = len(sources[0].shape)
    return _permute_rule(sources, {"axes": (*range(n - 2), n - 1, n - 2)})


def _transpose(x: Array) -> Array:
    return x.swapaxes(-1, -2)


TRANSPOSE = _view(
    "transpose",
    _transpose_rule,
    _transpose,
    "TRANSPOSE",
    (
        Example((Arg((3, 4)),)),
        Example((Arg((2, 3, 4), I32, "ids:9"),)),
        Example((Arg((1, 1)),)),
        Example((Arg((0, 4)),)),
    ),
    "transpose(x): the last two axes exchanged.",
)


def _slice_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, n = sources[0], len(sources[0].shape)
    starts, sizes, steps = (integers(attrs, key, n) for key in ("starts", "sizes", "steps"))
    expect(min(steps, default=1) > 0, f"steps {list(steps)}: expected whole numbers above 0")
    stops = _stops(starts, sizes, steps)
    inside = all(a >= 0 and s >= 0 and b <= m for a, s, b, m in zip(starts, sizes, stops, x.shape))  # noqa: B905
    said = f" by steps {list(steps)}" if any(s != 1 for s in steps) else ""
    expect(inside, f"starts {list(starts)} and sizes {list(sizes)}{said} leave {list(x.shape)}")
    places = list(starts)
    if n and x.dtype.is_block:
        whole = starts[-1] % x.dtype.block == 0 and sizes[-1] % x.dtype.block == 0
        expect(whole, f"columns {starts[-1]} + {sizes[-1]} cut blocks of {x.dtype}")
        expect(steps[-1] == 1, f"columns by steps of {steps[-1]} cut blocks of {x.dtype}")
        places[-1] //= x.dtype.block
    offset = sum(a * s for a, s in zip(places, x.strides, strict=True))
    strides = tuple(a * s for a, s in zip(steps, x.strides, strict=True))
    return Meta(sizes, x.dtype, strides, offset)


def _stops(starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Where each axis ends: behind the last place that is shown."""
    axes = zip(starts, sizes, steps, strict=True)
    return [a + (n - 1) * s + 1 if n else a for a, n, s in axes]


def _slice(
    x: Array, *, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    return x[tuple(map(slice, starts, _stops(starts, sizes, steps), steps))]


def _box(starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int] = ()) -> Attrs:
    """What `slice` is told; by steps of 1 where none are given."""
    by = tuple(steps) or (1,) * len(sizes)
    return {"starts": tuple(starts), "sizes": tuple(sizes), "steps": by}


SLICE = _view(
    "slice",
    _slice_rule,
    _slice,
    "VIEW",
    (
        Example((Arg((4, 5)),), _box((1, 2), (2, 3))),
        Example((Arg((4, 3, 5), F16),), _box((1, 0, 4), (3, 3, 1))),
        Example((Arg((1,)),), _box((0,), (1,))),
        Example((Arg((4, 5)),), _box((4, 0), (0, 5))),
        Example((Arg((3, 96), Q8_0),), _box((1, 32), (2, 64))),
        Example((Arg((4, 7)),), _box((1, 0), (2, 3), (2, 3))),
        Example((Arg((5, 32), Q8_0),), _box((0, 0), (3, 32), (2, 1))),
    ),
    "slice(x, starts, sizes, steps): the box of x that begins at `starts`, every so many places.",
)


def _flat_view_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, shape = sources[0], integers(attrs, "shape")
    steps, start = integers(attrs, "steps", len(shape)), integers(attrs, "start", 1)[0]
    expect(x.is_contiguous, f"{x.label} is not contiguous: use slice, permute or cont")
    expect(not x.dtype.is_block, f"{x.label} is of {x.dtype}: use slice")
    expect(min((*shape, *steps, start), default=0) >= 0, "sizes, steps and start must not be < 0")
    last = start + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    expect(prod(shape) == 0 or last < x.size, f"element {last} is outside {x.label} ({x.size})")
    size = x.dtype.block_bytes
    return Meta(shape, x.dtype, tuple(s * size for s in steps), start * size)


def _flat_view(
    x: Array, *, shape: tuple[int, ...], steps: tuple[int, ...], start: tuple[int, ...]
) -> Array:
    if prod(shape) == 0:
        return np.empty(shape, x.dtype)
    flat = x.reshape(-1)[start[0] :]
    strides = tuple(s * flat.itemsize for s in steps)
    return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)


VIEW = _view(
    "view",
    _flat_view_rule,
    _flat_view,
    "VIEW",
    (
        Example((Arg((4, 6)),), {"shape": (4, 2, 2), "steps": (6, 2, 1), "start": (2,)}),
        Example((Arg((10,), F16),), {"shape": (4, 3), "steps": (2, 1), "start": (1,)}),
        Example((Arg((5, 5)),), {"shape": (5,), "steps": (6,), "start": (0,)}),
        Example((Arg((1,)),), {"shape": (1, 1), "steps": (0, 0), "start": (0,)}),
        Example((Arg((3, 2)),), {"shape": (0, 2), "steps": (2, 1), "start": (6,)}),
    ),
    "view(x, shape, steps, start): element i, j, .. is x.flat[start + i steps[0] + j steps[1] ..].",
)


def reshape(x: Tensor, *shape: int, name: str = "") -> Tensor:
    """View of x's elements in another shape; one size may be -1. ggml: GGML_OP_RESHAPE.

    x: any dtype. Errors: ShapeError when elements or blocks do not fit, or where x has gaps or
    another order and the shape no regular steps: `cont` copies it.
    """
    return apply("reshape", x, name=name, shape=tuple(shape))


def permute(x: Tensor, *axes: int, name: str = "") -> Tensor:
    """View with axis i of the result taken from axis axes[i] of x, as NumPy's transpose.

    ggml: GGML_OP_PERMUTE, which gives the inverse order. Errors: ShapeError.
    """
    return apply("permute", x, name=name, axes=tuple(axes))


def transpose(x: Tensor, *, name: str = "") -> Tensor:
    """View of x [.., m, n] as [.., n, m]. ggml: GGML_OP_TRANSPOSE. Errors: ShapeError."""
    return apply("transpose", x, name=name)


def view(
    x: Tensor,
    shape: Sequence[int],
    steps: Sequence[int] | None = None,
    start: int = 0,
    *,
    name: str = "",
) -> Tensor:
    """Any regular window on contiguous x: steps and start in elements. ggml: GGML_OP_VIEW.

    steps default to row-major order without gaps. Errors: ShapeError for windows that leave x.
    """
    rows = tuple(steps) if steps is not None else _row_major(shape)
    return apply("view", x, name=name, shape=tuple(shape), steps=rows, start=(start,))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def slice_(x: Tensor, starts: Sequence[int], sizes: Sequence[int], *, name: str = "") -> Tensor:
    """View of the box of x with `sizes` that begins at `starts`. ggml: GGML_OP_VIEW.

    x of any dtype and layout; block types are cut at blocks. Errors: ShapeError.
    """
    return apply("slice", x, name=name, **_box(starts, sizes))


def narrow(x: Tensor, axis: int, start: int, count: int, *, name: str = "") -> Tensor:
    """View of `count` places of one axis of x, from `start` on; see `slice`."""
    n = len(x.shape)
    expect(-n <= axis < n, f"narrow: {x.label} {list(x.shape)} has no axis {axis}")
    starts, sizes = [0] * n, list(x.shape)
    starts[axis], sizes[axis] = start, count
    return slice_(x, starts, sizes, name=name)


def rows(x: Tensor, start: int, count: int, *, name: str = "") -> Tensor:
    """View of rows start .. start + count of x's first axis; see `slice`."""
    return narrow(x, 0, start, count, name=name)


def columns(x: Tensor, start: int, count: int, *, name: str = "") -> Tensor:
    """View of columns start .. start + count of x's last axis; see `slice`."""
    return narrow(x, -1, start, count, name=name)
