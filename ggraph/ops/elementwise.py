"""Arithmetic on elements, with NumPy broadcasting of the second operand. Floor 4.

Legend: shapes are given as [..., n]; the result has the first operand's shape.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32
from ggraph.errors import ShapeError
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register


def same_shape(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """The first source's shape; float32 unless the source is a plain float type."""
    a = sources[0]
    return Meta(a.shape, F32 if a.dtype.is_block else a.dtype)


def broadcast(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """Source 1 must repeat into source 0's shape, as in ggml (`ggml_can_repeat`)."""
    a, b = sources
    tail = a.shape[len(a.shape) - len(b.shape) :] if len(b.shape) <= len(a.shape) else None
    if tail is None or any(m not in (1, n) for n, m in zip(tail, b.shape, strict=True)):
        raise ShapeError(f"cannot broadcast {list(b.shape)} of %{b.name} into {list(a.shape)}")
    return same_shape(sources, attrs)


def _binary(name: str, function: np.ufunc) -> OpSpec:
    args = (Arg((3, 5)), Arg((3, 5), fill="positive"))
    return register(
        OpSpec(
            name,
            infer=broadcast,
            reference=lambda a, b: function(a, b),
            ggml=name.upper(),
            inplace_ok=(0,),
            examples=(
                Example(args),
                Example((Arg((2, 3, 5)), Arg((5,), fill="positive"))),
                Example((Arg((0, 4)), Arg((1, 4), fill="positive"))),
                Example((Arg((1, 1)), Arg((1, 1), fill="positive"))),
            ),
            doc=f"{name}(a, b): element by element, b repeats over a's leading axes.",
        )
    )


ADD = _binary("add", np.add)
SUB = _binary("sub", np.subtract)
MUL = _binary("mul", np.multiply)
DIV = _binary("div", np.divide)


def _scale(a: Array, *, scale: float, bias: float) -> Array:
    return a * np.float32(scale) + np.float32(bias)


SCALE = register(
    OpSpec(
        "scale",
        infer=same_shape,
        reference=_scale,
        ggml="SCALE",
        inplace_ok=(0,),
        examples=(Example((Arg((3, 5)),), {"scale": 0.5, "bias": 1.0}),),
        doc="scale(a, scale, bias): a * scale + bias.",
    )
)


def add(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a + b; b [.., n] repeats into a [..., n]. ggml: GGML_OP_ADD. Errors: ShapeError."""
    return apply("add", a, b, name=name)


def sub(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a - b; b [.., n] repeats into a [..., n]. ggml: GGML_OP_SUB. Errors: ShapeError."""
    return apply("sub", a, b, name=name)


def mul(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a * b element by element; b repeats into a. ggml: GGML_OP_MUL. Errors: ShapeError."""
    return apply("mul", a, b, name=name)


def div(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """a / b element by element; b repeats into a. ggml: GGML_OP_DIV. Errors: ShapeError."""
    return apply("div", a, b, name=name)


def scale(a: Tensor, factor: float, bias: float = 0.0, *, name: str = "") -> Tensor:
    """a * factor + bias. ggml: GGML_OP_SCALE."""
    return apply("scale", a, name=name, scale=float(factor), bias=float(bias))
