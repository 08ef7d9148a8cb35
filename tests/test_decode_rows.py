"""Masks of token rows against the words of `Rows`, slot by slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.rows import Rows, visibility
from ggraph.tensor import Array

CONTEXT = 12


def seen(rows: Rows, row: int, slot: int, window: int | None) -> bool:
    """Whether a row of plain text sees a slot."""
    near = window is None or slot > rows.positions[row] - window
    return slot <= rows.slots[row] and near


@given(
    st.integers(0, CONTEXT - 1),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([None, 1, 3, 50]),
)
def test_a_row_of_text_sees_what_lies_before_it(
    first: int, count: int, padding: int, window: int | None
) -> None:
    slots = range(first, min(first + count, CONTEXT))
    rows = Rows([7] * len(slots), slots, slots)
    mask = visibility(rows, len(slots) + padding, CONTEXT, window)
    assert mask.shape == (len(slots) + padding, CONTEXT)
    assert mask.dtype == np.float32
    for row in range(len(mask)):
        for slot in range(CONTEXT):
            visible = row < len(slots) and seen(rows, row, slot, window)
            assert mask[row, slot] == (0 if visible else -np.inf), (row, slot)


def test_a_mask_cannot_be_spoilt_for_the_next_step() -> None:
    """A single row's is a part of what other steps are given as well."""
    mask: Array = visibility(Rows([7], [3], [3]), 1, CONTEXT)
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = 1
