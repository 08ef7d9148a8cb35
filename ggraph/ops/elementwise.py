"""Arithmetic on elements, with NumPy broadcasting of the second operand.

Legend: shapes are given as [..., n]; the result has the first operand's shape.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import BF16, F16
from ggraph.errors import ShapeError
from ggraph.ops.create import fill
from ggraph.ops.rules import (
    expect,
    f64,
    like,
    plain_float,
    real,
    real_valued,
    repeats_into,
    rule,
    same_shape,
)
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register

INF = float("inf")


def broadcast(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """Source 0's shape and dtype (plain float); source 1 (any float type) repeats into it."""
    a, b = sources
    plain_float(a)
    real_valued(b)
    repeats_into(b, a)
    return Meta(a.shape, a.dtype)


def _binary(name: str, function: np.ufunc, has_peer: bool = True) -> OpSpec:
    def args(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Arg, Arg]:
        return Arg(a), Arg(b, fill="positive")

    def reference(a: Array, b: Array) -> Array:
        result: Array = function(a, b)
        return result

    return register(
        OpSpec(
            name,
            infer=rule(name, "a b", broadcast),
            reference=reference,
            ggml=name.upper() if has_peer else None,
            inplace_ok=(0, 1),
            elementwise=True,
            examples=(
                Example(args((3, 5), (3, 5))),
                Example(args((2, 3, 5), (5,))),
                Example(args((2, 3, 5), (2, 3, 1))),
                Example(args((0, 4), (1, 4))),
                Example(args((1, 1), (1, 1))),
                Example((Arg((3, 5), F16), Arg((5,), F16, "positive")), tolerance=2e-3),
                Example((Arg((3, 5)), Arg((5,), BF16, "positive"))),
            ),
            doc=f"{name}(a, b): element by element, b repeats over a's leading axes.",
        )
    )


ADD = _binary("add", np.add)
SUB = _binary("sub", np.subtract)
MUL = _binary("mul", np.multiply)
DIV = _binary("div", np.divide)
MAXIMUM = _binary("maximum", np.maximum, has_peer=False)
MINIMUM = _binary("minimum", np.minimum, has_peer=False)


def _pow(a: Array, b: Array) -> Array:
    return like(f64(a) ** b, a)


POW = register(
    OpSpec(
        "pow",
        infer=rule("pow", "a b", broadcast),
        reference=_pow,
        inplace_ok=(0, 1),
        elementwise=True,
        examples=(
            Example((Arg((3, 5), fill="positive"), Arg((3, 5)))),
            Example((Arg((2, 3, 5), fill="positive"), Arg((5,)))),
            Example((Arg((4, 6)), Arg((1,), fill="ids:4"))),
            Example((Arg((1, 1), fill="positive"), Arg((1, 1)))),
            Example((Arg((0, 4)), Arg((1, 4)))),
            Example((Arg((3, 5), F16, "positive"), Arg((5,), F16)), tolerance=2e-3),
        ),
        doc="pow(a, b): a to the b; NaN for a < 0 unless b is whole.",
    )
)


def _where_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    condition, a, b = sources
    for t in sources:
        plain_float(t)
    shape = a.shape
    expect(condition.shape == shape, f"expected {condition.label} {list(shape)}")
    repeats_into(b, a)
    return Meta(shape, a.dtype)


def _where(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition != 0, a, b)


WHERE = register(
    OpSpec(
        "where",
        infer=rule("where", "condition a b", _where_rule),
        reference=_where,
        inplace_ok=(0, 1, 2),
        elementwise=True,
        examples=(
            Example((Arg((3, 5), fill="ids:2"), Arg((3, 5)), Arg((3, 5)))),
            Example((Arg((2, 3, 37), fill="ids:2"), Arg((2, 3, 37)), Arg((1,)))),
            Example((Arg((1, 1), fill="ids:2"), Arg((1, 1)), Arg((1, 1)))),
            Example((Arg((0, 4)), Arg((0, 4)), Arg((4,)))),
            Example((Arg((3, 5), F16, "ids:2"), Arg((3, 5), F16), Arg((3, 5), F16))),
        ),
        doc="where(condition, a, b): a where the condition is not 0, else b.",
    )
)


def _scale_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    real(attrs, "scale")
    real(attrs, "bias")
    return same_shape(sources, attrs)


def _scale(a: Array, *, scale: float, bias: float) -> Array:
    number = a.dtype.type
    y: Array = a * number(scale)
    return y + number(bias) if bias else y


SCALE = register(
    OpSpec(
        "scale",
        infer=rule("scale", "a", _scale_rule),
        reference=_scale,
        ggml="SCALE",
        inplace_ok=(0,),
        elementwise=True,
        examples=(
            Example((Arg((3, 5)),), {"scale": 0.5, "bias": 1.0}),
            Example((Arg((1, 1)),), {"scale": -2.0, "bias": 0.0}),
            Example((Arg((0, 5)),), {"scale": -2.0, "bias": 0.0}),
            Example((Arg((2, 5), F16),), {"scale": 3.0, "bias": 0.5}, tolerance=2e-3),
        ),
        doc="scale(a, scale, bias): a * scale + bias; a bias of 0 is not added.",
    )
)


def _clamp_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    low, high = real(attrs, "low"), real(attrs, "high")
    expect(low <= high, lambda: f"expected low <= high, got {low} and {high}")
    return same_shape(sources, attrs)


def _clamp(a: Array, *, low: float, high: float) -> Array:
    number = a.dtype.type
    return np.clip(a, number(low), number(high))


CLAMP = register(
    OpSpec(
        "clamp",
        infer=rule("clamp", "a", _clamp_rule),
        reference=_clamp,
        ggml="CLAMP",
        inplace_ok=(0,),
        elementwise=True,
        examples=(
            Example((Arg((3, 5)),), {"low": -0.5, "high": 0.25}),
            Example((Arg((4,)),), {"low": -INF, "high": 0.0}),
            Example((Arg((1, 1)),), {"low": 0.0, "high": INF}),
            Example((Arg((2, 0)),), {"low": 0.0, "high": 1.0}),
            Example((Arg((3, 5), F16),), {"low": -0.5, "high": 0.25}, tolerance=2e-3),
        ),
        doc="clamp(a, low, high): a held between two bounds, either of which may be infinite.",
    )
)


def add(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a + b; b [.., n] repeats into a [..., n]. ggml: GGML_OP_ADD. Errors: ShapeError.

    a: f32, f16 or bf16, also the result's type; b: any float type.
    """
    return apply("add", a, b, name=name)


def sub(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a - b; shapes, types and errors as in `add`. ggml: GGML_OP_SUB."""
    return apply("sub", a, b, name=name)


def mul(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a * b element by element; shapes, types and errors as in `add`. ggml: GGML_OP_MUL."""
    return apply("mul", a, b, name=name)


def div(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a / b element by element; shapes, types and errors as in `add`. ggml: GGML_OP_DIV."""
    return apply("div", a, b, name=name)


def maximum(a: Tensor | float, b: Tensor | float, *, name: str = "") -> Tensor:
    """The greater of a and b, NaN where either is; broadcast both ways, one may be a number.

    No ggml peer. Errors: ShapeError.
    """
    a, b = _alike("maximum", a, b)
    return apply("maximum", a, b, name=name)


def minimum(a: Tensor | float, b: Tensor | float, *, name: str = "") -> Tensor:
    """The lesser of a and b, NaN where either is; broadcast both ways, one may be a number.

    No ggml peer. Errors: ShapeError.
    """
    a, b = _alike("minimum", a, b)
    return apply("minimum", a, b, name=name)


def equal(a: Tensor, b: Tensor | float, *, name: str = "") -> Tensor:
    """1 where a is b, else 0, as where one is NaN; plain float, broadcast both ways.

    No ggml peer. Errors: ShapeError.
    """
    return apply("mul", a >= b, a <= b, name=name)


def pow(a: Tensor | float, b: Tensor | float, *, name: str = "") -> Tensor:
    """a to the b, NaN for a < 0 unless b is whole; broadcast both ways, one may be a number.

    No ggml peer. Errors: ShapeError.
    """
    return _one_of("pow", a, b)._with("pow", a, b, name)


def where(condition: Tensor, a: Tensor | float, b: Tensor | float, *, name: str = "") -> Tensor:
    """a where the condition is not 0, else b; broadcast all ways, a and b may be numbers.

    All plain float; the result has the type of the first of a, b and condition that is a tensor.
    No ggml peer. Errors: ShapeError.
    """
    a, b, condition = _alike("where", a, b, condition)
    return apply("where", condition, a, b, name=name)


def _alike(op: str, *given: Tensor | float) -> tuple[Tensor, ...]:
    """Numbers as tensors of the first tensor's type, and all but the second repeated into the
    common shape; the second repeats by itself. ShapeError where no shape is common."""
    tensors, first = [t for t in given if isinstance(t, Tensor)], _one_of(op, *given)
    try:
        shape = np.broadcast_shapes(*(t.shape for t in tensors))
    except ValueError:
        shapes = " and ".join(f"{list(t.shape)} of {t.label}" for t in tensors)
        raise ShapeError(f"{op}: cannot broadcast {shapes}") from None
    made = [t if isinstance(t, Tensor) else fill((), t, first.dtype) for t in given]
    return tuple(
        t if i == 1 or t.shape == shape else apply("repeat", t, shape=shape)
        for i, t in enumerate(made)
    )


def _one_of(op: str, *given: Tensor | float) -> Tensor:
    """The first tensor. ShapeError where all are numbers."""
    found = next((t for t in given if isinstance(t, Tensor)), None)
    if found is None:
        raise ShapeError(f"{op}: {given}: expected a tensor among them")
    return found


def scale(a: Tensor, factor: float, bias: float = 0.0, *, name: str = "") -> Tensor:
    """a * factor + bias, or a * factor where the bias is 0, a of a plain float type.

    ggml: GGML_OP_SCALE. Errors: ShapeError.
    """
    return apply("scale", a, name=name, scale=float(factor), bias=float(bias))


def clamp(a: Tensor, low: float, high: float, *, name: str = "") -> Tensor:
    """a held in [low, high]; plain float types. ggml: GGML_OP_CLAMP. Errors: ShapeError."""
    return apply("clamp", a, name=name, low=float(low), high=float(high))
