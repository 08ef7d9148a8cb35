"""The token rows of one step: buckets, padding, and who may see what.

Legend: T token rows, C cache rows that attention sees, S slots from `base` on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ggraph.decode.given import later
from ggraph.decode.model import LONGEST_DRAFT
from ggraph.errors import InputError
from ggraph.tensor import Array

ROW_BUCKETS: tuple[int, ...] = (
    *range(1, 11), 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512,
)  # fmt: skip
CONTEXT_STEP = 256  # smallest context bucket; larger ones double


def longest_draft(recurrent: bool) -> int:
    """Most nodes of a draft that one step of a model verifies, beside the text's last token."""
    return LONGEST_DRAFT if recurrent else ROW_BUCKETS[-1] - 1


@dataclass(frozen=True)
class Rows:
    """The token rows of one step, before padding.

    Plain text (no `visible`): a row sees every slot up to its own, and one that is given in a block
    all of that. Otherwise a row sees all slots below `base`, and slot base + s where
    `visible[t, s]`.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    base: int = 0
    visible: Array | None = None  # bool [T, S]


def row_bucket(rows: int) -> int:
    """The number of rows that a step of `rows` is padded to."""
    if not 1 <= rows <= ROW_BUCKETS[-1]:
        raise InputError(f"a step of {rows} rows: expected 1 to {ROW_BUCKETS[-1]}")
    return next(b for b in ROW_BUCKETS if b >= rows)


def context_bucket(reach: int, most: int) -> int:
    """The number of cache rows that a step reaching `reach` slots is planned for."""
    size = CONTEXT_STEP
    while size < reach:
        size *= 2
    return min(size, most)


def padded(values: Sequence[int], count: int, filler: int, kind: type = np.int32) -> Array:
    """i32 [count], or integers of another kind: the values, then fillers."""
    if len(values) == count:
        return np.array(values, kind)
    out: Array = np.full(count, filler, kind)
    out[: len(values)] = values
    return out


def parents_of(rows: Rows, count: int) -> Array:
    """i32 [count]: the row of this step that each row follows, -1 for what is before the step. Rows
    that only fill up follow one another, which costs least."""
    found = np.arange(-1, count - 1, dtype=np.int32)
    if rows.visible is not None:
        for t, seen in enumerate(rows.visible):
            before = np.flatnonzero(seen[:t])
            found[t] = before[-1] if len(before) else -1
    return found


class Chunk(int):
    """A window that begins anew at each multiple of its size: rows see their own stretch alone."""


def in_view(window: int, position: Any) -> Any:
    """How many positions a row at this one sees, its own among them; or rows at these."""
    return position % window + 1 if isinstance(window, Chunk) else window


def visibility(rows: Rows, count: int, context: int, window: int | None = None) -> Array:
    """f32 [count, C]: 0 where a row may see a slot, else -inf; padding rows see nothing."""
    real = len(rows.tokens)
    if rows.visible is None and window is None:  # the common case: no arrays of bools
        if count == real == 1:  # and the commonest: nothing to compute
            hidden = context - 1 - rows.slots[0]
            return _ramp(context)[None, hidden : hidden + context]
        mask = np.full((count, context), -np.inf, np.float32)
        for row, slot, token in zip(mask, rows.slots, rows.tokens, strict=False):
            row[: slot + 1 + later(token)] = 0
        return mask
    seen = rows.visible
    if seen is not None and window is None:  # a tree's, in each round: no array of bools either
        mask = np.full((count, context), -np.inf, np.float32)
        mask[:real, : rows.base] = 0
        mask[:real, rows.base : rows.base + seen.shape[1]][seen] = 0
        return mask
    allowed = np.zeros((count, context), bool)
    if seen is None:
        ends = [slot + later(t) for slot, t in zip(rows.slots, rows.tokens, strict=True)]
        allowed[:real] = np.arange(context)[None, :] <= np.asarray(ends)[:, None]
    else:
        allowed[:real, : rows.base] = True
        allowed[:real, rows.base : rows.base + seen.shape[1]] = seen
    if window is not None:
        allowed[:real] &= _in_window(rows, context, window)
    return np.where(allowed, np.float32(0), np.float32(-np.inf))


def columns(rows: Rows, count: int, context: int) -> tuple[Array, Array]:
    """`visibility` by its few different columns: f32 [count + 2, count], and which of them each
    slot has i32 [C]. The first is that of the text before these rows, which begin at their base;
    the last nobody sees."""
    first = rows.slots[0]
    near = [1 + slot - first for slot in rows.slots]
    seen = visibility(Rows(rows.tokens, rows.positions, near, 1, rows.visible), count, count + 2)
    which = np.arange(1 - first, 1 - first + context, dtype=np.int32)
    return np.ascontiguousarray(seen.T), np.clip(which, 0, count + 1, out=which)


@lru_cache(maxsize=4)
def _ramp(context: int) -> Array:
    """f32 [2C]: C zeros, then C times -inf. What row s may see is a stretch of it."""
    ramp = np.zeros(2 * context, np.float32)
    ramp[context:] = -np.inf
    ramp.flags.writeable = False
    return ramp


def _in_window(rows: Rows, context: int, window: int) -> Array:
    """bool [T, C]: slots whose position is in the row's window.

    Text lies at slot = position; slots of a draft count as the position where it begins, or as
    the row's own where the slot is one of this step's.
    """
    held = np.arange(context)
    if rows.visible is not None:
        held = np.minimum(held, rows.base)
    held[np.asarray(rows.slots)] = rows.positions
    own = np.asarray(rows.positions)[:, None]
    inside: Array = held[None, :] > own - in_view(window, own)
    return inside
