"""Rows by index: gather from tables, scatter into caches.

Legend: V table rows, n row length, B leading axes, T ids, C cache rows.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import BF16, F16, F32, I32, I64, Q4_0, Q4_1, Q8_0
from ggraph.ops.matmul import check_ids
from ggraph.ops.rules import (
    ROW_INDEX,
    expect,
    index_type,
    owns_all,
    plain_float,
    rank,
    rule,
)
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _batched(table: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether each leading index has its own table: ids [B.., T] of a table [B.., V, n]."""
    return len(ids) > 1 and len(table) > 2


def _get_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    table, ids = sources
    rank(table, 2)
    rank(ids, 1)
    index_type(ids, *ROW_INDEX)
    dtype = F32 if table.dtype.is_float else table.dtype
    if not _batched(table.shape, ids.shape):
        return Meta((*ids.shape, *table.shape[1:]), dtype)
    lead = ids.shape[:-1]
    expect(table.shape[:-2] == lead, f"expected {table.label} [{', '.join(map(str, lead))}, V, n]")
    return Meta((*ids.shape, table.shape[-1]), dtype)


def _get_rows(table: Array, ids: Array) -> Array:
    if not _batched(table.shape, ids.shape):
        check_ids(ids, table.shape[0], "get_rows")
        return table[ids]
    check_ids(ids, table.shape[-2], "get_rows")
    return np.take_along_axis(table, ids[..., None].astype(np.int64), -2)  # [B.., T, n]


def _get_limits(t: Tensor) -> dict[int, int]:
    table, ids = (s.shape for s in t.sources)
    return {1: table[-2] if _batched(table, ids) else table[0]}


def _get_cost(t: Tensor) -> Cost:
    table, ids = t.sources
    row = table.dtype.row_bytes(table.shape[-1]) * t.size // max(t.shape[-1], 1)
    return Cost(0, t.nbytes + ids.nbytes + row)


GET_ROWS = register(
    OpSpec(
        "get_rows",
        infer=rule("get_rows", "table ids", _get_rule),
        reference=_get_rows,
        ggml="GET_ROWS",
        limits=_get_limits,
        cost=_get_cost,
        examples=(
            Example((Arg((7, 5)), Arg((3,), I32, "ids:7"))),
            Example((Arg((7, 5), F16), Arg((3,), I64, "ids:7"))),
            Example((Arg((7, 5), BF16), Arg((2, 3), I32, "ids:7"))),
            Example((Arg((7, 64), Q8_0), Arg((4,), I32, "ids:7"))),
            Example((Arg((7, 64), Q4_1), Arg((4,), I32, "ids:7"))),
            Example((Arg((7, 5), I32, "ids:99"), Arg((3,), I32, "ids:7"))),
            Example((Arg((7, 2, 3)), Arg((4,), I32, "ids:7"))),
            Example((Arg((3, 8, 1)), Arg((3, 2), I32, "ids:8"))),
            Example((Arg((1, 1)), Arg((1,), I32, "ids:1"))),
            Example((Arg((7, 5)), Arg((0,), I32, "ids:7"))),
        ),
        doc="get_rows(table, ids): the rows of `table` that `ids` name.",
    )
)


def _set_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    cache, rows, index = sources
    rank(cache, 2)
    rank(index, 1, 1)
    owns_all(cache)
    expect(
        cache.dtype.is_float,
        f"{cache.label}: expected a float type, got {cache.dtype}; ops.cpy, ops.set overwrite it",
    )
    plain_float(rows)
    index_type(index, *ROW_INDEX)
    wanted = (*index.shape, *cache.shape[1:])
    expect(rows.shape == wanted, f"expected {rows.label} {list(wanted)}")
    return Meta(cache.shape, cache.dtype)


def _set_rows(cache: Array, rows: Array, index: Array) -> Array:
    check_ids(index, cache.shape[0], "set_rows")
    for row, i in zip(rows, index, strict=True):  # in order: of two writes the last stays
        cache[i] = row
    return cache


def _set_cost(t: Tensor) -> Cost:
    """Only the written rows count, not the cache."""
    _, rows, index = t.sources
    written = t.nbytes // max(t.shape[0], 1) * index.size
    return Cost(rows.size, written + rows.nbytes + index.nbytes)


SET_ROWS = register(
    OpSpec(
        "set_rows",
        infer=rule("set_rows", "cache rows index", _set_rule),
        reference=_set_rows,
        ggml="SET_ROWS",
        limits=lambda t: {2: t.shape[0]},
        cost=_set_cost,
        overwrites=0,
        examples=(
            Example((Arg((7, 5)), Arg((3, 5)), Arg((3,), I32, "ids:7"))),
            Example((Arg((7, 2, 3), F16), Arg((4, 2, 3)), Arg((4,), I64, "ids:7"))),
            Example((Arg((7, 5), BF16), Arg((2, 5), F16), Arg((2,), I32, "ids:7"))),
            Example((Arg((7, 2, 32), Q8_0), Arg((3, 2, 32)), Arg((3,), I32, "ids:7"))),
            Example((Arg((7, 64), Q4_0), Arg((2, 64)), Arg((2,), I32, "ids:7"))),
            Example((Arg((2, 4)), Arg((6, 4)), Arg((6,), I32, "ids:2"))),
            Example((Arg((1, 1)), Arg((1, 1)), Arg((1,), I32, "ids:1"))),
            Example((Arg((7, 5)), Arg((0, 5)), Arg((0,), I32, "ids:7"))),
        ),
        doc="set_rows(cache, rows, index): cache with row index[t] replaced by rows[t].",
    )
)


def get_rows(table: Tensor, ids: Tensor, *, name: str = "") -> Tensor:
    """Rows of a table of any dtype and layout; ids i32 or i64. Result f32 (integers keep theirs).

    table [V, n], ids [T..] -> [T.., n]; table [V, ...], ids [T] -> [T, ...]; as in ggml, with one
    table per leading index: table [B.., V, n], ids [B.., T] -> [B.., T, n]. ggml: GGML_OP_GET_ROWS.
    Errors: ShapeError; InputError at run time for ids outside [0, V).
    """
    return apply("get_rows", table, ids, name=name)


def set_rows(cache: Tensor, rows: Tensor, index: Tensor, *, name: str = "") -> Tensor:
    """cache [C, ...] with rows [T, ...] at index i32 or i64 [T]; overwrites the cache.

    Rows (plain float) are rounded or quantised to the cache's dtype; of two rows for one place the
    last stays. The cache is a whole value (a reshape of one serves). ggml: GGML_OP_SET_ROWS.
    Errors: ShapeError; InputError at run time for an index outside [0, C).
    """
    return apply("set_rows", cache, rows, index, name=name)
