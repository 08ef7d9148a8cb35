"""Ops that move bytes: copies, casts, and writing into a part of a value."""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import BF16, F16, F32, I32, I64, Q4_0, Q8_0, DType, as_dtype, dtype
from ggraph.errors import ShapeError
from ggraph.ops.rules import expect, identity, index_type, integers, moved, owns_all, rule
from ggraph.tensor import (
    Arg,
    Array,
    Attrs,
    Cost,
    DTypeLike,
    Example,
    Meta,
    OpSpec,
    Tensor,
    apply,
    register,
)


def _same(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    return Meta(sources[0].shape, sources[0].dtype)


COPIES = (
    Example((Arg((3, 5)),)),
    Example((Arg((2, 3, 5), F16),)),
    Example((Arg((7,), I32, "ids:9"),)),
    Example((Arg((1, 1)),)),
    Example((Arg((0, 4)),)),
    Example((Arg((2, 64), Q4_0),)),
)

CONT = register(
    OpSpec(
        "cont",
        infer=rule("cont", "x", _same),
        reference=identity,
        ggml="CONT",
        cost=moved,
        examples=COPIES,
        doc="cont(x): x's elements without gaps, in row-major order.",
    )
)
DUP = register(
    OpSpec(
        "dup",
        infer=rule("dup", "x", _same),
        reference=identity,
        ggml="DUP",
        cost=moved,
        examples=COPIES,
        doc="dup(x): a second value equal to x.",
    )
)


def _copy_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    device = attrs.get("device")
    expect(isinstance(device, str) and device != "", f"device={device!r}: expected a name")
    for ids in sources[1:]:
        index_type(ids)
        expect(bool(sources[0].shape), "a scalar has no slices")
        expect(sources[0].is_contiguous, f"{sources[0].label} is not contiguous")
    return _same(sources, attrs)


def _copy_cost(t: Tensor) -> Cost:
    """A partial copy moves at most a slice per index."""
    if len(t.sources) == 1:
        return moved(t)
    slices = max(t.shape[0], 1)
    return Cost(0, 2 * t.nbytes * min(slices, t.sources[1].size) // slices)


def slice_runs(ids: Array, slices: int, nbytes: int) -> tuple[tuple[int, int], ...]:
    """Byte ranges of the slices that `ids` (any shape) name, neighbours merged, in order.

    The tensor has `slices` slices of equal size along its first axis, `nbytes` bytes in all. Ids
    outside of [0, slices) name nothing.
    """
    if not slices:
        return ()
    wanted = np.unique(ids[(ids >= 0) & (ids < slices)])
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
    size = nbytes // slices
    return tuple((int(r[0]) * size, (int(r[-1]) + 1) * size) for r in runs if r.size)


COPY = register(
    OpSpec(
        "copy",
        infer=rule("copy", "x used?", _copy_rule),
        reference=identity,
        ggml="CPY",
        cost=_copy_cost,
        examples=(
            *(Example(e.args, {"device": "elsewhere", "has_used": False}) for e in COPIES),
            Example(
                (Arg((3, 5)), Arg((2, 4), I32, "ids:3")), {"device": "elsewhere", "has_used": True}
            ),
        ),
        doc="copy(x, used?, device): x's value in another device's memory, or its used slices.",
    )
)


def _cast_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, wanted = sources[0], dtype(str(attrs.get("dtype")))
    expect(x.shape != () or not wanted.is_block, f"a scalar is no block of {wanted}")
    if x.shape:
        wanted.row_bytes(x.shape[-1])
    return Meta(x.shape, wanted)


def _cast(x: Array, *, dtype: str) -> Array:
    return x  # storing converts


def _casts(*types: tuple[DType, DType]) -> tuple[Example, ...]:
    def fill(t: DType) -> str:
        return "normal" if t.is_float else "ids:100"

    return tuple(Example((Arg((3, 64), a, fill(a)),), {"dtype": b.name}) for a, b in types)


CAST = register(
    OpSpec(
        "cast",
        infer=rule("cast", "x", _cast_rule),
        reference=_cast,
        ggml="CPY",
        cost=lambda t: Cost(t.size, t.nbytes + t.sources[0].nbytes),
        examples=(
            *_casts((F32, F16), (F16, F32), (F32, BF16), (BF16, F32), (F32, Q8_0), (Q8_0, F32)),
            *_casts((Q8_0, F16), (F32, Q4_0), (I32, F32), (I32, I64), (F32, F32)),
            Example((Arg((1,)),), {"dtype": "f16"}),
            Example((Arg((0, 4)),), {"dtype": "f16"}),
        ),
        doc="cast(x, dtype): x's values in another dtype; floats are cut towards 0 to integers.",
    )
)


def _cpy_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, into = sources
    owns_all(into)
    expect(x.size == into.size, f"{x.size} elements of {x.label}, {into.size} of {into.label}")
    return Meta(into.shape, into.dtype)


def _cpy(x: Array, into: Array) -> Array:
    into.reshape(x.shape)[...] = x  # what is overwritten has no gaps
    return into


CPY = register(
    OpSpec(
        "cpy",
        infer=rule("cpy", "x into", _cpy_rule),
        reference=_cpy,
        ggml="CPY",
        cost=lambda t: Cost(t.size, t.nbytes + t.sources[0].nbytes),
        overwrites=1,
        examples=(
            Example((Arg((3, 4)), Arg((3, 4)))),
            Example((Arg((3, 4)), Arg((2, 6), F16))),
            Example((Arg((2, 32)), Arg((2, 32), Q8_0))),
            Example((Arg((1,)), Arg((1, 1)))),
            Example((Arg((0, 4)), Arg((0, 4)))),
        ),
        doc="cpy(x, into): `into` with all its elements replaced by x's, in row-major order.",
    )
)


def _set_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, part = sources
    owns_all(x)
    expect(not x.dtype.is_block, f"{x.label} is of {x.dtype}: set writes plain types only")
    expect(x.dtype.is_float == part.dtype.is_float, f"{part.dtype} values into {x.dtype}")
    starts = integers(attrs, "starts", len(x.shape))
    if len(part.shape) != len(x.shape):
        raise ShapeError(f"{part.label}: expected {len(x.shape)} axes, got {len(part.shape)}")
    inside = all(a >= 0 and a + n <= m for a, n, m in zip(starts, part.shape, x.shape, strict=True))
    expect(inside, f"{list(part.shape)} at {list(starts)} leaves {list(x.shape)}")
    return Meta(x.shape, x.dtype)


def _set(x: Array, part: Array, *, starts: tuple[int, ...]) -> Array:
    x[tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))] = part
    return x


SET = register(
    OpSpec(
        "set",
        infer=rule("set", "x part", _set_rule),
        reference=_set,
        ggml="SET",
        cost=lambda t: Cost(0, 2 * t.sources[1].nbytes),
        overwrites=0,
        examples=(
            Example((Arg((4, 5)), Arg((2, 3))), {"starts": (1, 2)}),
            Example((Arg((4, 5), F16), Arg((1, 5))), {"starts": (3, 0)}),
            Example((Arg((6,), I32, "ids:9"), Arg((2,), I32, "ids:9")), {"starts": (4,)}),
            Example((Arg((1, 1)), Arg((1, 1))), {"starts": (0, 0)}),
            Example((Arg((4, 5)), Arg((0, 5))), {"starts": (2, 0)}),
        ),
        doc="set(x, part, starts): x with the box that begins at `starts` replaced by `part`.",
    )
)


def cont(x: Tensor, *, name: str = "") -> Tensor:
    """x [...] without gaps in row-major order; any dtype, which is kept. ggml: GGML_OP_CONT."""
    return apply("cont", x, name=name)


def dup(x: Tensor, *, name: str = "") -> Tensor:
    """A second value equal to x [...]; any dtype, which is kept. ggml: GGML_OP_DUP."""
    return apply("dup", x, name=name)


def copy(x: Tensor, device: str, *, used: Tensor | None = None, name: str = "") -> Tensor:
    """x's value in the memory of `device`; planning inserts these. ggml: the scheduler's copies.

    With `used` (indices, any shape) only the slices x[i] for i in `used` are brought, and nobody
    may read the others (facts S12: an MoE layer's experts).
    """
    sources = (x,) if used is None else (x, used)
    return apply("copy", *sources, name=name, device=device, has_used=used is not None)


def cast(x: Tensor, to: DTypeLike, *, name: str = "") -> Tensor:
    """x [..., n] as dtype `to`, rounded to nearest even; integers are cut towards 0.

    ggml: ggml_cast (GGML_OP_CPY). Errors: ShapeError where rows are not whole blocks.
    """
    return apply("cast", x, name=name, dtype=as_dtype(to).name)


def cpy(x: Tensor, into: Tensor, *, name: str = "") -> Tensor:
    """`into` (a whole value) with its elements replaced by x's; overwrites `into`.

    x and into hold the same number of elements; the dtype is into's. ggml: GGML_OP_CPY.
    Errors: ShapeError for unequal sizes, or when `into` is a part of a value.
    """
    return apply("cpy", x, into, name=name)


def set_(x: Tensor, part: Tensor, starts: Sequence[int], *, name: str = "") -> Tensor:
    """x (a whole value, plain dtype) with the box at `starts` replaced; overwrites x.

    part: as many axes as x. ggml: GGML_OP_SET. Errors: ShapeError when the box leaves x.
    """
    return apply("set", x, part, name=name, starts=tuple(starts))
