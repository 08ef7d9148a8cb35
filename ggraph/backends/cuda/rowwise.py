"""Norms, sums, soft-max, and rows by index on CUDA.

Legend: n row length, T token rows.
"""

from math import prod
from typing import Any

from ggraph.backends.cuda.driver import WIDEST
from ggraph.backends.cuda.kernels import WEIGHTS
from ggraph.backends.cuda.layout import (
    PLAIN,
    fits,
    has_rows,
    is_flat,
    is_plain,
    row_count,
    row_sizes,
    row_steps,
    spread,
)
from ggraph.backends.cuda.lowering import (
    Lowering,
    Rule,
    codes_of,
    number,
    offered,
    parts_of,
    threads,
)
from ggraph.backends.protocol import Launch
from ggraph.dtype import F32, I32, I64, Q8_0
from ggraph.strides import contiguous
from ggraph.tensor import Tensor

HELD, MANY = 2, 4  # as in src/norm.cu and src/rows.cu


def _normable(t: Tensor) -> bool:
    x, *w = t.sources
    return is_plain(x) and has_rows(x) and is_flat(*w)


def _rms_norm(low: Lowering, x: Launch) -> None:
    a, *w = x.sources
    n, strides = a.tensor.shape[-1], row_steps(a.tensor)
    given: dict[str, Any] = {
        "x": low.at(a), "w": low.at(w[0]) if w else 0, "y": low.at(x.result),
        "parts": parts_of(low, x), "codes": codes_of(low, x), "n": n, "shape": row_sizes(a.tensor),
        "strides": strides, "eps": number(x, "eps"),
    }  # fmt: skip
    grid = (row_count(a.tensor), 1, 1)
    places = (given["x"], given["w"], given["y"], 4 * n, *strides)
    if a.tensor.dtype is F32 and not any(p % WIDEST for p in places):
        low.call("rms_norm", grid, threads(n // HELD), **given)
    else:
        low.call("rms_norm_odd", grid, threads(n // HELD), type_=PLAIN[a.tensor.dtype], **given)


def _norm(low: Lowering, x: Launch) -> None:
    a, kernel = x.sources[0], "l2_norm" if x.result.tensor.op == "l2_norm" else "layer_norm"
    n = a.tensor.shape[-1]
    low.call(
        kernel, (row_count(a.tensor), 1, 1), threads(n), x=low.at(a), y=low.at(x.result), n=n,
        shape=row_sizes(a.tensor), strides=row_steps(a.tensor), eps=number(x, "eps"),
        type_=PLAIN[a.tensor.dtype],
    )  # fmt: skip


def _group_norm(low: Lowering, x: Launch) -> None:
    """A group of channels without gaps is one row."""
    a = x.sources[0]
    n = prod(a.tensor.shape[-3:]) // int(number(x, "groups"))
    size = a.tensor.dtype.block_bytes
    rows = a.tensor.size // max(n, 1)
    low.call(
        "layer_norm", (rows, 1, 1), threads(n), x=low.at(a), y=low.at(x.result), n=n,
        shape=(1, 1, 1, max(rows, 1)), strides=(0, 0, 0, n * size), eps=number(x, "eps"),
        type_=PLAIN[a.tensor.dtype],
    )  # fmt: skip


def _summable(t: Tensor) -> bool:
    x = t.sources[0]
    if t.op == "sum":
        return is_plain(x) and x.is_contiguous
    return is_plain(x) and 1 <= len(x.shape) <= 5


def _sum_rows(low: Lowering, x: Launch) -> None:
    a, t = x.sources[0], x.result.tensor
    total = t.op == "sum"
    n = a.tensor.size if total else a.tensor.shape[-1]
    step = a.tensor.dtype.block_bytes if total else a.tensor.strides[-1]
    low.call(
        "sum_rows", (1 if total else row_count(a.tensor), 1, 1), threads(n), x=low.at(a),
        y=low.at(x.result), n=n, step=step, shape=(1, 1, 1, 1) if total else row_sizes(a.tensor),
        strides=(0, 0, 0, 0) if total else row_steps(a.tensor),
        factor=(1 / n if n else float("nan")) if t.op == "mean" else 1.0,
        type_=PLAIN[a.tensor.dtype],
    )  # fmt: skip


def _cumsum(low: Lowering, x: Launch) -> None:
    a = x.sources[0]
    n = a.tensor.shape[-1]
    low.call(
        "cumsum", (row_count(a.tensor), 1, 1), threads(n), x=low.at(a), y=low.at(x.result), n=n,
        step=a.tensor.strides[-1], shape=row_sizes(a.tensor), strides=row_steps(a.tensor),
        type_=PLAIN[a.tensor.dtype],
    )  # fmt: skip


def _weighable(t: Tensor) -> bool:
    x = t.sources[0]
    return is_plain(*t.sources) and has_rows(x) and fits(x) and t.attrs["max_bias"] == 0


def _soft_max(low: Lowering, x: Launch) -> None:
    a, *rest = x.sources
    attrs = x.result.tensor.attrs
    mask = rest.pop(0) if attrs["has_mask"] else None
    shape, n = a.tensor.shape, a.tensor.shape[-1]
    shown = spread(mask.tensor, a.tensor) if mask is not None else (0, 0, 0, 0)
    low.call(
        "soft_max", (row_count(a.tensor), 1, 1), threads(n), x=low.at(a),
        mask=low.at(mask) if mask is not None else 0, sinks=low.at(rest[0]) if rest else 0,
        y=low.at(x.result), n=n, shape=row_sizes(a.tensor), strides=row_steps(a.tensor),
        mask_strides=(0, *shown[:3]), mask_step=shown[3],
        per_head=max(shape[-2], 1) if len(shape) > 1 else 1,
        heads=max(shape[-3], 1) if len(shape) > 2 else 1, scale=number(x, "scale"),
        type_=PLAIN[a.tensor.dtype], mask_type=PLAIN[mask.tensor.dtype] if mask is not None else 0,
    )  # fmt: skip


def _is_index(t: Tensor) -> bool:
    return t.dtype in (I32, I64) and t.is_contiguous


def _gatherable(t: Tensor) -> bool:
    table, ids = t.sources
    inner = table.shape[-1:] if _is_batched(table, ids) else table.shape[1:]
    whole = table.strides[-len(inner) :] == contiguous(inner, table.dtype)
    if _is_batched(table, ids) and not table.is_contiguous:
        return False
    decoded = table.dtype.name in WEIGHTS
    plain = not table.dtype.is_block and not table.dtype.is_float and not _is_batched(table, ids)
    return _is_index(ids) and whole and (decoded or plain)


def _is_batched(table: Tensor, ids: Tensor) -> bool:
    return len(ids.shape) > 1 and len(table.shape) > 2


def _get_rows(low: Lowering, x: Launch) -> None:
    table, ids = x.sources
    a, batched = table.tensor, _is_batched(table.tensor, ids.tensor)
    axis = len(a.shape) - 2 if batched else 0
    k = prod(a.shape[axis + 1 :])
    given: dict[str, Any] = {
        "table": low.at(table), "ids": low.at(ids), "y": low.at(x.result), "rows": a.shape[axis],
        "row_stride": a.strides[axis], "id_type": PLAIN[ids.tensor.dtype],
    }  # fmt: skip
    grid = (ids.tensor.size, 1, 1)
    if a.dtype.name not in WEIGHTS:
        low.call("get_rows_raw", grid, 128, bytes=k * a.dtype.block_bytes, **given)
        return
    low.call(
        "get_rows", grid, min(256, threads(k // 2)), type=a.dtype.name, **given, k=k,
        batch_stride=a.shape[axis] * a.strides[axis] if batched else 0,
        per_batch=max(ids.tensor.shape[-1], 1) if batched else max(ids.tensor.size, 1),
    )  # fmt: skip


def _storable(t: Tensor) -> bool:
    cache, rows, index = t.sources
    known = is_plain(cache) or (cache.dtype is Q8_0)
    whole = rows.strides[1:] == contiguous(rows.shape[1:], rows.dtype)
    return known and is_plain(rows) and whole and _is_index(index)


def _set_rows(low: Lowering, x: Launch) -> None:
    cache, rows, index = x.sources
    c, r = cache.tensor, rows.tensor
    n = prod(r.shape[1:])
    low.call(
        "set_rows", (r.shape[0], -(-n // (MANY * 128)), 1), 128, rows=low.at(rows),
        cache=low.at(x.result), index=low.at(index), tokens=r.shape[0], count=c.shape[0], n=n,
        step=r.strides[0], from_=PLAIN[r.dtype], to=-1 if c.dtype is Q8_0 else PLAIN[c.dtype],
        index_type=PLAIN[index.tensor.dtype],
    )  # fmt: skip


RULES: dict[str, Rule] = {
    "rms_norm": Rule(_normable, _rms_norm, offered),
    "rms_norm_mul": Rule(_normable, _rms_norm, offered),
    "norm": Rule(_normable, _norm),
    "l2_norm": Rule(_normable, _norm),
    "group_norm": Rule(
        lambda t: is_plain(t.sources[0]) and t.sources[0].is_contiguous, _group_norm
    ),
    **{name: Rule(_summable, _sum_rows) for name in ("sum", "sum_rows", "mean")},
    "cumsum": Rule(_summable, _cumsum),
    "soft_max": Rule(_weighable, _soft_max),
    "get_rows": Rule(_gatherable, _get_rows),
    "set_rows": Rule(_storable, _set_rows),
}
