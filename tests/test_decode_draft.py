"""Drafts, lookup drafters and acceptance against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.draft import ROOT, Draft
from ggraph.decode.lookup import PromptLookup, SuffixDrafter, continuation

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that also ends somewhere earlier."""
    for n in range(len(text) - 1, 0, -1):
        if any(text[e - n : e] == text[-n:] for e in range(n, len(text))):
            return n
    return 0


@given(TEXTS)
def test_suffix_match_is_the_longest_repeated_suffix(text: list[int]) -> None:
    drafter = SuffixDrafter(least=1)
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    n = drafter._automaton.match_length
    assert n == longest_repeated_suffix(text)
    if n:
        end = drafter._automaton.earlier_end()
        assert end < len(text)
        assert text[end - n : end] == text[-n:]


@given(TEXTS, st.integers(1, 8))
def test_lookup_proposes_what_followed_an_equal_n_gram(text: list[int], limit: int) -> None:
    drafter = PromptLookup(most=3, least=1)
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    draft = drafter.propose(limit)
    n = min(3, longest_repeated_suffix(text))
    if n == 0:
        assert len(draft) == 0
        return
    starts = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
    assert list(draft.tokens) == continuation(text, max(starts), limit)


def test_a_repeating_text_goes_on_repeating() -> None:
    assert continuation([1, 2, 3, 1, 2, 3], 3, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_tree_rows_see_their_ancestors_only() -> None:
    draft = Draft((5, 6, 7, 8), (ROOT, ROOT, 0, 2))
    assert draft.depths() == [1, 1, 2, 3]
    assert draft.path(3) == [0, 2, 3]
    assert draft.visible().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
