"""Rotary embedding and attention on CUDA.

Legend: T token rows, H heads, K key-value heads, D and V head sizes, C cache rows, R rotated.
"""

from math import prod
from typing import Any

import numpy as np

from ggraph.backends.cuda.driver import WIDEST
from ggraph.backends.cuda.kernels import CACHES
from ggraph.backends.cuda.layout import PLAIN, is_flat, is_plain
from ggraph.backends.cuda.lowering import Lowering, Rule, codes_of, number, offered, parts_of
from ggraph.backends.protocol import Launch, Ref
from ggraph.device import Need
from ggraph.dtype import I32, I64, Q8_0
from ggraph.ops.fused import FEW_ROWS
from ggraph.ops.rope import rope_angles
from ggraph.tensor import Array, Attrs, Tensor

HEADS = 4  # heads per block (HEADS of src/rope.cu)
SPLIT, MAX_HEAD, TILE = 128, 512, 16  # as in src/attention.cu
ROWS, KEYS, UNITS, MAX_TILED = 16, 32, 4, 128  # as in src/prompt.cu, and its largest head
PART_BYTES = 1 << 26  # of partial results at a time


def frequencies(attrs: Attrs) -> tuple[Array, float]:
    """Radians per position of each pair, f64 [R/2], and the factor of sines and cosines.

    Angles are linear in the position under every scaling, so those of one small position say all.
    """
    small = 1e-3  # no pair turns far enough to be ambiguous
    cos, sin = rope_angles(np.array([small]), None, attrs)  # [1, R/2]
    return np.arctan2(sin[0], cos[0]) / small, float(np.hypot(cos[0, 0], sin[0, 0]))


def _turnable(x: Tensor, positions: Tensor, factors: list[Tensor]) -> bool:
    rows = is_plain(x) and x.strides[2] == x.dtype.block_bytes
    return rows and is_flat(positions, dtype=I32) and is_flat(*factors)


def _rope_rule(t: Tensor) -> bool:
    x, positions, *factors = t.sources
    return _turnable(x, positions, factors)


def _cached_rule(t: Tensor) -> bool:
    cache, x, positions, index, *factors = t.sources
    indexed = index.dtype in (I32, I64) and index.is_contiguous
    return is_plain(cache) and cache.is_contiguous and indexed and _turnable(x, positions, factors)


def _turning(
    low: Lowering, x: Launch, a: Ref, positions: Ref, factors: list[Ref]
) -> dict[str, Any]:
    """The arguments that both rope kernels share."""
    attrs = x.result.tensor.attrs
    freqs, magnitude = frequencies(attrs)
    _, heads, dim = a.tensor.shape
    return {
        "x": low.at(a), "positions": low.at(positions), "freqs": low.constant(freqs),
        "factors": low.at(factors[0]) if factors else 0, "heads": heads, "dim": dim,
        "rotated": attrs["n_rot"], "row_stride": a.tensor.strides[0],
        "head_stride": a.tensor.strides[1], "neox": int(attrs["mode"] == "neox"),
        "scale": magnitude,
    }  # fmt: skip


def _rope(low: Lowering, x: Launch) -> None:
    a, positions, *factors = x.sources
    rows, heads, _ = a.tensor.shape
    given = _turning(low, x, a, positions, factors)
    low.call(
        "rope", (rows, -(-heads // HEADS), 1), 64, y=low.at(x.result),
        type_=PLAIN[a.tensor.dtype], **given,
    )  # fmt: skip


def _rope_set_rows(low: Lowering, x: Launch) -> None:
    cache, a, positions, index, *factors = x.sources
    rows, heads, _ = a.tensor.shape
    given = _turning(low, x, a, positions, factors)
    low.call(
        "rope_set_rows", (rows, -(-heads // HEADS), 1), 64, cache=low.at(x.result),
        index=low.at(index), tokens=rows, rows=cache.tensor.shape[0],
        from_=PLAIN[a.tensor.dtype], to=PLAIN[cache.tensor.dtype],
        index_type=PLAIN[index.tensor.dtype], **given,
    )  # fmt: skip


def _attended(t: Tensor) -> bool:
    q, k, v, *rest = t.sources
    if not is_flat(q) or k.dtype is not v.dtype or k.dtype.name not in CACHES:
        return False
    if max(k.shape[2], v.shape[2]) > MAX_HEAD:
        return False
    if k.dtype is Q8_0 and (k.shape[2] % 32 or v.shape[2] % 32):
        return False
    if t.attrs["has_mask"]:
        mask = rest.pop(0)
        rows = is_plain(mask) and mask.strides[1] == mask.dtype.block_bytes
        if not rows and not is_flat(mask, dtype=I32):
            return False
    inner = all(s.strides[2] == s.dtype.block_bytes for s in (k, v))
    return inner and all(is_flat(r, dtype=r.dtype) for r in rest)  # a length, sinks


def _flash_attn(low: Lowering, x: Launch) -> None:
    """Few rows over splits of the cache, so that bits depend on nothing else; many rows by tiles
    on the tensor cores."""
    given = _given(low, x)
    if _is_tiled(x.result.tensor):
        _many(low, x, given)
    else:
        _few(low, x, given)


def _many(low: Lowering, x: Launch, given: dict[str, Any]) -> None:
    """Four strips of rows a block, each of a head; what the mask shows is looked up once for
    all layers."""
    q, kind = x.sources[0].tensor, x.sources[2].tensor.dtype.name
    (rows, heads, _), kv_heads, tiles = q.shape, given.pop("kv_heads"), 0
    strips, group = -(-rows // ROWS), heads // kv_heads
    pitch = _pitch(given["context"])
    if x.result.tensor.attrs["has_mask"]:
        room = x.room("tiles")
        tiles = low.at(room)
        if not room.ready:
            names = ("mask", "context", "mask_row", "mask_type")
            low.call(
                "tiles_shown", (pitch // UNITS, strips, 1), 32 * UNITS, type=kind, tiles=tiles,
                rows=rows, pitch=pitch, **{n: given[n] for n in names},
            )  # fmt: skip
    low.call(
        "attend_rows", (kv_heads, -(-strips * group // UNITS), 1), 32 * UNITS, type=kind,
        tiles=tiles, y=low.at(x.result), rows=rows, group=group, pitch=pitch, **given,
    )  # fmt: skip


def _pitch(context: int) -> int:
    """Bytes of a row of what `tiles_shown` makes: whole words, one at least."""
    return 4 * max(1, -(-context // (4 * KEYS)))


def _given(low: Lowering, x: Launch) -> dict[str, Any]:
    """The arguments that both kernels share."""
    q, k, v, *rest = x.sources
    attrs = x.result.tensor.attrs
    mask = rest.pop(0) if attrs["has_mask"] else None
    length = rest.pop(0) if attrs["has_length"] else None
    sinks = rest.pop(0) if attrs["has_sinks"] else None
    context, kv_heads, v_dim = v.tensor.shape
    return {
        "q": low.at(q), "k": low.at(k), "v": low.at(v),
        "mask": low.at(mask) if mask is not None else 0,
        "length": low.at(length) if length is not None else 0,
        "sinks": low.at(sinks) if sinks is not None else 0, "kv_heads": kv_heads,
        "dim": q.tensor.shape[2], "v_dim": v_dim, "context": context,
        "k_row": k.tensor.strides[0], "k_head": k.tensor.strides[1],
        "v_row": v.tensor.strides[0], "v_head": v.tensor.strides[1],
        "mask_row": mask.tensor.strides[0] if mask is not None else 0,
        "scale": number(x, "scale"), "softcap": number(x, "softcap"),
        "mask_type": PLAIN[mask.tensor.dtype] if mask is not None else 0,
    }  # fmt: skip


def _listed(t: Tensor) -> bool:
    """Whether rows list the cache rows that they see."""
    return bool(t.attrs["has_mask"]) and t.sources[3].dtype is I32


def _width(t: Tensor) -> int:
    """The most cache rows that a row sees."""
    return t.sources[3].shape[1] if _listed(t) else t.sources[1].shape[0]


def _few(low: Lowering, x: Launch, given: dict[str, Any]) -> None:
    """Slices of query rows, so that partial results stay small; bits do not depend on slices."""
    q, kind = x.sources[0].tensor, x.sources[2].tensor.dtype.name
    (rows, heads, dim), v_dim = q.shape, given["v_dim"]
    width = _width(x.result.tensor)
    splits = max(1, -(-width // SPLIT))
    slice_rows, parts = _slice(x.result.tensor)[0], low.at(x.room("splits"))
    made, codes = parts_of(low, x), codes_of(low, x)
    group = heads // given["kv_heads"]
    tile_rows = TILE // min(group, TILE)  # query rows that share a block
    given = {
        **given, "lists": _lists(low, x, given), "heads": heads, "width": width, "group": group,
        "tile_rows": tile_rows,
    }  # fmt: skip
    if _listed(x.result.tensor):
        given.update(mask=0, mask_row=0, mask_type=0)
    sinks = given.pop("sinks")
    del given["length"]
    kernel, kv_heads = "attend" if _is_aligned(x) else "attend_odd", given.pop("kv_heads")
    for t in range(0, rows, slice_rows):
        count = min(slice_rows, rows - t)
        here = {
            **given, "q": given["q"] + t * heads * dim * 4,
            "mask": given["mask"] + t * given["mask_row"],
            "lists": given["lists"] + t * 4 * (1 + width),
        }  # fmt: skip
        grid = (splits, kv_heads * -(-group // TILE), -(-count // tile_rows))
        low.call(kernel, grid, 128, type=kind, parts=parts, rows=count, **here)
        low.call(
            "merge", (heads, count, 1), 128, type=kind, parts=parts, lists=here["lists"],
            sinks=sinks, y=low.at(x.result) + t * heads * v_dim * 4,
            given=made + t * heads * v_dim * 4 if made else 0, codes=codes, splits=splits,
            v_dim=v_dim, width=width, from_=t,
        )  # fmt: skip


def _is_aligned(x: Launch) -> bool:
    """Whether chunks of eight values of queries, and of keys and values of a plain type, begin at
    multiples of 16 bytes; blocks are read as anywhere."""
    q, *caches = [r.tensor for r in x.sources[:3]]
    odd = [n for t in caches for n in (t.offset, *t.strides[:2], 2 * t.shape[2])]
    return not (
        q.offset % WIDEST or (not caches[0].dtype.is_block and any(n % WIDEST for n in odd))
    )


def _lists(low: Lowering, x: Launch, given: dict[str, Any]) -> int:
    """Address of the lists of what each row sees: made once for all layers that share a mask."""
    room, rows = x.room("lists"), x.sources[0].tensor.shape[0]
    if not room.ready and _listed(x.result.tensor):
        low.call(
            "listed", (rows, 1, 1), 128, type=x.sources[2].tensor.dtype.name, given=given["mask"],
            length=given["length"], lists=low.at(room), context=given["context"],
            width=_width(x.result.tensor),
        )  # fmt: skip
    elif not room.ready:
        names = ("mask", "length", "context", "mask_row", "mask_type")
        low.call(
            "shown", (rows, 1, 1), 128, type=x.sources[2].tensor.dtype.name, lists=low.at(room),
            **{n: given[n] for n in names},
        )  # fmt: skip
    return low.at(room)


def _is_tiled(t: Tensor) -> bool:
    """Whether the tensor cores take all rows of this attention."""
    q, _, v = t.sources[:3]
    known = all(d % 32 == 0 and 0 < d <= MAX_TILED for d in (q.shape[2], v.shape[2]))
    return q.shape[0] > FEW_ROWS and known and not _listed(t)


def _slice(t: Tensor) -> tuple[int, int]:
    """Query rows whose partial results are made at a time, and the bytes of those."""
    rows, heads, v_dim = t.shape
    row_bytes = heads * max(1, -(-_width(t) // SPLIT)) * (2 + v_dim) * 4
    count = max(1, min(rows, PART_BYTES // max(row_bytes, 1), 65535))
    return count, count * row_bytes


def _tile_needs(t: Tensor) -> tuple[Need, ...]:
    """ "tiles": what rows see of the cache, by the mask alone."""
    rows, context = t.shape[0], t.sources[1].shape[0]
    count = -(-rows // ROWS) * _pitch(context)
    return (Need("tiles", count, (3,), how=f"[{rows}x{context}]"),) if t.attrs["has_mask"] else ()


def _attention_needs(t: Tensor) -> tuple[Need, ...]:
    """ "splits": results by parts of the cache; "lists": what each row sees, by mask, length."""
    if _is_tiled(t):
        return _tile_needs(t)
    end = len(t.sources) - bool(t.attrs["has_sinks"])
    deciding = tuple(range(3, end)) if t.attrs["has_mask"] else ()
    rows, width, context = t.shape[0], _width(t), t.sources[1].shape[0]
    how = f"[{rows}x{width} of {context}]"
    lists = Need("lists", rows * 4 * (1 + width), deciding, how=how)
    given = offered(t, prod(t.shape[1:]))  # a product takes all heads of a token as one row
    return Need("splits", _slice(t)[1]), lists, *given


RULES: dict[str, Rule] = {
    "rope": Rule(_rope_rule, _rope),
    "rope_set_rows": Rule(_cached_rule, _rope_set_rows),
    "flash_attn": Rule(_attended, _flash_attn, _attention_needs),
}
