"""Drafts, lookup drafters and acceptance against brute force."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.draft.lookup import DISCOUNTS, PromptLookup, SuffixDrafter, continuation
from ggraph.decode.draft.tree import ROOT, Draft
from ggraph.decode.speculation import Speculation
from ggraph.errors import InputError

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that also ends somewhere earlier."""
    for n in range(len(text) - 1, 0, -1):
        if any(text[e - n : e] == text[-n:] for e in range(n, len(text))):
            return n
    return 0


def followers(text: list[int], suffix: list[int]) -> Counter[int]:
    """How often each token stands behind `suffix`."""
    n = len(suffix)
    return Counter(text[e] for e in range(n, len(text)) if text[e - n : e] == suffix)


@given(TEXTS)
def test_suffix_match_is_the_longest_repeated_suffix(text: list[int]) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    known = drafter._automaton
    assert known._states[known.match].length == longest_repeated_suffix(text)


@given(TEXTS)
def test_suffix_proposes_what_followed_most_often_and_says_how_sure_it_is(text: list[int]) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    draft = drafter.propose(1)
    n = longest_repeated_suffix(text)
    assert bool(draft) == (n > 0)
    if not n:
        return
    behind = followers(text, text[-n:])
    most = max(behind.values())
    ends = {t: max(e for e in range(n, len(text)) if text[e - n : e + 1] == [*text[-n:], t])
            for t, count in behind.items() if count == most}  # fmt: skip
    assert draft.tokens[0] == max(ends, key=lambda t: ends[t]), (text, behind)
    # Classes hold suffixes of several lengths that stand in the same places, so that what is held
    # back belongs to the longest of them.
    held = [DISCOUNTS[min(m, len(DISCOUNTS)) - 1] for m in range(n, len(text) + 1)]
    chances = [(most - d) / behind.total() for d in held]
    assert any(abs(draft.chances[0] - c) < 1e-12 for c in chances), (text, draft)


@given(TEXTS, st.integers(0, 8))
def test_a_suffix_draft_is_as_long_as_was_asked(text: list[int], most: int) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    draft = drafter.propose(most)
    assert len(draft) == (most if longest_repeated_suffix(text) else 0) and draft.is_chain
    assert all(0.0 < c <= 1.0 for c in draft.chances)


def test_a_loop_is_drafted_on_and_on() -> None:
    drafter = SuffixDrafter()
    drafter.begin(1)
    drafter.observe([2, 3, *[1, 2, 3] * 9], None)
    assert drafter.propose(8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=12), st.integers(0, 14))
def test_the_first_nodes_of_a_draft_are_a_draft(raw: list[int], count: int) -> None:
    parents = tuple(min(p, i - 1) for i, p in enumerate(raw))
    draft = Draft(tuple(range(len(raw))), parents, chances=tuple(0.5 for _ in raw))
    cut = draft.first(count)
    assert cut.tokens == draft.tokens[:count]
    assert cut.parents == parents[:count]
    assert len(cut.chances) == len(cut)


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


class Listener:
    """A drafter that only remembers what it was told."""

    taps = ()

    def __init__(self, name: str) -> None:
        self.name, self.text = name, list[int]()

    def begin(self, first: int) -> None:
        self.text = [first]

    def observe(self, tokens: Sequence[int], features: object) -> None:
        self.text += tokens

    def propose(self, limit: int) -> Draft:
        return Draft()


@given(st.lists(st.sampled_from(["lookup", "eagle3", "tree"]), max_size=3), TEXTS)
def test_every_drafter_is_told_the_whole_text_or_refused(names: list[str], text: list[int]) -> None:
    """What is learned of drafters, and what each knows, is kept under their names."""
    drafters = [Listener(n) for n in names]
    if len(set(names)) < len(names):
        with pytest.raises(InputError, match="a name of its own"):
            Speculation(drafters)
        return
    drafts = Speculation(drafters)
    drafts.begin(text)
    drafts.read()
    assert [d.text for d in drafters] == [text for _ in names]
