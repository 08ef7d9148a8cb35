"""Orders and winners, as i32 indices.

Legend: n row length, k how many. Ties go to the lowest index; NaN counts as the least value.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F16, F32, I32
from ggraph.ops.rules import choice, expect, integer, plain_float, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

ORDERS = ("asc", "desc")


def _sorting_cost(t: Tensor) -> Cost:
    """n log n comparisons per row."""
    x = t.sources[0]
    return Cost(x.size * max(1, x.shape[-1].bit_length()), x.nbytes + t.nbytes)


def _row_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x = sources[0]
    rank(x, 1)
    plain_float(x)
    expect(x.shape[-1] < 1 << 31, f"{x.shape[-1]} columns do not fit i32 indices")
    return Meta(x.shape, I32)


def _argsort_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    choice(attrs, "order", ORDERS)
    return _row_rule(sources, attrs)


def _argsort(x: Array, *, order: str) -> Array:
    keys = np.where(np.isnan(x), -np.inf, x)
    ranked = np.argsort(keys if order == "asc" else -keys, axis=-1, kind="stable")
    return ranked.astype(np.int32)


ARGSORT = register(
    OpSpec(
        "argsort",
        infer=rule("argsort", "x", _argsort_rule),
        reference=_argsort,
        ggml="ARGSORT",
        cost=_sorting_cost,
        examples=(
            Example((Arg((3, 7)),), {"order": "asc"}),
            Example((Arg((2, 3, 37)),), {"order": "desc"}),
            Example((Arg((4, 9), F32, "ids:3"),), {"order": "desc"}),
            Example((Arg((4, 9), F16, "ids:3"),), {"order": "asc"}),
            Example((Arg((1,)),), {"order": "asc"}),
            Example((Arg((0, 5)),), {"order": "asc"}),
        ),
        doc="argsort(x, order): the indices that put each row in order.",
    )
)


def _top_k_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, k = sources[0], integer(attrs, "k")
    meta = _row_rule(sources, attrs)
    expect(1 <= k <= x.shape[-1], f"k={k}: expected 1 to {x.shape[-1]}")
    return Meta((*meta.shape[:-1], k), I32)


def _top_k(x: Array, *, k: int) -> Array:
    return _argsort(x, order="desc")[..., :k]


TOP_K = register(
    OpSpec(
        "top_k",
        infer=rule("top_k", "x", _top_k_rule),
        reference=_top_k,
        ggml="TOP_K",
        cost=_sorting_cost,
        examples=(
            Example((Arg((3, 7)),), {"k": 2}),
            Example((Arg((2, 37)),), {"k": 37}),
            Example((Arg((4, 9), F32, "ids:3"),), {"k": 4}),
            Example((Arg((1,)),), {"k": 1}),
            Example((Arg((0, 5)),), {"k": 3}),
        ),
        doc="top_k(x, k): the indices of the k greatest of each row, greatest first.",
    )
)


def _argmax_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x = sources[0]
    shape = _row_rule(sources, attrs).shape
    expect(x.shape[-1] > 0, "rows of no element have no greatest")
    return Meta(shape[:-1], I32)


def _argmax(x: Array) -> Array:
    return np.asarray(np.where(np.isnan(x), -np.inf, x).argmax(-1), np.int32)


ARGMAX = register(
    OpSpec(
        "argmax",
        infer=rule("argmax", "x", _argmax_rule),
        reference=_argmax,
        ggml="ARGMAX",
        examples=(
            Example((Arg((3, 7)),)),
            Example((Arg((2, 3, 37)),)),
            Example((Arg((4, 9), F32, "ids:3"),)),
            Example((Arg((4, 9), F16),)),
            Example((Arg((1,)),)),
            Example((Arg((0, 5)),)),
        ),
        doc="argmax(x): the index of the greatest element of each row.",
    )
)


def argsort(x: Tensor, order: str = "asc", *, name: str = "") -> Tensor:
    """Indices that sort each row of x [..., n] (plain float) "asc" or "desc" -> i32 [..., n].

    Ties: lowest index first. ggml: GGML_OP_ARGSORT. Errors: ShapeError.
    """
    return apply("argsort", x, name=name, order=order)


def top_k(x: Tensor, k: int, *, name: str = "") -> Tensor:
    """Indices of the k greatest of each row of x [..., n] (plain float) -> i32 [..., k].

    Greatest first, ties by lowest index. ggml: GGML_OP_TOP_K. Errors: ShapeError unless k in 1..n.
    """
    return apply("top_k", x, name=name, k=k)


def argmax(x: Tensor, *, name: str = "") -> Tensor:
    """Index of the greatest of each row of x [..., n] (plain float) -> i32 [...].

    Ties: lowest index. ggml: GGML_OP_ARGMAX. Errors: ShapeError for rows of no element.
    """
    return apply("argmax", x, name=name)
