"""Mixture-of-experts parts: which experts, by what shares, and their results put together.

Legend: T tokens, X experts, U experts per token, E width, n row length.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32, I32
from ggraph.ops.attention import soft_max
from ggraph.ops.matmul import check_ids
from ggraph.ops.rules import expect, f32, f64, flag, index_type, plain_float, rank, real, rule
from ggraph.ops.sort import top_k
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _shares_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    chances, ids = sources
    rank(chances, 2, 2)
    rank(ids, 2, 2)
    index_type(ids)
    expect(chances.dtype is F32, f"{chances.label}: expected f32, got {chances.dtype}")
    expect(ids.shape[0] == chances.shape[0], f"expected {ids.label} [{chances.shape[0]}, U]")
    flag(attrs, "normalise")
    real(attrs, "scale")
    return Meta(ids.shape, F32)


def _shares(chances: Array, ids: Array, *, normalise: bool, scale: float) -> Array:
    check_ids(ids, chances.shape[1], "moe_shares")
    picked = f64(np.take_along_axis(chances, ids.astype(np.int64), -1))
    if normalise:
        picked = picked / picked.sum(-1, keepdims=True)
    return f32(picked * scale)


MOE_SHARES = register(
    OpSpec(
        "moe_shares",
        infer=rule("moe_shares", "chances ids", _shares_rule),
        reference=_shares,
        limits=lambda t: {1: t.sources[0].shape[1]},
        examples=(
            Example(
                (Arg((3, 8), fill="positive"), Arg((3, 2), I32, "ids:8")),
                {"normalise": True, "scale": 1.0},
            ),
            Example(
                (Arg((4, 37), fill="positive"), Arg((4, 5), I32, "ids:37")),
                {"normalise": False, "scale": 2.5},
            ),
            Example(
                (Arg((1, 1), fill="positive"), Arg((1, 1), I32, "ids:1")),
                {"normalise": True, "scale": 1.5},
            ),
            Example((Arg((0, 8)), Arg((0, 2), I32, "ids:8")), {"normalise": True, "scale": 1.0}),
        ),
        doc="moe_shares(chances, ids): the chances of the chosen, which may be made to sum to 1.",
    )
)


def _mix_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    values, shares = sources
    rank(values, 3, 3)
    for t in (values, shares):
        expect(t.dtype is F32, f"{t.label}: expected f32, got {t.dtype}")
    expect(shares.shape == values.shape[:2], f"expected {shares.label} {list(values.shape[:2])}")
    return Meta((values.shape[0], values.shape[2]), F32)


def _mix(values: Array, shares: Array) -> Array:
    return f32((f64(values) * shares[:, :, None]).sum(1))


MOE_MIX = register(
    OpSpec(
        "moe_mix",
        infer=rule("moe_mix", "values shares", _mix_rule),
        reference=_mix,
        cost=lambda t: Cost(2 * t.sources[0].size, t.nbytes + t.sources[0].nbytes),
        examples=(
            Example((Arg((3, 2, 8)), Arg((3, 2)))),
            Example((Arg((2, 5, 67)), Arg((2, 5)))),
            Example((Arg((1, 1, 1)), Arg((1, 1)))),
            Example((Arg((0, 2, 8)), Arg((0, 2)))),
        ),
        doc="moe_mix(values, shares): the sum of each token's experts' results, by their shares.",
    )
)


def _add_id_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, rows, ids = sources
    rank(x, 3, 3)
    rank(rows, 2, 2)
    for t in (x, rows):
        plain_float(t)
    index_type(ids)
    expect(ids.shape == x.shape[:2], f"expected {ids.label} {list(x.shape[:2])}")
    expect(rows.shape[1] == x.shape[2], f"expected {rows.label} [X, {x.shape[2]}]")
    return Meta(x.shape, F32)


def _add_id(x: Array, rows: Array, ids: Array) -> Array:
    check_ids(ids, rows.shape[0], "add_id")
    return f32(x + rows[ids])


ADD_ID = register(
    OpSpec(
        "add_id",
        infer=rule("add_id", "x rows ids", _add_id_rule),
        reference=_add_id,
        limits=lambda t: {2: t.sources[1].shape[0]},
        ggml="ADD_ID",
        cost=lambda t: Cost(t.size, 3 * t.nbytes),
        inplace_ok=(0,),
        examples=(
            Example((Arg((3, 2, 8)), Arg((4, 8)), Arg((3, 2), I32, "ids:4"))),
            Example((Arg((2, 5, 67)), Arg((9, 67)), Arg((2, 5), I32, "ids:9"))),
            Example((Arg((1, 1, 1)), Arg((1, 1)), Arg((1, 1), I32, "ids:1"))),
            Example((Arg((0, 2, 8)), Arg((4, 8)), Arg((0, 2), I32, "ids:4"))),
        ),
        doc="add_id(x, rows, ids): x[t, u] + rows[ids[t, u]].",
    )
)


def moe_shares(
    chances: Tensor, ids: Tensor, *, normalise: bool = True, scale: float = 1.0, name: str = ""
) -> Tensor:
    """chances f32 [T, X] of the experts ids i32 [T, U] -> f32 [T, U], times `scale`.

    With `normalise` the chosen ones of a row are divided by their sum first. No ggml peer
    (llama.cpp's `build_moe_ffn` composes it). Errors: ShapeError; InputError at run time for ids
    outside [0, X).
    """
    return apply("moe_shares", chances, ids, name=name, normalise=normalise, scale=float(scale))


def moe_mix(values: Tensor, shares: Tensor, *, name: str = "") -> Tensor:
    """Sum over experts of values f32 [T, U, E] by their shares f32 [T, U] -> f32 [T, E].

    No ggml peer (llama.cpp's `build_moe_ffn` composes it). Errors: ShapeError.
    """
    return apply("moe_mix", values, shares, name=name)


def add_id(x: Tensor, rows: Tensor, ids: Tensor, *, name: str = "") -> Tensor:
    """x [T, U, n] plus, for each token and expert, its row of rows [X, n]; ids i32 [T, U].

    ggml: GGML_OP_ADD_ID. Errors: ShapeError; InputError at run time for ids outside [0, X).
    """
    return apply("add_id", x, rows, ids, name=name)


def moe_route(logits: Tensor, used: int, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Choose experts: logits [T, X] -> ids i32 [T, U] and shares f32 [T, U].

    Shares are soft_max chances, divided by the sum of the chosen where `normalise`. Errors:
    ShapeError unless `used` is in 1 .. X.
    """
    rank(logits, 2, 2)
    chances = soft_max(logits)  # [T, X]
    ids = top_k(chances, used)
    return ids, moe_shares(chances, ids, normalise=normalise)
