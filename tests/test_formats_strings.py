"""Long lists of texts in one piece of memory behave as lists do."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Array
from ggraph.formats.strings import ABSENT, Pieces, Texts, checksums, joined_checksums

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


def thue_morse(letters: str) -> str:
    """The sequence that has one checksum, of this length, whichever of two letters is first:
    `checksums` is a polynomial of a power of two."""
    return "".join(letters[i.bit_count() % 2] for i in range(1 << 11))


ALIKE = [thue_morse("ab"), thue_morse("ba")]


def sums(items: list[bytes]) -> Array:
    ends = np.array([0, *accumulate(map(len, items))])
    return checksums(b"".join(items), ends[:-1], ends[1:])[0]


def test_two_texts_can_have_one_checksum() -> None:
    first, second = sums([a.encode() for a in ALIKE]).tolist()
    assert first == second


@given(st.lists(TEXT | st.sampled_from(ALIKE), max_size=20), TEXT)
def test_a_text_is_found_where_it_first_stands(items: list[str], other: str) -> None:
    kept = Texts(items)
    for text in {*items, *ALIKE, other, "\ud800"}:
        assert kept.find(text) == (items.index(text) if text in items else None)
    twice = {items[at] for places in kept.repeated() for at in places}
    if not set(ALIKE) <= set(items):  # those may stand between one another
        assert twice == {t for t in items if items.count(t) > 1}
        raw = [t.encode() for t in [*items, other]]
        wanted = [items.index(t) if t in items else ABSENT for t in [*items, other]]
        assert kept.find_sums(sums(raw)).tolist() == wanted


@given(st.lists(st.binary(max_size=9), max_size=9), st.binary(max_size=9), st.integers(0, 1 << 18))
def test_checksums_are_of_the_bytes_alone(items: list[bytes], last: bytes, far: int) -> None:
    """Not of where they lie, and those of two texts give that of both."""
    alone = np.concatenate([np.zeros(0, np.uint64), *(sums([item]) for item in items)])
    assert sums([b"x" * far, *items])[1:].tolist() == alone.tolist()
    lengths = np.array([len(i) for i in items])
    both = joined_checksums(alone, lengths, sums([last]))
    assert both.tolist() == sums([item + last for item in items]).tolist()


def read(items: list[bytes], skipped: int) -> Texts:
    ends = np.array([0, *accumulate(skipped + len(item) for item in items)])
    return Texts.of_utf8(b"".join(bytes(skipped) + item for item in items), ends, skipped)


@given(st.lists(TEXT.map(str.encode) | st.binary(max_size=4), max_size=6), st.sampled_from([0, 8]))
def test_texts_that_are_encoded_are_read_or_refused(items: list[bytes], skipped: int) -> None:
    try:
        texts = [item.decode("utf-8") for item in items]
    except UnicodeDecodeError:
        with pytest.raises(UnicodeError):
            read(items, skipped)
    else:
        assert read(items, skipped) == texts


def test_a_letter_across_two_texts_is_refused() -> None:
    with pytest.raises(UnicodeError, match="begins within a letter"):
        read([b"a\xc3", b"", b"\xa4"], 0)


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_pieces_are_those_given(items: list[bytes]) -> None:
    kept = Pieces(items)
    assert list(kept) == items
    assert kept == tuple(items)
    assert repr(kept) == f"Pieces({len(items)} items, {sum(map(len, items))} bytes)"
