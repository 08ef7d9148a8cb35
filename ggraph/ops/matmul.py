"""Matrix products.

Legend: m rows, n outputs, k inner size, B leading axes; T tokens, U experts per token, E experts.
Weights come first, as in ggml, and may be of any float type; x is of a plain float type, or A8.
Products and sums are float32.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ggraph.dtype import A8, F16, F32, I32, Q4_0, Q8_0
from ggraph.errors import InputError
from ggraph.ops.rules import expect, f32, index_type, plain_float, rank, real_valued, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _mul_mat_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    w, x = sources
    rank(w, 2)
    rank(x, 2, None)
    real_valued(w)
    if x.dtype is not A8:
        plain_float(x)
    (*many, n, k), rows = w.shape, x.shape
    expect(k == rows[-1], lambda: f"inner sizes {k} and {rows[-1]} differ")
    expect(len(w.shape) <= len(rows), lambda: f"{w.label} has more axes than {x.label}")
    pairs = zip(reversed(many), reversed(rows[:-2]), strict=False)
    fits = not many or all(b % a == 0 if a else b == 0 for a, b in pairs)
    expect(fits, lambda: f"leading axes {list(rows[:-2])} are no multiple of {many}")
    return Meta((*rows[:-1], n), F32)


def _paired(w: Array, x: Array) -> tuple[Array, Array]:
    """Each leading axis of x as (w's, times), so that slice i meets slice i // times of w: both
    broadcast then. w [Bw.., n, k], x [B.., m, k]."""
    own = (1,) * (x.ndim - w.ndim) + w.shape[:-2]
    pairs = [n for a, b in zip(own, x.shape[:-2], strict=True) for n in (a, b // a if a else 0)]
    spread = [n for a in own for n in (a, 1)]
    return w.reshape(*spread, *w.shape[-2:]), x.reshape(*pairs, *x.shape[-2:])


def _mul_mat(w: Array, x: Array) -> Array:
    if w.ndim == 2:  # one product for all leading axes
        flat = f32(x).reshape(prod(x.shape[:-1]), x.shape[-1]) @ f32(w).T  # [B*m, k] @ [k, n]
        return flat.reshape(*x.shape[:-1], w.shape[0])
    matrices, rows = _paired(f32(w), f32(x))
    return (rows @ matrices.swapaxes(-1, -2)).reshape(*x.shape[:-1], w.shape[-2])


def _product_cost(t: Tensor) -> Cost:
    w, x = t.sources[:2]
    return Cost(2 * t.size * x.shape[-1], w.nbytes + x.nbytes + t.nbytes)


MUL_MAT = register(
    OpSpec(
        "mul_mat",
        infer=rule("mul_mat", "w x", _mul_mat_rule),
        reference=_mul_mat,
        ggml="MUL_MAT",
        cost=_product_cost,
        examples=(
            Example((Arg((6, 64)), Arg((3, 64)))),
            Example((Arg((6, 64), Q8_0), Arg((1, 64))), tolerance=2e-2),
            Example((Arg((5, 64), Q4_0), Arg((2, 3, 64))), tolerance=2e-2),
            Example((Arg((5, 64), Q4_0), Arg((3, 64), A8)), tolerance=2e-2),
            Example((Arg((6, 37), F16), Arg((3, 37), F16)), tolerance=2e-3),
            Example((Arg((2, 5, 8)), Arg((4, 3, 8)))),
            Example((Arg((1, 2, 5, 8)), Arg((3, 2, 4, 8)))),
            Example((Arg((1, 1)), Arg((1, 1)))),
            Example((Arg((6, 8)), Arg((0, 8)))),
            Example((Arg((6, 0)), Arg((3, 0)))),
        ),
        doc="mul_mat(w, x): x @ w^T in float32; w repeats over x's leading axes.",
    )
)


def _mul_mat_id_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    w, x, ids = sources
    rank(w, 3, 3)
    rank(x, 3, 3)
    rank(ids, 2, 2)
    real_valued(w)
    if x.dtype is not A8:
        plain_float(x)
    index_type(ids)
    expect(w.shape[-1] == x.shape[-1], f"inner sizes {w.shape[-1]} and {x.shape[-1]} differ")
    t, u = ids.shape
    expect(x.shape[:2] in ((t, u), (t, 1)), f"expected {x.label} [{t}, {u} or 1, {x.shape[2]}]")
    return Meta((t, u, w.shape[1]), F32)


def check_ids(ids: Array, count: int, what: str) -> None:
    """InputError unless every id is in [0, count)."""
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise InputError(f"{what}: ids {ids.min()} .. {ids.max()} leave [0, {count})")


def _mul_mat_id(w: Array, x: Array, ids: Array) -> Array:
    check_ids(ids, w.shape[0], "mul_mat_id")
    wide = np.broadcast_to(f32(x), (*ids.shape, x.shape[-1]))  # [T, U, k]
    out = np.zeros((*ids.shape, w.shape[1]), np.float32)
    for expert in np.unique(ids):
        chosen = ids == expert  # [T, U]
        out[chosen] = wide[chosen] @ f32(w[expert]).T
    return out


def _mul_mat_id_cost(t: Tensor) -> Cost:
    """Only the experts that can be chosen are read: at most one per token and slot."""
    w, x = t.sources[:2]
    used = t.shape[0] * t.shape[1]
    return Cost(2 * t.size * x.shape[-1], chosen_bytes(w, used) + x.nbytes + t.nbytes)


def chosen_bytes(w: Tensor, used: int) -> int:
    """Bytes of those of the experts w [E, n, k] that `used` choices may name."""
    return w.nbytes * min(w.shape[0], used) // max(w.shape[0], 1)


MUL_MAT_ID = register(
    OpSpec(
        "mul_mat_id",
        infer=rule("mul_mat_id", "w x ids", _mul_mat_id_rule),
        reference=_mul_mat_id,
        picks=(0, 2),
        limits=lambda t: {2: t.sources[0].shape[0]},
        ggml="MUL_MAT_ID",
        cost=_mul_mat_id_cost,
        examples=(
            Example((Arg((4, 6, 8)), Arg((3, 2, 8)), Arg((3, 2), I32, "ids:4"))),
            Example((Arg((4, 6, 8)), Arg((3, 1, 8)), Arg((3, 2), I32, "ids:4"))),
            Example(
                (Arg((3, 5, 64), Q8_0), Arg((2, 1, 64)), Arg((2, 2), I32, "ids:3")), tolerance=2e-2
            ),
            Example(
                (Arg((3, 5, 64), Q4_0), Arg((2, 2, 64), A8), Arg((2, 2), I32, "ids:3")),
                tolerance=2e-2,
            ),
            Example((Arg((1, 1, 1)), Arg((1, 1, 1)), Arg((1, 1), I32, "ids:1"))),
            Example((Arg((4, 6, 8)), Arg((0, 2, 8)), Arg((0, 2), I32, "ids:4"))),
        ),
        doc="mul_mat_id(w, x, ids): row [t, u] is x[t, u] (or x[t, 0]) @ w[ids[t, u]]^T.",
    )
)


def _out_prod_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    a, b = sources
    rank(a, 2)
    rank(b, 2)
    plain_float(a)
    plain_float(b)
    expect(a.shape[-2] == b.shape[-2], f"inner sizes {a.shape[-2]} and {b.shape[-2]} differ")
    expect(len(a.shape) <= len(b.shape), f"{a.label} has more axes than {b.label}")
    pairs = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    fits = all(q % p == 0 if p else q == 0 for p, q in pairs)
    expect(fits, f"leading axes {list(b.shape[:-2])} are no multiple of {list(a.shape[:-2])}")
    return Meta((*b.shape[:-2], b.shape[-1], a.shape[-1]), F32)


def _out_prod(a: Array, b: Array) -> Array:
    first, second = _paired(f32(a), f32(b))
    return (second.swapaxes(-1, -2) @ first).reshape(*b.shape[:-2], b.shape[-1], a.shape[-1])


OUT_PROD = register(
    OpSpec(
        "out_prod",
        infer=rule("out_prod", "a b", _out_prod_rule),
        reference=_out_prod,
        ggml="OUT_PROD",
        cost=lambda t: Cost(
            2 * t.size * t.sources[0].shape[-2], t.nbytes + sum(s.nbytes for s in t.sources)
        ),
        examples=(
            Example((Arg((4, 5)), Arg((4, 3)))),
            Example((Arg((2, 4, 5)), Arg((6, 4, 3)))),
            Example((Arg((1, 1)), Arg((1, 1)))),
            Example((Arg((0, 5)), Arg((0, 3)))),
        ),
        doc="out_prod(a, b): b^T @ a, the sum over rows of outer products.",
    )
)


def mul_mat(w: Tensor, x: Tensor, *, name: str = "") -> Tensor:
    """x @ w^T: w [Bw.., n, k] of any float type, x [B.., m, k] plain float -> f32 [B.., m, n].

    Each leading size of x is a multiple of w's, and slice i uses w's slice i // (x's / w's).
    ggml: GGML_OP_MUL_MAT. Errors: ShapeError.
    """
    return apply("mul_mat", w, x, name=name)


def mul_mat_id(w: Tensor, x: Tensor, ids: Tensor, *, name: str = "") -> Tensor:
    """Per token and slot another matrix: w [E, n, k], x [T, U or 1, k], ids i32 [T, U].

    Gives f32 [T, U, n]. ggml: GGML_OP_MUL_MAT_ID. Errors: ShapeError; InputError at run time for
    ids outside [0, E).
    """
    return apply("mul_mat_id", w, x, ids, name=name)


def out_prod(a: Tensor, b: Tensor, *, name: str = "") -> Tensor:
    """b^T @ a: a [.., k, m], b [.., k, n], plain float -> f32 [.., n, m]; a repeats as in mul_mat.

    ggml: GGML_OP_OUT_PROD. Errors: ShapeError.
    """
    return apply("out_prod", a, b, name=name)
