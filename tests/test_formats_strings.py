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


SPELT = ["plumless", "buckeroo"]  # two words of one checksum


@given(st.lists(TEXT | st.sampled_from(SPELT), max_size=20), TEXT)
def test_a_text_is_found_where_it_first_stands(items: list[str], other: str) -> None:
    kept = Texts(items)
    for text in {*items, *SPELT, other, "\ud800"}:
        assert kept.find(text) == (items.index(text) if text in items else None)


@given(st.lists(TEXT.map(str.encode) | st.binary(max_size=4), max_size=6))
def test_texts_that_are_encoded_are_read_or_refused(items: list[bytes]) -> None:
    try:
        texts = [item.decode("utf-8") for item in items]
    except UnicodeDecodeError:
        with pytest.raises(UnicodeError):
            Texts.of_utf8(items)
    else:
        assert Texts.of_utf8(items) == texts


def test_a_letter_across_two_texts_is_refused() -> None:
    with pytest.raises(UnicodeError, match="begins within a letter"):
        Texts.of_utf8([b"a\xc3", b"", b"\xa4"])


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_pieces_are_those_given(items: list[bytes]) -> None:
    kept = Pieces(items)
    assert list(kept) == items
    assert kept == tuple(items)
    assert repr(kept) == f"Pieces({len(items)} items, {sum(map(len, items))} bytes)"
