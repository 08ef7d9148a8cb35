"""Activations in 8 bits for products with quantised weights, alone and with what they come from.

 `ggraph.rewrite` makes these where every device knows them, so that the bytes between a
norm and its products lie in the plan like all others. Legend: n row length, whole blocks of 32.
"""

from collections.abc import Sequence

from ggraph.dtype import A8, F32, I32, Q4_0
from ggraph.ops.fused import ALL, CHOSEN, MUL_MAT_GATED, RMS_NORM_MUL, mul_mat_gated
from ggraph.ops.glu import SWIGLU
from ggraph.ops.rules import expect, f32, rank, rule
from ggraph.tensor import Arg, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _blocks(x: Tensor) -> Meta:
    """A8 of x's shape."""
    rank(x, 1)
    whole = x.shape[-1] % A8.block == 0
    expect(whole, f"{x.label}: rows of {x.shape[-1]} are no whole blocks of {A8.block}")
    expect(x.dtype is F32, f"{x.label}: expected f32, got {x.dtype}")
    return Meta(x.shape, A8)


def _quantise_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    return _blocks(sources[0])


def _norm_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    RMS_NORM_MUL.infer(sources, attrs)
    return _blocks(sources[0])


def _gated_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    SWIGLU.infer(sources, attrs)
    return _blocks(sources[0])


def _gated_product_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    shape = MUL_MAT_GATED.infer(sources, attrs).shape
    whole = shape[-1] % A8.block == 0
    expect(whole, f"rows of {shape[-1]} are no whole blocks of {A8.block}")
    return Meta(shape, A8)


def _cost(t: Tensor) -> Cost:
    return Cost(8 * t.size, t.nbytes + sum(s.nbytes for s in t.sources))


QUANTISE = register(
    OpSpec(
        "quantise",
        infer=rule("quantise", "x", _quantise_rule),
        reference=f32,
        cost=_cost,
        rounds="rows to 8 bits",
        examples=(
            Example((Arg((3, 64)),), tolerance=1e-2),
            Example((Arg((2, 3, 96)),), tolerance=1e-2),
            Example((Arg((1, 32)),), tolerance=1e-2),
            Example((Arg((0, 32)),)),
        ),
        doc="quantise(x): x in blocks of 32 codes of 8 bits, for products with quantised weights.",
    )
)

RMS_NORM_QUANTISE = register(
    OpSpec(
        "rms_norm_quantise",
        infer=rule("rms_norm_quantise", "x w", _norm_rule),
        reference=RMS_NORM_MUL.reference,
        cost=_cost,
        rounds="rows to 8 bits",
        examples=(
            Example((Arg((3, 64)), Arg((64,))), {"eps": 1e-5}, 1e-2),
            Example((Arg((2, 3, 96)), Arg((96,))), {"eps": 1e-5}, 1e-2),
            Example((Arg((1, 32)), Arg((32,))), {"eps": 1e-2}, 1e-2),
            Example((Arg((0, 32)), Arg((32,))), {"eps": 1e-5}),
        ),
        doc="rms_norm_quantise(x, w, eps): quantise(rms_norm_mul(x, w, eps)).",
    )
)

SWIGLU_QUANTISE = register(
    OpSpec(
        "swiglu_quantise",
        infer=rule("swiglu_quantise", "gate up", _gated_rule),
        reference=SWIGLU.reference,
        cost=_cost,
        rounds="rows to 8 bits",
        examples=(
            Example((Arg((3, 64)), Arg((3, 64))), tolerance=1e-2),
            Example((Arg((2, 3, 96)), Arg((2, 3, 96))), tolerance=1e-2),
            Example((Arg((1, 32)), Arg((1, 32))), tolerance=1e-2),
            Example((Arg((0, 32)), Arg((0, 32)))),
        ),
        doc="swiglu_quantise(gate, up): quantise(swiglu(gate, up)).",
    )
)

MUL_MAT_GATED_QUANTISE = register(
    OpSpec(
        "mul_mat_gated_quantise",
        infer=rule("mul_mat_gated_quantise", "w x up ids?", _gated_product_rule),
        reference=MUL_MAT_GATED.reference,
        limits=MUL_MAT_GATED.limits,
        cost=MUL_MAT_GATED.cost,
        rounds="rows to 8 bits",
        examples=(
            Example((Arg((64, 64)), Arg((3, 64)), Arg((64, 64))), {"unit": "swiglu", **ALL}, 1e-2),
            Example(
                (Arg((96, 64), Q4_0), Arg((2, 64), A8), Arg((96, 64), Q4_0)),
                {"unit": "geglu", **ALL},
                2e-2,
            ),
            Example(
                (
                    Arg((4, 64, 32), Q4_0),
                    Arg((3, 1, 32), A8),
                    Arg((4, 64, 32), Q4_0),
                    Arg((3, 2), I32, "ids:4"),
                ),
                {"unit": "swiglu", **CHOSEN},
                2e-2,
            ),
            Example((Arg((32, 1)), Arg((1, 1)), Arg((32, 1))), {"unit": "reglu", **ALL}, 1e-2),
            Example((Arg((32, 8)), Arg((0, 8)), Arg((32, 8))), {"unit": "swiglu", **ALL}),
        ),
        doc="mul_mat_gated_quantise(w, x, up, ids?, unit): quantise(mul_mat_gated(...)).",
    )
)


def quantise(x: Tensor, *, name: str = "") -> Tensor:
    """x f32 [.., n] as A8 of the same shape. No ggml peer (it does this inside its products).

    Errors: ShapeError unless n is whole blocks of 32.
    """
    return apply("quantise", x, name=name)


def rms_norm_quantise(x: Tensor, w: Tensor, eps: float = 1e-6, *, name: str = "") -> Tensor:
    """rms_norm(x [.., n]) * w [n] as A8. No ggml peer. Errors: ShapeError."""
    return apply("rms_norm_quantise", x, w, name=name, eps=float(eps))


def swiglu_quantise(gate: Tensor, up: Tensor, *, name: str = "") -> Tensor:
    """silu(gate) * up, both f32 [.., n], as A8. No ggml peer. Errors: ShapeError."""
    return apply("swiglu_quantise", gate, up, name=name)


def mul_mat_gated_quantise(
    w: Tensor,
    x: Tensor,
    up: Tensor,
    ids: Tensor | None = None,
    *,
    unit: str = "swiglu",
    name: str = "",
) -> Tensor:
    """mul_mat_gated of the same sources, [.., n], as A8. No ggml peer. Errors: ShapeError."""
    made = mul_mat_gated(w, x, up, ids, unit=unit)
    return apply("mul_mat_gated_quantise", *made.sources, name=name, **made.attrs)
