"""Concatenate, repeat, pad and roll. Plain dtypes of any kind; block types are refused."""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F16, I32
from ggraph.ops.rules import expect, integer, integers, moved, rule
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register


def _plain(t: Tensor) -> None:
    expect(not t.dtype.is_block, f"{t.label} is of {t.dtype}: cast it first")


def _concat_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    first, axis = sources[0], integer(attrs, "axis")
    n = len(first.shape)
    expect(-n <= axis < n, f"axis={axis}: expected {-n} to {n - 1}")
    axis %= n
    for t in sources:
        _plain(t)
        expect(t.dtype is first.dtype, f"{t.label} is {t.dtype}, {first.label} is {first.dtype}")
        rest = len(t.shape) == n and all(
            a == b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if i != axis
        )
        expect(rest, f"{t.label} {list(t.shape)} differs from {list(first.shape)} off axis {axis}")
    shape = list(first.shape)
    shape[axis] = sum(t.shape[axis] for t in sources)
    return Meta(tuple(shape), first.dtype)


def _concat(*parts: Array, axis: int) -> Array:
    return np.concatenate(parts, axis)


CONCAT = register(
    OpSpec(
        "concat",
        infer=rule("concat", "x+", _concat_rule),
        reference=_concat,
        ggml="CONCAT",
        cost=moved,
        examples=(
            Example((Arg((3, 4)), Arg((3, 2))), {"axis": -1}),
            Example((Arg((2, 3, 4), F16), Arg((1, 3, 4), F16)), {"axis": 0}),
            Example((Arg((2, 1, 4)), Arg((2, 3, 4)), Arg((2, 2, 4))), {"axis": 1}),
            Example((Arg((3,), I32, "ids:9"), Arg((1,), I32, "ids:9")), {"axis": 0}),
            Example((Arg((1, 1)),), {"axis": 0}),
            Example((Arg((0, 4)), Arg((2, 4))), {"axis": 0}),
        ),
        doc="concat(tensors, axis): the tensors one after another along an axis.",
    )
)


def _repeat_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, shape = sources[0], integers(attrs, "shape")
    _plain(x)
    expect(len(shape) >= len(x.shape), f"{list(shape)} has fewer axes than {x.label}")
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    fits = all(b >= 0 and (b % a == 0 if a else b == 0) for a, b in pairs)
    expect(fits and min(shape, default=0) >= 0, f"{list(shape)} is no multiple of {list(x.shape)}")
    return Meta(shape, x.dtype)


def _repeat(x: Array, *, shape: tuple[int, ...]) -> Array:
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    times = [b // a if a else 1 for a, b in zip(padded, shape, strict=True)]
    return np.tile(x, times)


REPEAT = register(
    OpSpec(
        "repeat",
        infer=rule("repeat", "x", _repeat_rule),
        reference=_repeat,
        ggml="REPEAT",
        cost=moved,
        examples=(
            Example((Arg((2, 3)),), {"shape": (4, 9)}),
            Example((Arg((3,), F16),), {"shape": (2, 3)}),
            Example((Arg((1, 1)),), {"shape": (2, 3)}),
            Example((Arg((2, 3), I32, "ids:9"),), {"shape": (2, 2, 3)}),
            Example((Arg((2, 3)),), {"shape": (0, 3)}),
        ),
        doc="repeat(x, shape): x laid side by side until it fills `shape`.",
    )
)


def _pad_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, n = sources[0], len(sources[0].shape)
    _plain(x)
    before, after = integers(attrs, "before", n), integers(attrs, "after", n)
    expect(min((*before, *after), default=0) >= 0, f"negative padding {before}, {after}")
    return Meta(tuple(b + m + a for b, m, a in zip(before, x.shape, after, strict=True)), x.dtype)


def _pad(x: Array, *, before: tuple[int, ...], after: tuple[int, ...]) -> Array:
    return np.pad(x, list(zip(before, after, strict=True)))


PAD = register(
    OpSpec(
        "pad",
        infer=rule("pad", "x", _pad_rule),
        reference=_pad,
        ggml="PAD",
        cost=moved,
        examples=(
            Example((Arg((2, 3)),), {"before": (0, 0), "after": (1, 2)}),
            Example((Arg((2, 3), F16),), {"before": (1, 0), "after": (0, 2)}),
            Example((Arg((1,), I32, "ids:9"),), {"before": (2,), "after": (0,)}),
            Example((Arg((0, 3)),), {"before": (1, 0), "after": (1, 0)}),
            Example((Arg((1, 1)),), {"before": (0, 0), "after": (0, 0)}),
        ),
        doc="pad(x, before, after): zeros around x, so many per axis.",
    )
)


def _roll_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    _plain(sources[0])
    integers(attrs, "shifts", len(sources[0].shape))
    return Meta(sources[0].shape, sources[0].dtype)


def _roll(x: Array, *, shifts: tuple[int, ...]) -> Array:
    return np.roll(x, shifts, tuple(range(x.ndim)))


ROLL = register(
    OpSpec(
        "roll",
        infer=rule("roll", "x", _roll_rule),
        reference=_roll,
        ggml="ROLL",
        cost=moved,
        examples=(
            Example((Arg((2, 5)),), {"shifts": (0, 2)}),
            Example((Arg((3, 5), F16),), {"shifts": (-1, 7)}),
            Example((Arg((1,)),), {"shifts": (3,)}),
            Example((Arg((0, 5)),), {"shifts": (1, 1)}),
        ),
        doc="roll(x, shifts): element i moves to i + shift along each axis, around the end.",
    )
)


def concat(tensors: Sequence[Tensor], axis: int = -1, *, name: str = "") -> Tensor:
    """Tensors of one plain dtype, equal in shape but for `axis`, one after another.

    ggml: GGML_OP_CONCAT, for two. Errors: ShapeError.
    """
    return apply("concat", *tensors, name=name, axis=axis)


def repeat(x: Tensor, shape: Sequence[int], *, name: str = "") -> Tensor:
    """x laid side by side until it fills `shape`, whose sizes are multiples of x's.

    x of any plain dtype, which is kept. ggml: GGML_OP_REPEAT. Errors: ShapeError.
    """
    return apply("repeat", x, name=name, shape=tuple(shape))


def pad(
    x: Tensor, after: Sequence[int], before: Sequence[int] | None = None, *, name: str = ""
) -> Tensor:
    """x with `before` and `after` zeros per axis (none before by default); plain dtypes.

    ggml: GGML_OP_PAD (pad_ext). Errors: ShapeError.
    """
    first = tuple(before) if before is not None else (0,) * len(x.shape)
    return apply("pad", x, name=name, before=first, after=tuple(after))


def roll(x: Tensor, shifts: Sequence[int], *, name: str = "") -> Tensor:
    """x with each axis turned by its shift, as NumPy's roll; plain dtypes. ggml: GGML_OP_ROLL."""
    return apply("roll", x, name=name, shifts=tuple(shifts))
