"""Triangular systems of equations.

Legend: n equations and unknowns, k right sides, B leading axes.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32
from ggraph.ops.rules import expect, f32, f64, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    a, b = sources
    for t in sources:
        rank(t, 2)
        expect(t.dtype is F32, f"{t.label} is {t.dtype}: expected f32, cast it")
    n = a.shape[-1]
    fits = a.shape[:-1] == (*b.shape[:-2], n) and b.shape[-2] == n
    expect(fits, f"expected [.., n, n] and [.., n, k], got {list(a.shape)} and {list(b.shape)}")
    return Meta(b.shape, F32)


def _solve_tri(a: Array, b: Array) -> Array:
    x = np.zeros(b.shape, np.float64)
    for i in range(a.shape[-1]):
        known = np.einsum("...j,...jk->...k", f64(a[..., i, :i]), x[..., :i, :])
        x[..., i, :] = (f64(b[..., i, :]) - known) / f64(a[..., i, i, None])
    return f32(x)


SOLVE_TRI = register(
    OpSpec(
        "solve_tri",
        infer=rule("solve_tri", "a b", _rule),
        reference=_solve_tri,
        ggml="SOLVE_TRI",
        cost=lambda t: Cost(t.size * t.shape[-2], t.nbytes + sum(s.nbytes for s in t.sources)),
        examples=(
            Example((Arg((4, 4), fill="triangle"), Arg((4, 3)))),
            Example((Arg((2, 3, 33, 33), fill="triangle"), Arg((2, 3, 33, 20)))),
            Example((Arg((5, 5), fill="triangle"), Arg((5, 9)))),
            Example((Arg((1, 1), fill="triangle"), Arg((1, 1)))),
            Example((Arg((0, 3, 3), fill="triangle"), Arg((0, 3, 2)))),
            Example((Arg((3, 3), fill="triangle"), Arg((3, 0)))),
        ),
        doc="solve_tri(a, b): x with a x = b, a lower triangular.",
    )
)


def solve_tri(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """x with a x = b: a [.., n, n] lower triangular, b [.., n, k], f32 -> f32 [.., n, k].

    What lies above a's diagonal is not read; a zero on it gives infinities and NaN, as division
    does. ggml: GGML_OP_SOLVE_TRI. Errors: ShapeError.
    """
    return apply("solve_tri", a, b, name=name)
