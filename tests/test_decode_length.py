"""The draft length follows what was measured; the text never depends on it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft import Draft
from ggraph.decode.length import Adaptive, Fixed

VERIFY, ROW, DRAFT = 1.0, 0.05, 0.02  # seconds of one row, of each row more, of a drafted token


def played(policy: Adaptive, right: int, rounds: int, draft: float = DRAFT) -> list[int]:
    """Lengths that the policy chose when the first `right` drafted tokens are always accepted."""
    chosen = []
    for _ in range(rounds):
        k = policy.length("d", 64)
        kept = tuple(range(min(k, right)))
        chosen.append(k)
        policy.learn("d", Draft.chain([1] * k), Kept(kept, (*kept, 0)), k * draft, VERIFY + k * ROW)
    return chosen


def rate(k: int, right: int, draft: float) -> float:
    """Tokens per second of length k."""
    return (1 + min(k, right)) / (VERIFY + k * ROW + k * draft)


@given(st.integers(0, 8), st.sampled_from([0.01, 0.1, 0.4]))
def test_the_choice_settles_at_nearly_the_best_rate(right: int, draft: float) -> None:
    chosen = played(Adaptive(most=8), right, 300, draft)
    best = max(rate(k, right, draft) for k in range(9))
    late = sorted(chosen[200:])[50]
    assert rate(late, right, draft) > 0.95 * best, (right, draft, chosen[200:])


def test_a_drafter_that_never_hits_is_tried_ever_more_rarely() -> None:
    chosen = played(Adaptive(most=8), 0, 1000)
    asked = [i for i, k in enumerate(chosen) if k]
    gaps = [b - a for a, b in pairwise(asked)]
    assert len(asked) < 40
    assert gaps[-1] > 4 * gaps[len(gaps) // 4]


def test_a_drafter_that_begins_to_hit_is_found_again() -> None:
    policy = Adaptive(most=8)
    played(policy, 0, 200)
    chosen = played(policy, 8, 400)
    assert chosen[-1] == 8


def test_least_and_most_bound_the_length() -> None:
    assert set(played(Adaptive(most=5, least=3), 4, 200)) <= {0, 1, 2, 3, 4, 5}
    assert played(Adaptive(most=5, least=5), 1, 200)[-1] in (0, 5)
    assert Adaptive(most=8).length("d", 0) == 0
    assert Adaptive(most=0).length("d", 9) == 0
    assert [Fixed(4).length("d", n) for n in (9, 3, 0)] == [4, 3, 0]


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    policy = Adaptive(most=15, whole=True)
    tree = Draft(tuple(range(15)), (-1, -1, -1, 0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4))
    seen = set()
    for hits in (3, 0):
        for _ in range(300):
            k = policy.length("d", 64)
            seen.add(k)
            kept = tuple(range(hits)) if k else ()
            draft = tree if k else Draft()
            policy.learn("d", draft, Kept(kept, (*kept, 0)), k * 0.01, VERIFY + k * ROW)
        assert policy.length("d", 64) == (15 if hits else 0)
    assert seen == {0, 15}


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.1, 0.4]),
    st.sampled_from([0.0, 0.02, 0.1]),
)
def test_no_text_loses_much_by_drafts(hits: list[int], row: float, draft: float) -> None:
    """Whatever is accepted when: the time is at most 1.5 % and an eighth of a step above plain."""
    policy, spent, gained = Adaptive(most=8), 0.0, 0
    for right in hits:
        k = policy.length("d", 64)
        kept = tuple(range(min(k, right)))
        took = VERIFY + k * row
        policy.learn("d", Draft.chain([1] * k), Kept(kept, (*kept, 0)), k * draft, took)
        spent += took + k * draft
        gained += len(kept) + 1
    first = row + draft  # what a first draft of one token costs is not known before
    assert spent <= VERIFY * (1.016 * gained + 0.13) + first, (spent, gained)
