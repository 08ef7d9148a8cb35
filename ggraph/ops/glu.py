"""Gated units: activation(gate) * up.

Legend: n features of one half. Each function takes gate and up [..., n], or one packed tensor
[..., 2n] whose first half is the gate (`swapped`: the second); the packed form is the same op on
two views of it. Source: Shazeer, arXiv 2002.05202; ggml's `ggml_glu` for the packed order.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ggraph.dtype import F16
from ggraph.ops.rules import expect, f64, like, plain_float, rank, real, rule
from ggraph.ops.shape import columns
from ggraph.ops.unary import gelu_erf_of, gelu_of, gelu_quick_of, relu_of, silu_of
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register


def _same(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    gate, up = sources
    plain_float(gate)
    plain_float(up)
    expect(gate.shape == up.shape, "expected gate and up of one shape")
    return Meta(gate.shape, gate.dtype)


def _glu(name: str, activation: Callable[[Array], Array], meaning: str) -> OpSpec:
    def reference(gate: Array, up: Array) -> Array:
        opened = like(activation(f64(gate)), gate)  # rounded by itself, as ggml's
        return like(opened * up, gate)

    return register(
        OpSpec(
            name,
            infer=rule(name, "gate up", _same),
            reference=reference,
            ggml=f"GLU_{name.upper()}",
            inplace_ok=(0, 1),
            elementwise=True,
            examples=(
                Example((Arg((3, 8)), Arg((3, 8)))),
                Example((Arg((2, 3, 37)), Arg((2, 3, 37)))),
                Example((Arg((1, 1)), Arg((1, 1)))),
                Example((Arg((0, 4)), Arg((0, 4)))),
                Example((Arg((3, 8), F16), Arg((3, 8), F16)), tolerance=2e-3),
            ),
            doc=f"{name}(gate, up): {meaning}.",
        )
    )


SWIGLU = _glu("swiglu", silu_of, "silu(gate) * up")
GEGLU = _glu("geglu", gelu_of, "gelu(gate) * up, tanh form")
GEGLU_ERF = _glu("geglu_erf", gelu_erf_of, "gelu(gate) * up, erf form")
GEGLU_QUICK = _glu("geglu_quick", gelu_quick_of, "gelu(gate) * up, sigmoid form")
REGLU = _glu("reglu", relu_of, "relu(gate) * up")

UNITS = ("swiglu", "geglu", "geglu_erf", "geglu_quick", "reglu")  # those without attributes


def _oai_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    expect(real(attrs, "limit") > 0, f"limit={attrs['limit']}: expected more than 0")
    real(attrs, "alpha")
    return _same(sources, attrs)


def _oai(gate: Array, up: Array, *, alpha: float, limit: float) -> Array:
    held = np.minimum(f64(gate), limit)
    opened = held / (1 + np.exp(-alpha * held))
    return like(opened * (np.clip(f64(up), -limit, limit) + 1), gate)


SWIGLU_OAI = register(
    OpSpec(
        "swiglu_oai",
        infer=rule("swiglu_oai", "gate up", _oai_rule),
        reference=_oai,
        ggml="GLU_SWIGLU_OAI",
        inplace_ok=(0, 1),
        examples=(
            Example((Arg((3, 8)), Arg((3, 8))), {"alpha": 1.702, "limit": 7.0}),
            Example((Arg((2, 3, 37)), Arg((2, 3, 37))), {"alpha": 1.5, "limit": 0.5}),
            Example((Arg((1, 1)), Arg((1, 1))), {"alpha": 1.702, "limit": 7.0}),
            Example((Arg((0, 4)), Arg((0, 4))), {"alpha": 1.702, "limit": 7.0}),
        ),
        doc="swiglu_oai(gate, up): g * sigmoid(alpha * g) * (u + 1), both held within the limit.",
    )
)


def swiglu_oai(
    gate: Tensor, up: Tensor, *, alpha: float = 1.702, limit: float = 7.0, name: str = ""
) -> Tensor:
    """min(gate, limit) * sigmoid(alpha * that) * (up within +-limit, plus 1); [..., n] plain float.

    ggml: GGML_GLU_OP_SWIGLU_OAI. Errors: ShapeError. Source: the gpt-oss release.
    """
    return apply("swiglu_oai", gate, up, name=name, alpha=float(alpha), limit=float(limit))


def _gated(op: str, gate: Tensor, up: Tensor | None, swapped: bool, name: str) -> Tensor:
    """The op on two halves, which are views of `gate` where `up` is not given."""
    if up is None:
        rank(gate, 1)
        n = gate.shape[-1] // 2
        expect(gate.shape[-1] == 2 * n, f"{op}: {gate.label} {list(gate.shape)} has no two halves")
        gate, up = columns(gate, n * swapped, n), columns(gate, n * (not swapped), n)
    return apply(op, gate, up, name=name)


def swiglu(
    gate: Tensor, up: Tensor | None = None, *, swapped: bool = False, name: str = ""
) -> Tensor:
    """silu(gate) * up; gate, up [..., n] plain float, or packed [..., 2n] -> [..., n].

    ggml: GGML_GLU_OP_SWIGLU. Errors: ShapeError for unequal shapes or an odd packed width.
    """
    return _gated("swiglu", gate, up, swapped, name)


def geglu(
    gate: Tensor, up: Tensor | None = None, *, swapped: bool = False, name: str = ""
) -> Tensor:
    """gelu(gate) * up in the tanh form; as `swiglu` otherwise. ggml: GGML_GLU_OP_GEGLU."""
    return _gated("geglu", gate, up, swapped, name)


def geglu_erf(
    gate: Tensor, up: Tensor | None = None, *, swapped: bool = False, name: str = ""
) -> Tensor:
    """gelu(gate) * up in the erf form; as `swiglu` otherwise. ggml: GGML_GLU_OP_GEGLU_ERF."""
    return _gated("geglu_erf", gate, up, swapped, name)


def geglu_quick(
    gate: Tensor, up: Tensor | None = None, *, swapped: bool = False, name: str = ""
) -> Tensor:
    """gelu(gate) * up in the sigmoid form; as `swiglu`. ggml: GGML_GLU_OP_GEGLU_QUICK."""
    return _gated("geglu_quick", gate, up, swapped, name)


def reglu(
    gate: Tensor, up: Tensor | None = None, *, swapped: bool = False, name: str = ""
) -> Tensor:
    """relu(gate) * up; as `swiglu` otherwise. ggml: GGML_GLU_OP_REGLU."""
    return _gated("reglu", gate, up, swapped, name)
