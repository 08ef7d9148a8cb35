"""Lowerings of products with stored matrices, and of rows taken from tables."""

from math import prod

from ggraph.backends.cpu import cache
from ggraph.backends.cpu.lowering import Lowering
from ggraph.backends.cpu.needs import (
    looks_up,
    multiplies,
    multiplies_by_id,
    takes_floats,
)
from ggraph.backends.cpu.tiles import activation_bytes, layout_of, packed_bytes
from ggraph.backends.protocol import Launch
from ggraph.dtype import A8


def mul_mat(low: Lowering, x: Launch) -> bool:
    """A stored matrix times float rows, plus a third source where there is one.

    Other products are rare and stay with the reference.
    """
    if not multiplies(x.result.tensor, low.exact):
        return False
    w, a, *rest = x.sources
    n, k = w.tensor.shape
    m, floats = a.tensor.size // k, takes_floats(w.tensor, low.exact)
    packed = low.weight(w)
    made = [] if floats or a.tensor.dtype is A8 else [low.rows(x, m, k)]
    low.add(
        "matmul_" + layout_of(packed.dtype).name, uses=made, w=packed.data,
        x=made[0] if made else low.at(a), y=low.at(x.result),
        n=n, k=k, m=m, xs=k * 4 if floats else activation_bytes(k), ys=n * 4,
        add=low.at(rest[0]) if rest else 0, adds=n * 4 if rest else 0,
    )  # fmt: skip
    return True


def mul_mat_id(low: Lowering, x: Launch) -> bool:
    """Products of every token with the experts chosen for it."""
    if not multiplies_by_id(x.result.tensor, low.exact):
        return False
    w, a, ids = x.sources
    experts, n, k = w.tensor.shape
    packed, floats = low.weight(w), takes_floats(w.tensor, low.exact)
    tokens, own = a.tensor.shape[:2]
    made = [] if floats else [low.rows(x, tokens * own, k)]
    row = k * 4 if floats else activation_bytes(k)
    low.add(
        "matmul_id_" + layout_of(packed.dtype).name, uses=made, w=packed.data, ids=low.at(ids),
        x=made[0] if made else low.at(a), y=low.at(x.result), n=n, k=k, m=ids.tensor.size,
        u=ids.tensor.shape[1], xs=row * own, xu=row if own > 1 else 0, ys=n * 4,
        es=packed_bytes(packed.dtype, n, k), experts=experts,
    )  # fmt: skip
    return True


def get_rows(low: Lowering, x: Launch) -> bool:
    """Rows of a table; an id beyond it gives a row that is not a number."""
    if not looks_up(x.result.tensor):
        return _gather(low, x)
    table, ids = x.sources
    packed = low.weight(table)
    n, k = table.tensor.shape
    low.add(
        "rows_" + layout_of(packed.dtype).name, w=packed.data, ids=low.at(ids),
        y=low.at(x.result), n=n, k=k, m=ids.tensor.size, ys=k * 4,
    )  # fmt: skip
    return True


def _gather(low: Lowering, x: Launch) -> bool:
    """Chosen rows of any table without gaps, such as a cache: one table, or one per leading index
    of the ids."""
    rows, ids = x.sources
    t, i = rows.tensor, ids.tensor
    known = t.dtype.name in cache.GATHER and t.is_contiguous and i.is_contiguous
    if not known or (t.dtype.is_block and len(t.shape) > 2):
        return False
    several = len(i.shape) > 1 and len(t.shape) > 2
    tables = prod(i.shape[:-1]) if several else 1
    limit = t.shape[-2] if several else t.shape[0]
    m, n = i.size // tables, t.size // (tables * max(limit, 1))
    row = t.dtype.row_bytes(n)
    for b in range(tables):
        low.add(
            "gather_" + t.dtype.name, x=low.at(rows) + b * limit * row, limit=limit, xs=row,
            ids=low.at(ids) + b * m * i.dtype.block_bytes, ib=i.dtype.block_bytes,
            y=low.at(x.result) + b * m * n * 4, m=m, n=n, ys=n * 4,
        )  # fmt: skip
    return True
