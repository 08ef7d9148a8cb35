"""Values from nothing but attributes, and triangles."""

from collections.abc import Sequence
from math import ceil, isfinite

import numpy as np

from ggraph.dtype import F16, F32, as_dtype, dtype
from ggraph.ops.rules import choice, expect, f32, integers, plain_float, rank, real, rule
from ggraph.tensor import (
    Arg,
    Array,
    Attrs,
    Cost,
    DTypeLike,
    Example,
    Meta,
    OpSpec,
    Tensor,
    apply,
    register,
)

KINDS = ("lower", "lower_diag", "upper", "upper_diag")


def _written(t: Tensor) -> Cost:
    return Cost(t.size, t.nbytes)


def _arange_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    start, stop, step = real(attrs, "start"), real(attrs, "stop"), real(attrs, "step")
    sound = isfinite(start) and isfinite(stop) and isfinite(step) and step != 0
    expect(sound, f"expected finite numbers and a step, got {start}, {stop}, {step}")
    return Meta((max(0, ceil((stop - start) / step)),), F32)


def _arange(*, start: float, stop: float, step: float) -> Array:
    return f32(start + step * np.arange(max(0, ceil((stop - start) / step))))


ARANGE = register(
    OpSpec(
        "arange",
        infer=rule("arange", "", _arange_rule),
        reference=_arange,
        ggml="ARANGE",
        cost=_written,
        examples=(
            Example((), {"start": 0.0, "stop": 7.0, "step": 1.0}),
            Example((), {"start": 2.0, "stop": -1.0, "step": -0.75}),
            Example((), {"start": 0.0, "stop": 0.5, "step": 1.0}),
            Example((), {"start": 3.0, "stop": 3.0, "step": 1.0}),
        ),
        doc="arange(start, stop, step): start, start + step, .. below (above) stop.",
    )
)


def _fill_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    shape, wanted = integers(attrs, "shape"), dtype(str(attrs.get("dtype")))
    value = real(attrs, "value")
    expect(not wanted.is_block, f"expected a plain dtype, got {wanted}")
    whole = wanted.is_float or value.is_integer()
    expect(whole, f"value={value} does not fit {wanted}")
    return Meta(shape, wanted)


def _fill(*, shape: tuple[int, ...], value: float, dtype: str) -> Array:
    wide = np.float64 if dtype == "f64" else np.float32
    return np.full(shape, value, wide if dtype.startswith(("f", "b")) else np.int64)


FILL = register(
    OpSpec(
        "fill",
        infer=rule("fill", "", _fill_rule),
        reference=_fill,
        ggml="FILL",
        cost=_written,
        examples=(
            Example((), {"shape": (3, 5), "value": 0.5, "dtype": "f32"}),
            Example((), {"shape": (2,), "value": float("-inf"), "dtype": "f16"}),
            Example((), {"shape": (1, 1), "value": 7.0, "dtype": "i32"}),
            Example((), {"shape": (0, 3), "value": 1.0, "dtype": "f32"}),
        ),
        doc="fill(shape, value, dtype): the same value everywhere.",
    )
)


def _tri_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    rank(sources[0], 2)
    plain_float(sources[0])
    choice(attrs, "kind", KINDS)
    return Meta(sources[0].shape, sources[0].dtype)


def _tri(x: Array, *, kind: str) -> Array:
    row, column = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    ahead = row - column if kind.startswith("lower") else column - row  # > 0 in the triangle
    return np.where(ahead >= (0 if kind.endswith("diag") else 1), x, np.float32(0))


TRI = register(
    OpSpec(
        "tri",
        infer=rule("tri", "x", _tri_rule),
        reference=_tri,
        ggml="TRI",
        inplace_ok=(0,),
        examples=(
            Example((Arg((4, 4)),), {"kind": "lower"}),
            Example((Arg((2, 3, 5)),), {"kind": "lower_diag"}),
            Example((Arg((4, 4), F16),), {"kind": "upper"}),
            Example((Arg((5, 3)),), {"kind": "upper_diag"}),
            Example((Arg((1, 1)),), {"kind": "lower"}),
            Example((Arg((0, 4)),), {"kind": "upper"}),
        ),
        doc="tri(x, kind): one triangle of x, with or without its diagonal, and zeros elsewhere.",
    )
)


def arange(start: float, stop: float, step: float = 1.0, *, name: str = "") -> Tensor:
    """f32 [ceil((stop - start) / step)]: start, start + step, ... ggml: GGML_OP_ARANGE.

    Errors: ShapeError for a step of 0 and for numbers that are not finite.
    """
    return apply("arange", name=name, start=float(start), stop=float(stop), step=float(step))


def fill(shape: Sequence[int], value: float, dtype: DTypeLike = F32, *, name: str = "") -> Tensor:
    """A tensor of `shape` and plain `dtype` that holds `value` everywhere. ggml: GGML_OP_FILL.

    Errors: ShapeError for block types and for fractions in integer types.
    """
    return apply(
        "fill", name=name, shape=tuple(shape), value=float(value), dtype=as_dtype(dtype).name
    )


def tri(x: Tensor, kind: str = "lower_diag", *, name: str = "") -> Tensor:
    """A triangle of x [.., n, m] (plain float), zeros elsewhere; same shape. ggml: GGML_OP_TRI.

    kind: "lower", "lower_diag", "upper", "upper_diag"; "_diag" keeps the diagonal.
    """
    return apply("tri", x, name=name, kind=kind)
