"""Lowerings of products with stored matrices, and of rows taken from tables."""

from ggraph.backends.cpu import cache
from ggraph.backends.cpu.lowering import Lowering
from ggraph.backends.cpu.needs import (
    is_weight,
    looks_up,
    multiplies,
    multiplies_by_id,
    takes_floats,
)
from ggraph.backends.cpu.tiles import activation_bytes, layout_of, packed_bytes
from ggraph.backends.protocol import Launch
from ggraph.dtype import A8, I32


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
    """Chosen rows of a tensor that is no weight, such as a cache."""
    rows, ids = x.sources
    t = rows.tensor
    if is_weight(t) or len(t.shape) != 2 or t.dtype.name not in cache.GATHER:
        return False
    if not t.is_contiguous or ids.tensor.dtype is not I32 or not ids.tensor.is_contiguous:
        return False
    limit, n = t.shape
    low.add(
        "gather_" + t.dtype.name, x=low.at(rows), ids=low.at(ids), y=low.at(x.result),
        m=ids.tensor.size, n=n, xs=t.strides[0], ys=n * 4, limit=limit,
    )  # fmt: skip
    return True
