"""Lowerings of products with stored matrices, and of rows taken from tables."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ggraph.backends.cpu.codegen.simd import ROWS_EACH
from ggraph.backends.cpu.kernels import cache
from ggraph.backends.cpu.kernels.gated import kernel_name
from ggraph.backends.cpu.kernels.tiles import BLOCK, activation_bytes, layout_of, packed_bytes
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import (
    convolves,
    gates,
    gates_at_once,
    joins,
    lays,
    looks_up,
    matrices,
    multiplies,
    multiplies_by_id,
    multiplies_each,
    row_step,
    stores,
    takes_floats,
)
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.dtype import A8, F32, DType
from ggraph.ops.rules import integers
from ggraph.tensor import Array


def mul_mat(low: Lowering, x: Launch) -> bool:
    """A stored matrix times float rows, plus a third source where there is one."""
    if not multiplies(x.result.tensor, low.exact):
        return _multiply_each(low, x)
    add = low.at(x.sources[2]) if len(x.sources) > 2 else 0
    _times(low, x, x.sources[0], low.at(x.result), add=add)
    return True


def mul_mat_gated(low: Lowering, x: Launch) -> bool:
    """Two products and the gated unit of both: many rows by one kernel, where there is one. Of few
    rows each thread takes the columns that it has made, so that nobody waits before the unit."""
    t = x.result.tensor
    if not gates(t, low.exact):
        return False
    w, _, up, *ids = x.sources
    n, m = t.shape[-1], t.size // t.shape[-1]
    if gates_at_once(t, low.exact):
        _gated_at_once(low, x)
        return True
    halves = [x.room("gate"), x.room("up")]
    alike = halves if m <= ROWS_EACH and not ids else []
    for matrix, room in zip((w, up), halves, strict=True):
        if ids:
            _times_chosen(low, x, matrix, ids[0], room, makes=[room])
        else:
            _times(low, x, matrix, room, makes=[room], shared=alike, whole=BLOCK)
    values: dict[str, Any] = {"a": halves[0], "b": halves[1], "as": n * 4, "bs": n * 4}
    end, target = low.target(x)
    low.add(str(t.attrs["unit"]) + end, uses=halves, shared=alike, m=m, n=n, **values, **target)
    return True


def _gated_at_once(low: Lowering, x: Launch) -> None:
    t, (w, a, up, *ids) = x.result.tensor, x.sources
    n, k = w.tensor.shape[-2:]
    gates, ups = low.weight(w), low.weight(up)
    made = [] if a.tensor.dtype is A8 else [low.rows(x, a.tensor.size // k, k)]
    row, layout = activation_bytes(k), layout_of(gates.dtype)
    family = "gated_id_" if ids else "gated_"
    name = kernel_name(family, str(t.attrs["unit"]), layout)
    how = _choice(low, x, w, ids[0], gates.dtype, row) if ids else dict[str, Any](xs=row)
    low.add(
        name, uses=made, **how, w=gates.data, v=ups.data,
        x=made[0] if made else low.at(a), out=low.at(x.result), n=n, k=k, m=t.size // n,
        os=activation_bytes(n),
    )  # fmt: skip


def mul_mats(low: Lowering, x: Launch) -> bool:
    """Products with several matrices, which share no byte: nobody waits between them."""
    t, (w, a, *more) = x.result.tensor, x.sources
    if not joins(t, low.exact):
        return False
    m, at = a.tensor.size // a.tensor.shape[-1], x.result.offset
    for matrix in (w, *more):
        own = Scratch(matrix.tensor.name, x.result.memory, at, m * matrix.tensor.shape[0] * 4)
        _times(low, x, matrix, own, makes=[own])
        at += own.nbytes
    return True


def _times(
    low: Lowering, x: Launch, w: Ref, y: int | Scratch, *, add: int = 0, whole: int = 0, **how: Any
) -> None:
    """Rows of source 1 times a matrix; a thread takes `whole` outputs together, or one tile."""
    a = x.sources[1].tensor
    n, k = w.tensor.shape
    m, floats = a.size // k, takes_floats(w.tensor, low.exact)
    packed = low.weight(w)
    layout = layout_of(packed.dtype)
    made = [] if floats or a.dtype is A8 else [low.rows(x, m, k)]
    low.add(
        "matmul_" + layout.name, uses=made, **how, w=packed.data,
        x=made[0] if made else low.at(x.sources[1]), y=y, n=n, k=k, m=m,
        xs=k * 4 if floats else activation_bytes(k), ys=n * 4, add=add, adds=n * 4 if add else 0,
        unit=max(whole // layout.tile, 1),
    )  # fmt: skip


def _multiply_each(low: Lowering, x: Launch) -> bool:
    """The same with matrices that are computed, or repeat over leading axes of the rows."""
    if not multiplies_each(x.result.tensor):
        return False
    w, a, *rest = x.sources
    n, k = w.tensor.shape[-2:]
    if stores(w.tensor):
        packed = low.weight(w)
        kind, tiles, held = packed.dtype, int(packed.data.ctypes.data), []
    else:
        held = [_laid(low, x, w.tensor.shape, w.tensor.strides)]
        kind, tiles = F32, low.at(held[0])
    size, (*lead, m, _) = packed_bytes(kind, n, k), (1, *a.tensor.shape)
    own = (1,) * (len(lead) + 2 - len(w.tensor.shape)) + w.tensor.shape[:-2]
    *outer, xb, xs, _ = (0, *a.tensor.strides)
    for at in np.ndindex(*lead[:-1]):
        place, matrix = np.ravel_multi_index((*at, 0), lead), 0
        for i, whole, shared in zip((*at, 0), lead, own, strict=True):
            matrix = matrix * shared + i // (whole // shared)
        low.add(
            "matmul_each_" + layout_of(kind).name, uses=held, w=tiles + matrix * size,
            x=low.at(a) + sum(i * s for i, s in zip(at, outer, strict=True)),
            y=low.at(x.result) + int(place) * m * n * 4, n=n, k=k, m=m, xs=xs, ys=n * 4,
            add=low.at(rest[0]) + int(place) * m * n * 4 if rest else 0,
            adds=n * 4 if rest else 0, count=lead[-1], ws=size, group=lead[-1] // own[-1], xb=xb,
        )  # fmt: skip
    return True


def _laid(low: Lowering, x: Launch, shape: Sequence[int], strides: Sequence[int]) -> Scratch:
    """Source 0, matrices [.., n, k], as tiles, which the first launch on it makes."""
    room, raw = x.room("tiles"), x.sources[0]
    if room.ready:
        return room
    (*lead, n, k), (*outer, sb, sn, sk) = (1, *shape), (0, *strides)
    size = packed_bytes(F32, n, k)
    for i, at in enumerate(np.ndindex(*lead[:-1])):
        first = sum(a * s for a, s in zip(at, outer, strict=True))
        low.add(
            "lay_" + raw.tensor.dtype.name, makes=[room], raw=low.at(raw) + first,
            out=low.at(room) + i * lead[-1] * size, n=n, k=k, count=lead[-1], sb=sb, sn=sn, sk=sk,
            ob=size,
        )  # fmt: skip
    return room


def mul_mat_id(low: Lowering, x: Launch) -> bool:
    """Products of every token with the experts chosen for it."""
    if not multiplies_by_id(x.result.tensor, low.exact):
        return False
    w, _, ids = x.sources
    _times_chosen(low, x, w, ids, low.at(x.result))
    return True


def _times_chosen(low: Lowering, x: Launch, w: Ref, ids: Ref, y: int | Scratch, **how: Any) -> None:
    """Rows of source 1 times the experts of `w` that are chosen for them."""
    a, (_, n, k) = x.sources[1], w.tensor.shape
    packed, floats = low.weight(w), takes_floats(w.tensor, low.exact)
    row = k * 4 if floats else activation_bytes(k)
    made = [] if floats or a.tensor.dtype is A8 else [low.rows(x, a.tensor.size // k, k)]
    low.add(
        "matmul_id_" + layout_of(packed.dtype).name, uses=made, **how, w=packed.data,
        x=made[0] if made else low.at(a), y=y, n=n, k=k, m=ids.tensor.size, ys=n * 4,
        **_choice(low, x, w, ids, packed.dtype, row),
    )  # fmt: skip


def _choice(low: Lowering, x: Launch, w: Ref, ids: Ref, dtype: DType, row: int) -> dict[str, Any]:
    """What kernels of experts are told about those, and about the rows, `row` bytes each."""
    experts, n, k = w.tensor.shape
    own = x.sources[1].tensor.shape[1]
    return {
        "ids": low.at(ids), "u": ids.tensor.shape[1], "xs": row * own, "xu": row if own > 1 else 0,
        "es": packed_bytes(dtype, n, k), "experts": experts,
    }  # fmt: skip


def conv_2d(low: Lowering, x: Launch) -> bool:
    """Kernels, stored or computed, at every place of float32 images."""
    t, (w, a) = x.result.tensor, x.sources
    laid: list[Scratch] = []
    matrix: Array | int
    if convolves(t):
        packed = low.weight(w)
        matrix, layout = packed.data, layout_of(packed.dtype)
    elif lays(t):
        _, n, k = matrices(w.tensor)
        laid = [_laid(low, x, (n, k), (k * w.tensor.dtype.block_bytes, w.tensor.dtype.block_bytes))]
        matrix, layout = low.at(laid[0]), layout_of(F32)
    else:
        return False
    images, n, down, across = t.shape
    (s_row, s_column), (d_row, d_column) = (
        integers(t.attrs, "stride"),
        integers(t.attrs, "dilation"),
    )
    xn, si, row, column = a.tensor.strides
    low.add(
        "convolve_" + layout.name, uses=laid, w=matrix, x=low.at(a), y=low.at(x.result),
        n=n, k=prod(w.tensor.shape[1:]), images=images, m=down * across, across=across,
        i=w.tensor.shape[1], h=w.tensor.shape[2], width=w.tensor.shape[3], xn=xn,
        xr=row * s_row, xc=column * s_column, si=si, sh=row * d_row, sw=column * d_column,
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
    """Chosen rows of a table, such as a cache: one, or without gaps one per leading index of the
    ids."""
    rows, ids = x.sources
    t, i = rows.tensor, ids.tensor
    several = len(i.shape) > 1 and len(t.shape) > 2
    known = t.dtype.name in cache.GATHERED and i.is_contiguous
    if not known or (t.dtype.is_block and len(t.shape) > 2):
        return False
    tables = prod(i.shape[:-1]) if several else 1
    limit = t.shape[-2] if several else t.shape[0]
    m, n = i.size // tables, t.size // (tables * max(limit, 1))
    row = t.dtype.row_bytes(n) if t.is_contiguous else None if several else row_step(t)
    if row is None:
        return False
    for b in range(tables):
        low.add(
            "gather_" + t.dtype.name, x=low.at(rows) + b * limit * row, limit=limit, xs=row,
            ids=low.at(ids) + b * m * i.dtype.block_bytes, ib=i.dtype.block_bytes,
            y=low.at(x.result) + b * m * n * 4, m=m, n=n, ys=n * 4,
        )  # fmt: skip
    return True
