"""Chains that a device may run as one kernel, as ordinary ops with reads and writes.

`ggraph.rewrite` makes them where every device knows them; a fused op means exactly what its parts
mean one after the other. Legend: T token rows, H heads, D head_dim, C cache rows, n row length or
outputs, m rows of a product, k inner size.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ggraph.dtype import A8, F16, F32, I32, I64, Q4_0, Q8_0
from ggraph.ops.glu import UNITS
from ggraph.ops.matmul import MUL_MAT, MUL_MAT_ID, chosen_bytes
from ggraph.ops.norm import RMS_NORM
from ggraph.ops.rope import DEFAULTS, ROPE
from ggraph.ops.rows import SET_ROWS
from ggraph.ops.rules import choice, expect, f32, like, rank, rule
from ggraph.tensor import (
    OPS,
    Arg,
    Array,
    Attrs,
    Cost,
    Example,
    Meta,
    OpSpec,
    Tensor,
    apply,
    register,
)  # fmt: skip

FEW_ROWS = 64  # of a tree of drafts: up to here launches count, beyond them arithmetic does
MOST_MATRICES = 4  # of one launch


def _norm_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, w = sources
    good = w.dtype is F32 and w.shape == x.shape[-1:]
    expect(good, f"expected {w.label} f32[{x.shape[-1] if x.shape else 0}]")
    return RMS_NORM.infer((x,), attrs)


def _norm_cost(t: Tensor) -> Cost:
    return Cost(5 * t.size, t.nbytes + sum(s.nbytes for s in t.sources))


RMS_NORM_MUL = register(
    OpSpec(
        "rms_norm_mul",
        infer=rule("rms_norm_mul", "x w", _norm_rule),
        reference=lambda x, w, *, eps: like(RMS_NORM.reference(x, eps=eps) * w, x),
        cost=_norm_cost,
        inplace_ok=(0,),
        examples=(
            Example((Arg((3, 8)), Arg((8,))), {"eps": 1e-5}),
            Example((Arg((2, 3, 67)), Arg((67,))), {"eps": 1e-5}),
            Example((Arg((1, 1)), Arg((1,))), {"eps": 1e-2}),
            Example((Arg((0, 8)), Arg((8,))), {"eps": 1e-5}),
        ),
        doc="rms_norm_mul(x, w, eps): rms_norm of each row, times w.",
    )
)


def _product_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    w, x, rest = sources
    meta = MUL_MAT.infer((w, x), attrs)
    good = rest.dtype is F32 and rest.shape == meta.shape
    expect(good, f"expected {rest.label} f32{list(meta.shape)}")
    return meta


def _product_cost(t: Tensor) -> Cost:
    w, x, rest = t.sources
    return Cost(2 * t.size * x.shape[-1] + t.size, w.nbytes + x.nbytes + rest.nbytes + t.nbytes)


MUL_MAT_ADD = register(
    OpSpec(
        "mul_mat_add",
        infer=rule("mul_mat_add", "w x rest", _product_rule),
        reference=lambda w, x, rest: f32(MUL_MAT.reference(w, x) + rest),
        cost=_product_cost,
        inplace_ok=(2,),
        examples=(
            Example((Arg((6, 64)), Arg((3, 64)), Arg((3, 6)))),
            Example((Arg((6, 64), Q4_0), Arg((2, 64)), Arg((2, 6))), tolerance=2e-2),
            Example((Arg((1, 1)), Arg((1, 1)), Arg((1, 1)))),
            Example((Arg((6, 8)), Arg((0, 8)), Arg((0, 6)))),
        ),
        doc="mul_mat_add(w, x, rest): x @ w^T + rest, element by element of one shape.",
    )
)


ALL: Attrs = {"has_ids": False}
CHOSEN: Attrs = {"has_ids": True}


def _gated_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    w, x, up, *ids = sources
    choice(attrs, "unit", UNITS)
    expect(w.shape == up.shape, f"expected {w.label} and {up.label} of one shape")
    product = MUL_MAT_ID if ids else MUL_MAT
    product.infer((up, x, *ids), {})
    return product.infer((w, x, *ids), {})


def _gated(w: Array, x: Array, up: Array, *ids: Array, unit: str, has_ids: bool) -> Array:
    product = (MUL_MAT_ID if has_ids else MUL_MAT).reference
    return f32(OPS[unit].reference(product(w, x, *ids), product(up, x, *ids)))


def _gated_cost(t: Tensor) -> Cost:
    w, x, up, *ids = t.sources
    arithmetic = 4 * t.size * x.shape[-1] + t.size
    weights = sum(chosen_bytes(v, ids[0].size) if ids else v.nbytes for v in (w, up))
    return Cost(arithmetic, weights + x.nbytes + t.nbytes)


def _gated_limits(t: Tensor) -> dict[int, int]:
    return {3: t.sources[0].shape[0]} if t.attrs["has_ids"] else {}


MUL_MAT_GATED = register(
    OpSpec(
        "mul_mat_gated",
        infer=rule("mul_mat_gated", "w x up ids?", _gated_rule),
        reference=_gated,
        limits=_gated_limits,
        cost=_gated_cost,
        examples=(
            *(
                Example(
                    (Arg((8, 64), F16), Arg((3, 64)), Arg((8, 64), F16)), {"unit": u, **ALL}, 2e-3
                )
                for u in UNITS
            ),
            Example(
                (Arg((36, 64), Q4_0), Arg((2, 3, 64)), Arg((36, 64), Q4_0)),
                {"unit": "swiglu", **ALL},
                tolerance=2e-2,
            ),
            Example(
                (Arg((4, 6, 8)), Arg((3, 1, 8)), Arg((4, 6, 8)), Arg((3, 2), I32, "ids:4")),
                {"unit": "geglu", **CHOSEN},
            ),
            Example((Arg((1, 1)), Arg((1, 1)), Arg((1, 1))), {"unit": "swiglu", **ALL}),
            Example((Arg((6, 8)), Arg((0, 8)), Arg((6, 8))), {"unit": "reglu", **ALL}),
        ),
        doc="mul_mat_gated(w, x, up, ids?, unit): the gated unit of x @ w^T and x @ up^T, or of "
        "mul_mat_id(w, x, ids) and mul_mat_id(up, x, ids).",
    )
)


def _several_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    w, x, *more = sources
    expect(len(more) < MOST_MATRICES, f"at most {MOST_MATRICES} matrices, got {len(more) + 1}")
    shapes = []
    for matrix in (w, *more):
        rank(matrix, 2, 2)
        shapes.append(MUL_MAT.infer((matrix, x), {}).shape)
    return Meta((sum(map(prod, shapes)),), F32)


def _several(w: Array, x: Array, *more: Array) -> Array:
    return np.concatenate([MUL_MAT.reference(matrix, x).reshape(-1) for matrix in (w, *more)])


MUL_MATS = register(
    OpSpec(
        "mul_mats",
        infer=rule("mul_mats", "w x more+", _several_rule),
        reference=_several,
        cost=lambda t: Cost(
            2 * t.size * t.sources[1].shape[-1], t.nbytes + sum(s.nbytes for s in t.sources)
        ),
        examples=(
            Example((Arg((8, 64), F16), Arg((3, 64)), Arg((4, 64), F16)), tolerance=2e-3),
            Example(
                (Arg((36, 64), Q4_0), Arg((2, 3, 64)), Arg((5, 64), Q4_0), Arg((17, 64), Q4_0)),
                tolerance=2e-2,
            ),
            Example((Arg((6, 64), Q4_0), Arg((2, 64)), Arg((6, 64), Q8_0)), tolerance=2e-2),
            Example((Arg((6, 64), Q8_0), Arg((2, 64), A8), Arg((3, 64), Q4_0)), tolerance=2e-2),
            Example((Arg((1, 1)), Arg((1, 1)), Arg((2, 1)), Arg((1, 1)), Arg((3, 1)))),
            Example((Arg((6, 8)), Arg((0, 8)), Arg((6, 8)))),
        ),
        doc="mul_mats(w, x, *more): x @ w^T, then x @ v^T of each further v, in one row.",
    )
)


def _rope_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    cache, x, positions, index, *factors = sources
    ROPE.infer((x, positions, *factors), attrs)
    return SET_ROWS.infer((cache, x, index), {})


def _rope_set_rows(
    cache: Array, x: Array, positions: Array, index: Array, *factors: Array, **attrs: object
) -> Array:
    return SET_ROWS.reference(cache, ROPE.reference(x, positions, *factors, **attrs), index)


def _rope_cost(t: Tensor) -> Cost:
    x = t.sources[1]
    return Cost(6 * x.size, 2 * x.nbytes)


def _rope_example(
    cache: Arg, x: Arg, index: Arg, factors: bool = False, **attrs: object
) -> Example:
    t, _, d = x.shape
    more = (Arg((d // 2,), F32, "positive"),) if factors else ()
    changes: Attrs = {**DEFAULTS, "n_rot": d, "has_factors": factors, **attrs}  # type: ignore[dict-item]
    tolerance = 2e-3 if cache.dtype is F16 else 1e-5
    return Example((cache, x, Arg((t,), I32, "ids:1000"), index, *more), changes, tolerance)


ROPE_SET_ROWS = register(
    OpSpec(
        "rope_set_rows",
        infer=rule("rope_set_rows", "cache x positions index factors?", _rope_rule),
        reference=_rope_set_rows,
        limits=lambda t: {3: t.shape[0]},
        cost=_rope_cost,
        overwrites=0,
        examples=(
            _rope_example(Arg((7, 2, 8)), Arg((3, 2, 8)), Arg((3,), I64, "ids:7")),
            _rope_example(
                Arg((7, 2, 8), F16), Arg((3, 2, 8)), Arg((3,), I64, "ids:7"), True, mode="neox"
            ),
            _rope_example(Arg((1, 1, 2)), Arg((1, 1, 2)), Arg((1,), I32, "ids:1")),
            _rope_example(Arg((7, 2, 8)), Arg((0, 2, 8)), Arg((0,), I64, "ids:7")),
        ),
        doc="rope_set_rows(cache, x, positions, index): rotate x, write its rows to the cache.",
    )
)


def rms_norm_mul(x: Tensor, w: Tensor, eps: float = 1e-6, *, name: str = "") -> Tensor:
    """Rows of x [..., n] with mean square 1, times w f32 [n]. No ggml peer. Errors: ShapeError."""
    return apply("rms_norm_mul", x, w, name=name, eps=float(eps))


def mul_mat_add(w: Tensor, x: Tensor, rest: Tensor, *, name: str = "") -> Tensor:
    """x [.., m, k] @ w^T [n, k] + rest f32 [.., m, n]. No ggml peer. Errors: ShapeError."""
    return apply("mul_mat_add", w, x, rest, name=name)


def mul_mat_gated(
    w: Tensor,
    x: Tensor,
    up: Tensor,
    ids: Tensor | None = None,
    *,
    unit: str = "swiglu",
    name: str = "",
) -> Tensor:
    """unit(x [.., m, k] @ w^T, x @ up^T), w and up [n, k], as f32 [.., m, n]; `unit` is the name of
    a gated unit. With ids [T, U], w and up [E, n, k] and x [T, U or 1, k], of the experts chosen:
    f32 [T, U, n]. No ggml peer. Errors: ShapeError.
    """
    chosen = [] if ids is None else [ids]
    return apply("mul_mat_gated", w, x, up, *chosen, name=name, unit=unit, has_ids=bool(chosen))


def mul_mats(w: Tensor, x: Tensor, *more: Tensor, name: str = "") -> Tensor:
    """Products of x [.., m, k] with two to four matrices [n, k], one behind the other: element by
    element x @ w^T [.., m, n], then those of `more`, as one row f32. No ggml peer.

    Errors: ShapeError.
    """
    return apply("mul_mats", w, x, *more, name=name)


def rope_set_rows(
    cache: Tensor,
    x: Tensor,
    positions: Tensor,
    index: Tensor,
    *factors: Tensor,
    name: str = "",
    **attrs: object,
) -> Tensor:
    """cache [C, H, D] with rope(x [T, H, D]) at rows index [T]; overwrites the cache.

    `attrs` are those of `rope`. No ggml peer. Errors: ShapeError.
    """
    given: Attrs = attrs  # type: ignore[assignment]  # checked by the op's rule
    return apply("rope_set_rows", cache, x, positions, index, *factors, name=name, **given)
