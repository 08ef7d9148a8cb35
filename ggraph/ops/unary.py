"""Functions of one element.

All take a plain float tensor [...] and give one of the same shape and dtype. References compute
in float64, of which f64 keeps all. Sources: ggml's `ggml_vec_*` functions for the constants of the
approximate forms.
"""

from collections.abc import Callable
from math import erf, pi
from typing import Any

import numpy as np

from ggraph.dtype import F16
from ggraph.ops.rules import f64, like, rule, same_shape
from ggraph.ops.trace import WORDS
from ggraph.tensor import Arg, Array, Example, OpSpec, Tensor, apply, register

Function = Callable[[Array], Array]

GELU_INNER = 0.044715  # of the tanh form of GELU (Hendrycks and Gimpel, arXiv 1606.08415)
GELU_OUTER = (2 / pi) ** 0.5
GELU_QUICK = 1.702  # of the sigmoid form, same paper
SOFTPLUS_LINEAR = 20.0  # beyond this softplus(x) is x, as in ggml


ERF: Any = np.frompyfunc(erf, 1, 1)
WORDS[ERF] = "erf"


def _erf(x: Array) -> Array:
    y: Any = ERF(x)
    if not isinstance(y, float):  # which it is for an array of no axes
        y = y.astype(np.float64)
    found: Array = y
    return found


def sigmoid_of(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow for large negative x."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def silu_of(x: Array) -> Array:
    """x * sigmoid(x)."""
    y: Array = x * sigmoid_of(x)
    return y


def gelu_of(x: Array) -> Array:
    """GELU in its tanh form; (1 + tanh u) / 2 is the sigmoid of 2 u, which does not cancel."""
    inner = GELU_OUTER * x * (1 + GELU_INNER * x * x)
    y: Array = x / (1 + np.exp(-2 * inner))
    return y


def gelu_erf_of(x: Array) -> Array:
    """GELU as defined: x times the normal distribution function."""
    y: Array = 0.5 * x * (1 + _erf(x * 0.5**0.5))
    return y


def gelu_quick_of(x: Array) -> Array:
    """GELU in its sigmoid form."""
    return x * sigmoid_of(GELU_QUICK * x)


def relu_of(x: Array) -> Array:
    """x where positive, else 0."""
    return np.maximum(x, 0)


def _softplus_of(x: Array) -> Array:
    return np.where(x > SOFTPLUS_LINEAR, x, np.log1p(np.exp(np.minimum(x, SOFTPLUS_LINEAR))))


def _step_of(x: Array) -> Array:
    return np.where(x > 0, 1.0, 0.0)


def _elu_of(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _hardsigmoid_of(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


def _hardswish_of(x: Array) -> Array:
    return x * _hardsigmoid_of(x)


def _round_of(x: Array) -> Array:
    """To the nearest integer, halves away from zero, as C's roundf: exact in every float type, in
    which |x| + 0.5 would not be."""
    whole = np.trunc(x)
    y: Array = np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)
    return y


def _unary(name: str, function: Function, ggml: str, meaning: str, fill: str = "normal") -> OpSpec:
    def reference(x: Array) -> Array:
        return like(function(f64(x)), x)

    return register(
        OpSpec(
            name,
            infer=rule(name, "x", same_shape),
            reference=reference,
            ggml=ggml,
            inplace_ok=(0,),
            elementwise=True,
            examples=(
                Example((Arg((3, 5), fill=fill),)),
                Example((Arg((2, 3, 37), fill=fill),)),
                Example((Arg((1,), fill=fill),)),
                Example((Arg((0, 4), fill=fill),)),
                Example((Arg((3, 5), F16, fill),), tolerance=2e-3),
            ),
            doc=f"{name}(x): {meaning}.",
        )
    )


NEG = _unary("neg", np.negative, "UNARY_NEG", "-x")
ABS = _unary("abs", np.abs, "UNARY_ABS", "the magnitude of x")
SGN = _unary("sgn", np.sign, "UNARY_SGN", "-1, 0 or 1")
STEP = _unary("step", _step_of, "UNARY_STEP", "1 where x > 0, else 0")
SQR = _unary("sqr", np.square, "SQR", "x * x")
SQRT = _unary("sqrt", np.sqrt, "SQRT", "the square root; NaN below 0", "positive")
EXP = _unary("exp", np.exp, "UNARY_EXP", "e to the x")
EXPM1 = _unary("expm1", np.expm1, "UNARY_EXPM1", "e to the x, minus 1, exact near 0")
LOG = _unary("log", np.log, "LOG", "natural logarithm; -inf at 0, NaN below", "positive")
SIN = _unary("sin", np.sin, "SIN", "sine of radians")
COS = _unary("cos", np.cos, "COS", "cosine of radians")
TANH = _unary("tanh", np.tanh, "UNARY_TANH", "hyperbolic tangent")
SIGMOID = _unary("sigmoid", sigmoid_of, "UNARY_SIGMOID", "1 / (1 + exp(-x))")
RELU = _unary("relu", relu_of, "UNARY_RELU", "x where positive, else 0")
ELU = _unary("elu", _elu_of, "UNARY_ELU", "x where positive, else exp(x) - 1")
SILU = _unary("silu", silu_of, "UNARY_SILU", "x * sigmoid(x)")
GELU = _unary("gelu", gelu_of, "UNARY_GELU", "GELU in its tanh form")
GELU_ERF = _unary("gelu_erf", gelu_erf_of, "UNARY_GELU_ERF", "x times the normal distribution")
GELU_QUICK_OP = _unary("gelu_quick", gelu_quick_of, "UNARY_GELU_QUICK", "x * sigmoid(1.702 x)")
SOFTPLUS = _unary("softplus", _softplus_of, "UNARY_SOFTPLUS", "log(1 + exp(x)); x above 20")
HARDSIGMOID = _unary("hardsigmoid", _hardsigmoid_of, "UNARY_HARDSIGMOID", "(x + 3) / 6 in [0, 1]")
HARDSWISH = _unary("hardswish", _hardswish_of, "UNARY_HARDSWISH", "x * hardsigmoid(x)")
FLOOR = _unary("floor", np.floor, "UNARY_FLOOR", "the greatest integer not above x")
CEIL = _unary("ceil", np.ceil, "UNARY_CEIL", "the least integer not below x")
ROUND = _unary("round", _round_of, "UNARY_ROUND", "the nearest integer, halves away from 0")
TRUNC = _unary("trunc", np.trunc, "UNARY_TRUNC", "the integer part")


def neg(x: Tensor, *, name: str = "") -> Tensor:
    """-x. ggml: GGML_UNARY_OP_NEG.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("neg", x, name=name)


def abs(x: Tensor, *, name: str = "") -> Tensor:
    """The magnitude of x. ggml: GGML_UNARY_OP_ABS.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("abs", x, name=name)


def sgn(x: Tensor, *, name: str = "") -> Tensor:
    """-1, 0 or 1, the sign of x. ggml: GGML_UNARY_OP_SGN.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("sgn", x, name=name)


def step(x: Tensor, *, name: str = "") -> Tensor:
    """1 where x > 0, else 0. ggml: GGML_UNARY_OP_STEP.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("step", x, name=name)


def sqr(x: Tensor, *, name: str = "") -> Tensor:
    """x * x. x [...], plain float; same shape and dtype. ggml: GGML_OP_SQR. Errors: ShapeError."""
    return apply("sqr", x, name=name)


def sqrt(x: Tensor, *, name: str = "") -> Tensor:
    """The square root of x; NaN below 0. ggml: GGML_OP_SQRT.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("sqrt", x, name=name)


def exp(x: Tensor, *, name: str = "") -> Tensor:
    """e to the x. ggml: GGML_UNARY_OP_EXP.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("exp", x, name=name)


def expm1(x: Tensor, *, name: str = "") -> Tensor:
    """e to the x, minus 1. ggml: GGML_UNARY_OP_EXPM1.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("expm1", x, name=name)


def log(x: Tensor, *, name: str = "") -> Tensor:
    """The natural logarithm; -inf at 0, NaN below. ggml: GGML_OP_LOG.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("log", x, name=name)


def sin(x: Tensor, *, name: str = "") -> Tensor:
    """The sine of x radians. ggml: GGML_OP_SIN.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("sin", x, name=name)


def cos(x: Tensor, *, name: str = "") -> Tensor:
    """The cosine of x radians. ggml: GGML_OP_COS.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("cos", x, name=name)


def tanh(x: Tensor, *, name: str = "") -> Tensor:
    """The hyperbolic tangent. ggml: GGML_UNARY_OP_TANH.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("tanh", x, name=name)


def sigmoid(x: Tensor, *, name: str = "") -> Tensor:
    """1 / (1 + exp(-x)). ggml: GGML_UNARY_OP_SIGMOID.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("sigmoid", x, name=name)


def relu(x: Tensor, *, name: str = "") -> Tensor:
    """x where positive, else 0. ggml: GGML_UNARY_OP_RELU.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("relu", x, name=name)


def elu(x: Tensor, *, name: str = "") -> Tensor:
    """x where positive, else exp(x) - 1. ggml: GGML_UNARY_OP_ELU.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("elu", x, name=name)


def silu(x: Tensor, *, name: str = "") -> Tensor:
    """x * sigmoid(x). ggml: GGML_UNARY_OP_SILU.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("silu", x, name=name)


def gelu(x: Tensor, *, name: str = "") -> Tensor:
    """GELU in its tanh form. ggml: GGML_UNARY_OP_GELU.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("gelu", x, name=name)


def gelu_erf(x: Tensor, *, name: str = "") -> Tensor:
    """GELU as defined, with erf. ggml: GGML_UNARY_OP_GELU_ERF.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("gelu_erf", x, name=name)


def gelu_quick(x: Tensor, *, name: str = "") -> Tensor:
    """x * sigmoid(1.702 x). ggml: GGML_UNARY_OP_GELU_QUICK.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("gelu_quick", x, name=name)


def softplus(x: Tensor, *, name: str = "") -> Tensor:
    """log(1 + exp(x)), which is x above 20. ggml: GGML_UNARY_OP_SOFTPLUS.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("softplus", x, name=name)


def hardsigmoid(x: Tensor, *, name: str = "") -> Tensor:
    """(x + 3) / 6, held in [0, 1]. ggml: GGML_UNARY_OP_HARDSIGMOID.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("hardsigmoid", x, name=name)


def hardswish(x: Tensor, *, name: str = "") -> Tensor:
    """x * hardsigmoid(x). ggml: GGML_UNARY_OP_HARDSWISH.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("hardswish", x, name=name)


def floor(x: Tensor, *, name: str = "") -> Tensor:
    """The greatest integer not above x. ggml: GGML_UNARY_OP_FLOOR.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("floor", x, name=name)


def ceil(x: Tensor, *, name: str = "") -> Tensor:
    """The least integer not below x. ggml: GGML_UNARY_OP_CEIL.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("ceil", x, name=name)


def round(x: Tensor, *, name: str = "") -> Tensor:
    """The nearest integer, halves away from 0. ggml: GGML_UNARY_OP_ROUND.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("round", x, name=name)


def trunc(x: Tensor, *, name: str = "") -> Tensor:
    """The integer part. ggml: GGML_UNARY_OP_TRUNC.

    x [...] of a plain float type; same shape and dtype. Errors: ShapeError.
    """
    return apply("trunc", x, name=name)
