"""Masks of token rows against the words of `Rows`, slot by slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.draft.tree import Draft
from ggraph.decode.engine import verification_rows
from ggraph.decode.rows import Chunk, Rows, columns, visibility
from ggraph.tensor import Array

CONTEXT = 12


def seen(rows: Rows, row: int, slot: int, window: int | None) -> bool:
    """Whether a row of plain text sees a slot."""
    at = rows.positions[row]
    near = window is None or slot > at - window
    if isinstance(window, Chunk):
        near = slot // int(window) == at // int(window)
    return slot <= rows.slots[row] and near


@given(
    st.integers(0, CONTEXT - 1),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([None, 1, 3, 50, Chunk(1), Chunk(3), Chunk(5), Chunk(50)]),
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


@given(st.integers(0, 20), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 3))
def test_few_columns_make_the_mask(past: int, choices: list[int], padding: int) -> None:
    """Of text and of trees, up to the last slot that there is."""
    parents = tuple(c % (i + 1) - 1 for i, c in enumerate(choices))
    tree = verification_rows(7, Draft((7,) * len(parents), parents), past)
    text = Rows(tree.tokens, tree.slots, tree.slots)
    count = len(tree.tokens) + padding
    for rows in (tree, text):
        for context in (past + len(tree.tokens), past + count + 9):
            few, which = columns(rows, count, context)
            assert few.shape == (count + 2, count) and which.dtype == np.int32
            assert np.array_equal(few[which].T, visibility(rows, count, context))


def test_a_mask_cannot_be_spoilt_for_the_next_step() -> None:
    """A single row's is a part of what other steps are given as well."""
    mask: Array = visibility(Rows([7], [3], [3]), 1, CONTEXT)
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = 1
