"""Long lists of texts in one piece of memory behave as lists do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.formats.strings import Pieces, Texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(st.lists(TEXT, max_size=20), st.integers(-30, 30), st.slices(20))
def test_texts_are_those_given(items: list[str], at: int, cut: slice) -> None:
    kept = Texts(items)
    assert (len(kept), list(kept), kept[cut]) == (len(items), items, items[cut])
    if -len(items) <= at < len(items):
        assert kept[at] == items[at]
    else:
        with pytest.raises(IndexError, match=f"item {at} of {len(items)}"):
            kept[at]
    assert kept == items
    assert kept == Texts(items)
    assert kept != [*items, ""]
    assert (kept == "".join(items)) is False


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_pieces_are_those_given(items: list[bytes]) -> None:
    kept = Pieces(items)
    assert list(kept) == items
    assert kept == tuple(items)
    assert repr(kept) == f"Pieces({len(items)} items, {sum(map(len, items))} bytes)"
