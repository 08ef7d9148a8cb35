"""Arithmetic on elements, with NumPy broadcasting of the second operand.

Legend: shapes are given as [..., n]; the result has the first operand's shape.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import BF16, F16
from ggraph.ops.rules import expect, plain_float, real, real_valued, repeats_into, rule, same_shape
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register

INF = float("inf")


def broadcast(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """Source 0's shape and dtype (plain float); source 1 (any float type) repeats into it."""
    a, b = sources
    plain_float(a)
    real_valued(b)
    repeats_into(b, a)
    return Meta(a.shape, a.dtype)


def _binary(name: str, function: np.ufunc) -> OpSpec:
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
            ggml=name.upper(),
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


def _scale_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    real(attrs, "scale")
    real(attrs, "bias")
    return same_shape(sources, attrs)


def _scale(a: Array, *, scale: float, bias: float) -> Array:
    return a * np.float32(scale) + np.float32(bias)


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
        doc="scale(a, scale, bias): a * scale + bias.",
    )
)


def _clamp_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    low, high = real(attrs, "low"), real(attrs, "high")
    expect(low <= high, lambda: f"expected low <= high, got {low} and {high}")
    return same_shape(sources, attrs)


def _clamp(a: Array, *, low: float, high: float) -> Array:
    return np.clip(a, np.float32(low), np.float32(high))


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


def scale(a: Tensor, factor: float, bias: float = 0.0, *, name: str = "") -> Tensor:
    """a * factor + bias, a of a plain float type. ggml: GGML_OP_SCALE. Errors: ShapeError."""
    return apply("scale", a, name=name, scale=float(factor), bias=float(bias))


def clamp(a: Tensor, low: float, high: float, *, name: str = "") -> Tensor:
    """a held in [low, high]; plain float types. ggml: GGML_OP_CLAMP. Errors: ShapeError."""
    return apply("clamp", a, name=name, low=float(low), high=float(high))
