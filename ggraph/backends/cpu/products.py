"""Lowerings of products with stored matrices, and of rows taken from tables."""

from ggraph.backends.cpu import cache
from ggraph.backends.cpu.lowering import Lowering, is_rows, is_weight
from ggraph.backends.cpu.tiles import (
    LAYOUTS,
    FloatLayout,
    activation_bytes,
    layout_of,
    packed_bytes,
)
from ggraph.backends.protocol import Launch
from ggraph.dtype import A8, I32


def mul_mat(low: Lowering, x: Launch) -> bool:
    """A stored matrix times float rows, plus a third source where there is one.

    Other products are rare and stay with the reference.
    """
    w, a, *rest = x.sources
    k, ready = w.tensor.shape[-1], a.tensor.dtype is A8 and a.tensor.is_contiguous
    if not (is_weight(w) and len(w.tensor.shape) == 2 and k and (ready or is_rows(a.tensor))):
        return False
    if w.tensor.dtype not in LAYOUTS or (w.tensor.dtype.is_block and k % 32):
        return False
    m, n = a.tensor.size // k, w.tensor.shape[0]
    if rest and not is_rows(rest[0].tensor):
        return False
    packed = low.weight(w)
    layout = layout_of(packed.dtype)
    plain = isinstance(layout, FloatLayout)
    if plain and ready:
        return False
    blocks = [] if plain or ready else [low.blocks(a, m, k)]
    source = blocks[0] if blocks else low.at(a)
    step = k * 4 if plain else activation_bytes(k)
    low.add(
        "matmul_" + layout.name, uses=blocks, w=packed.data, x=source, y=low.at(x.result),
        n=n, k=k, m=m, xs=step, ys=n * 4,
        add=low.at(rest[0]) if rest else 0, adds=n * 4 if rest else 0,
    )  # fmt: skip
    return True


def mul_mat_id(low: Lowering, x: Launch) -> bool:
    """Products of every token with the experts chosen for it."""
    w, a, ids = x.sources
    experts, n, k = w.tensor.shape
    plain = is_rows(a.tensor) and ids.tensor.dtype is I32 and ids.tensor.is_contiguous
    if not is_weight(w) or w.tensor.dtype not in LAYOUTS or not plain:
        return False
    packed = low.weight(w)
    layout = layout_of(packed.dtype)
    floats = isinstance(layout, FloatLayout)
    if not floats and k % 32:
        return False
    tokens, own = a.tensor.shape[:2]
    blocks = [] if floats else [low.blocks(a, tokens * own, k)]
    row = k * 4 if floats else activation_bytes(k)
    low.add(
        "matmul_id_" + layout.name, uses=blocks, w=packed.data, ids=low.at(ids),
        x=blocks[0] if blocks else low.at(a), y=low.at(x.result), n=n, k=k, m=ids.tensor.size,
        u=ids.tensor.shape[1], xs=row * own, xu=row if own > 1 else 0, ys=n * 4,
        es=packed_bytes(packed.dtype, n, k), experts=experts,
    )  # fmt: skip
    return True


def get_rows(low: Lowering, x: Launch) -> bool:
    """Rows of a table; an id beyond it gives a row that is not a number."""
    table, ids = x.sources
    t = table.tensor
    if len(t.shape) != 2 or ids.tensor.dtype is not I32 or not ids.tensor.is_contiguous:
        return False
    if not is_weight(table):
        return _gather(low, x)
    if t.dtype not in LAYOUTS:
        return False
    packed = low.weight(table)
    n, k = t.shape
    low.add(
        "rows_" + layout_of(packed.dtype).name, w=packed.data, ids=low.at(ids),
        y=low.at(x.result), n=n, k=k, m=ids.tensor.size, ys=k * 4,
    )  # fmt: skip
    return True


def _gather(low: Lowering, x: Launch) -> bool:
    """Chosen rows of a tensor that is no weight, such as a cache."""
    rows, ids = x.sources
    t = rows.tensor
    if t.dtype.name not in cache.GATHER or not t.is_contiguous:
        return False
    limit, n = t.shape
    low.add(
        "gather_" + t.dtype.name, x=low.at(rows), ids=low.at(ids), y=low.at(x.result),
        m=ids.tensor.size, n=n, xs=t.strides[0], ys=n * 4, limit=limit,
    )  # fmt: skip
    return True
