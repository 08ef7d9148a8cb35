"""Sums, means and running sums. Sums in float64, as in ggml.

Legend: n row length.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ggraph.dtype import F16, F32
from ggraph.ops.rules import (
    choice,
    expect,
    f32,
    f64,
    integers,
    last_axis,
    like,
    plain_float,
    rank,
    rule,
    same_row,
)
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Rule, Tensor, apply, register


def _total_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    plain_float(sources[0])
    return Meta((1,), F32)


def _row_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    rank(sources[0], 1)
    plain_float(sources[0])
    return Meta((*sources[0].shape[:-1], 1), F32)


def _sum(x: Array) -> Array:
    return f32(f64(x).sum().reshape(1))


def _sum_rows(x: Array) -> Array:
    return f32(f64(x).sum(-1, keepdims=True))


def _mean(x: Array) -> Array:
    return f32(f64(x).sum(-1, keepdims=True) / np.float64(x.shape[-1]))


def _cumsum(x: Array) -> Array:
    return like(f64(x).cumsum(-1), x)


EXAMPLES = (
    Example((Arg((3, 5)),)),
    Example((Arg((2, 3, 67)),)),
    Example((Arg((1, 1)),)),
    Example((Arg((0, 5)),)),
    Example((Arg((3, 5), F16),), tolerance=2e-3),
)
SUM = register(
    OpSpec(
        "sum",
        infer=rule("sum", "x", _total_rule),
        reference=_sum,
        ggml="SUM",
        examples=(*EXAMPLES, Example((Arg(()),))),
        doc="sum(x): the sum of all elements.",
    )
)


def _by_row(
    name: str, body: Rule, reference: Callable[[Array], Array], meaning: str, reduces: bool = True
) -> OpSpec:
    return register(
        OpSpec(
            name,
            reduces=last_axis if reduces else None,
            infer=rule(name, "x", body),
            reference=reference,
            ggml=name.upper(),
            examples=(*EXAMPLES, Example((Arg((7,)),))),
            doc=f"{name}(x): {meaning}.",
        )
    )


SUM_ROWS = _by_row("sum_rows", _row_rule, _sum_rows, "the sum of each row")
MEAN = _by_row("mean", _row_rule, _mean, "the mean of each row; NaN for rows of no element")
CUMSUM = _by_row(
    "cumsum", same_row, _cumsum, "the sum of each row up to and with each element", False
)


KINDS = ("sum", "mean", "max", "min")


def _reduce_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, axes, kind = sources[0], integers(attrs, "axes"), choice(attrs, "kind", KINDS)
    plain_float(x)
    known = all(0 <= a < len(x.shape) for a in axes) and len(set(axes)) == len(axes)
    expect(known, f"axes {list(axes)} are not axes of {list(x.shape)}")
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    some = kind == "sum" or all(x.shape[a] for a in axes)
    expect(some, f"{kind} over no element")
    return Meta(shape, F32)


def _reduce(x: Array, *, kind: str, axes: tuple[int, ...]) -> Array:
    if kind in ("max", "min"):
        values: Array = x.max(axes, keepdims=True) if kind == "max" else x.min(axes, keepdims=True)
        return f32(values)
    wide = f64(x)
    return f32(wide.sum(axes, keepdims=True) if kind == "sum" else wide.mean(axes, keepdims=True))


REDUCE = register(
    OpSpec(
        "reduce",
        reduces=lambda shape, attrs: integers(attrs, "axes"),
        infer=rule("reduce", "x", _reduce_rule),
        reference=_reduce,
        examples=(
            Example((Arg((3, 5)),), {"kind": "sum", "axes": (0,)}),
            Example((Arg((2, 3, 67)),), {"kind": "mean", "axes": (0, 2)}),
            Example((Arg((4, 3, 40)),), {"kind": "max", "axes": (1,)}),
            Example((Arg((7,)),), {"kind": "min", "axes": (0,)}),
            Example((Arg((1, 1)),), {"kind": "sum", "axes": (0, 1)}),
            Example((Arg((0, 5)),), {"kind": "sum", "axes": (0,)}),
            Example((Arg((3, 5), F16),), {"kind": "mean", "axes": (1,)}, tolerance=2e-3),
        ),
        doc="reduce(x, kind, axes): sum, mean, max or min over axes, which stay with size 1.",
    )
)


def reduce(x: Tensor, kind: str, axes: Sequence[int], *, name: str = "") -> Tensor:
    """ "sum", "mean", "max" or "min" of x [...] over `axes`, which stay with size 1 -> f32.

    x: plain float. `x.sum(axis)` and its like drop the axes. ggml has sum_rows and mean, of the
    last axis. Errors: ShapeError for other axes, and for a mean, max or min of nothing.
    """
    n = len(x.shape)
    wanted = tuple(sorted(a + n if a < 0 else a for a in axes))
    return apply("reduce", x, name=name, kind=kind, axes=wanted)


def sum_(x: Tensor, *, name: str = "") -> Tensor:
    """Sum of all elements of x [...], plain float -> f32 [1]. ggml: GGML_OP_SUM."""
    return apply("sum", x, name=name)


def sum_rows(x: Tensor, *, name: str = "") -> Tensor:
    """Sum of each row: x [..., n] plain float -> f32 [..., 1]. ggml: GGML_OP_SUM_ROWS."""
    return apply("sum_rows", x, name=name)


def mean(x: Tensor, *, name: str = "") -> Tensor:
    """Mean of each row: x [..., n] plain float -> f32 [..., 1]. ggml: GGML_OP_MEAN."""
    return apply("mean", x, name=name)


def cumsum(x: Tensor, *, name: str = "") -> Tensor:
    """Running sum along rows of x [..., n], plain float; same shape. ggml: GGML_OP_CUMSUM."""
    return apply("cumsum", x, name=name)
