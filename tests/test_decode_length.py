"""How much is drafted follows what was measured: the real loop by a clock that only counts.

Texts, heads and prices are played (`models.bench.replay`); engine, policy, prices and the suffix
drafter are those that users run.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.policy import CREDIT, MOST_PAUSE, Adaptive, Fixed
from ggraph.decode.prices import MEMORY, ROW, Prices
from ggraph.tensor import Array
from models.bench.replay import Machine, Recorded, play, speed

PLAIN = 0.004  # seconds of a step of one row
PROMPT = (1, 2, 3)


def machine(
    row: float, question: float = 0.0, further: float = 0.0, slower: float = 1.0
) -> Machine:
    """Prices in plain steps."""
    rows = [PLAIN * (1 + row * n) for n in range(9)]
    return Machine(rows, PLAIN * question, PLAIN * further)


def text(right: Sequence[int], chance: float = 0.6, deepest: int = 8) -> Recorded:
    """A text that never repeats itself, and a head whose chain at place i is right up to
    `right[i]`; it is always equally sure."""
    answer = [100 + i for i in range(len(right) + 1)]
    said = [round(100 * chance)] * deepest
    return Recorded("made", PROMPT, answer, [(n, said) for n in right])


def known(row: float, most: int = 8, question: float = 0.1, further: float = 0.05) -> Prices:
    """Prices that were measured before."""
    prices = Prices()
    for _ in range(60):
        for rows in range(1, most + 2):
            prices.note_step(rows, (1 + row * (rows - 1)) * PLAIN)
        prices.note_guesses("eagle3", 1, question * PLAIN)
        prices.note_guesses("eagle3", 3, (question + 2 * further) * PLAIN)
    return prices


def speed_of(length: int, right: int, row: float) -> float:
    """Tokens per plain step's time of one length, with a head of 0.1 and 0.05 plain steps."""
    asking = 0.1 + 0.05 * (length - 1) if length else 0.0
    return (1 + min(length, right)) / (1 + length * row + asking)


@given(st.integers(0, 8), st.sampled_from([0.05, 0.1, 0.4]))
def test_the_choice_settles_at_nearly_the_best_speed(right: int, row: float) -> None:
    """Whatever the head says of itself: what it proves to be worth counts."""
    made = machine(row, 0.1, 0.05)
    done = play(text([right] * 400), made, Adaptive(prices=known(row)), ["eagle3"])
    best = max(speed_of(k, right, row) for k in range(9))
    assert speed(done, made) > 0.85 * best, (right, row, done.by_rows)


@pytest.mark.parametrize("tokens", [8, 20, 40, 128])
@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_a_text_that_nobody_foresees_loses_little(tokens: int, chance: float) -> None:
    made = machine(0.1, 0.12, 0.06)
    done = play(text([0] * tokens, chance), made, Adaptive(prices=known(0.1, question=0.12)))
    lost = 1 / speed(done, made) - 1
    assert lost * tokens < CREDIT + 0.4 + 0.02 * tokens, (lost * tokens, done.by_rows)


@pytest.mark.parametrize("tokens", [8, 10, 13, 16, 20, 32])
@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("measured", [False, True])
def test_an_answer_of_a_few_tokens_that_nobody_foresees_stays_above_nine_tenths(
    tokens: int, chance: float, measured: bool
) -> None:
    made = machine(0.1, 0.12, 0.06)
    prices = known(0.1, question=0.12) if measured else Prices()
    done = play(text([0] * tokens, chance), made, Adaptive(prices=prices))
    assert speed(done, made) > 0.9, (done.by_rows, done.drafted)


def test_drafts_are_as_long_as_was_ever_right_and_one_more() -> None:
    """However sure a head is: ten tokens leave no time to make up for nine wrong rows."""
    made, prices = machine(0.1, 0.1, 0.01), known(0.1, further=0.01)
    wrong = play(text([0] * 10, 0.95), made, Adaptive(prices=prices), ["eagle3"])
    assert max(wrong.by_rows) == 2
    right = play(text([8] * 60, 0.95), made, Adaptive(prices=prices), ["eagle3"])
    assert max(right.by_rows) == 9 and right.rounds < 15


def test_a_head_that_is_never_right_is_asked_ever_more_seldom() -> None:
    asked: list[int] = []

    class Noted(Adaptive):
        def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
            asked.append(self.rounds)
            return super().weigh(drafter, draft, best, seconds)

        def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
            super().learn(draft, kept, seconds)
            self.rounds += 1

        rounds = 0

    play(text([0] * 300), machine(0.1, 0.12, 0.06), Noted(prices=known(0.1)), ["eagle3"])
    assert asked[0] == 0, "it is asked from the first round on"
    gaps = [b - a for a, b in pairwise(asked)]
    assert max(gaps) == MOST_PAUSE and gaps[-1] == MOST_PAUSE
    assert len(asked) < 45


@pytest.mark.parametrize("name", ["eagle3", "suffix,eagle3"])
def test_a_head_is_asked_from_the_first_round_on(name: str) -> None:
    """Also in a process that has measured nothing yet."""
    done = play(text([1] * 40), machine(0.1, 0.12, 0.06), Adaptive(), name.split(","))
    assert done.tried_at[0] >= done.rounds - 2


def test_a_drafter_that_begins_to_be_right_is_found_again() -> None:
    made = machine(0.06, 0.1, 0.05)
    done = play(text([0] * 200 + [8] * 400), made, Adaptive(prices=known(0.06)), ["eagle3"])
    assert done.rounds < 200 + 100 + 2 * MOST_PAUSE, done.by_rows


def test_a_drafter_that_promises_too_much_is_believed_less() -> None:
    """Right in one of four rounds while it says nine of ten; a row costs more than half a step."""
    for row, least, most in ((0.6, 0, 60), (0.02, 150, 400)):
        made = machine(row, 0.01, 0.005)
        prices = known(row, question=0.01, further=0.005)
        done = play(text([1, 0, 0, 0] * 100, 0.9), made, Adaptive(prices=prices), ["eagle3"])
        assert least <= sum(n for rows, n in done.by_rows.items() if rows > 1) <= most


def test_the_suffix_drafter_is_taken_where_it_is_sure_and_the_head_not_asked() -> None:
    loop = [100, 101, 102, 103, 104] * 40
    guesses = [(0, [60] * 8) for _ in loop[1:]]
    recorded = Recorded("loop", PROMPT, loop, guesses)
    made = machine(0.1, 0.12, 0.06)
    done = play(recorded, made, Adaptive(prices=known(0.1)))
    assert speed(done, made) > 3
    assert done.rounds < 60


class Listed:
    """A drafter that does not say how sure it is."""

    name, taps = "listed", ()

    def __init__(self, answer: Sequence[int], right: int, tree: bool = False) -> None:
        self.text = [*PROMPT, *answer]
        self.right, self.tree, self.length = right, tree, 0
        self.wanted: list[int] = []

    def begin(self, first: int) -> None:
        self.length = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        self.length += len(tokens)

    def propose(self, limit: int) -> Draft:
        self.wanted.append(limit)
        good = self.text[self.length : self.length + min(limit, self.right)]
        if self.tree:
            return Draft((*good, 7, 8), (*range(-1, len(good) - 1), -1, -1)).first(limit)
        return Draft.chain([*good, *[7] * (limit - len(good))])


@pytest.mark.parametrize(("right", "least", "most"), [(0, 1, 2), (2, 2, 4), (8, 6, 8)])
def test_of_a_drafter_that_says_nothing_as_much_is_ordered_as_proved_right(
    right: int, least: int, most: int
) -> None:
    recorded = text([0] * 300)
    drafter = Listed(recorded.answer, right)
    play(recorded, machine(0.1), Adaptive(prices=known(0.1)), (), [drafter])
    assert least <= sorted(drafter.wanted[20:])[len(drafter.wanted[20:]) // 2] <= most


@pytest.mark.parametrize(("right", "paid"), [(4, True), (0, False)])
def test_a_tree_is_verified_whole_or_not_at_all(right: int, paid: bool) -> None:
    recorded = text([0] * 300)
    drafter = Listed(recorded.answer, right, tree=True)
    done = play(recorded, machine(0.1), Adaptive(most=6, prices=known(0.1)), (), [drafter])
    others = sum(n for rows, n in done.by_rows.items() if rows not in (1, right + 3))
    assert others <= 3, "but at the text's end, where there is less room"
    assert (done.drafted > 300) == paid


def test_lengths_are_bounded() -> None:
    recorded = text([8] * 60)
    for most in (1, 3):
        done = play(recorded, machine(0.02, 0.05, 0.01), Adaptive(most=most), ["eagle3"])
        assert max(done.by_rows) == most + 1
    done = play(recorded, machine(0.02, 0.05, 0.01), Adaptive(most=0), ["eagle3"])
    assert set(done.by_rows) == {1}
    assert [Fixed(4).ask("d", n) for n in (9, 3, 0)] == [4, 3, 0]
    assert Fixed(4).ask("d", 9, Draft.chain([1])) == 0, "the first drafter that proposes something"
    assert Fixed(4).weigh("d", Draft.chain([2]), Draft.chain([1]), 0.0).tokens == (1,)


def test_a_draft_has_at_least_as_many_tokens_as_were_asked_for() -> None:
    done = play(text([1] * 200), machine(0.1, 0.1, 0.01), Adaptive(least=3), ["eagle3"])
    assert set(done.by_rows) <= {1, 2, 3, 4}
    assert done.by_rows[4] > 80 and sum(done.by_rows.get(n, 0) for n in (2, 3)) <= 2


def test_prices_do_not_follow_a_machine_that_slows_down() -> None:
    """Every stretch of twenty steps at another speed, and rows looked at in some of them alone.
    Speeds know nothing of that: one that always jumps where rows are looked at does mislead."""
    rng, rows, guesses = np.random.default_rng(0), [], []
    for _ in range(200):
        prices = known(0.2)
        for i, slow in enumerate(rng.uniform(0.5, 3.0, rng.integers(20, 60))):
            for n in range(20):
                prices.note_step(1, slow * PLAIN)
                if i % 3 == 1 and n % 2:
                    prices.note_step(4, slow * 1.6 * PLAIN)
                    prices.note_guesses("eagle3", 1, slow * 0.1 * PLAIN)
        rows.append(prices.rows(4))
        guesses.append(prices.guess("eagle3", 1))
    assert min(rows) > 0.3 and max(rows) < 1.0 and 0.55 < np.median(rows) < 0.65
    assert min(guesses) > 0.07 and max(guesses) < 0.15 and 0.095 < np.median(guesses) < 0.105


def test_a_step_that_took_very_long_hardly_counts() -> None:
    prices = known(0.2)
    prices.note_step(3, 100 * PLAIN)
    prices.note_step(1, 100 * PLAIN)
    prices.note_guesses("eagle3", 1, 100 * PLAIN)
    for _ in range(20):
        prices.note_step(1, PLAIN)
    assert prices.rows(3) < 0.6 and prices.guess("eagle3", 1) < 0.12
    before = prices.rows(4)
    prices.note_step(4, (1 + before) * PLAIN)
    assert math.isclose(prices.rows(4), before, rel_tol=0.05), "the pace is what it was"


def test_what_is_measured_in_one_mode_of_the_machine_does_not_count_in_another() -> None:
    """Alone, the caller's thread takes twice as long for a row and thrice for three."""
    modes = iter([False] * 200 + [True] * 200 + [False])
    prices = Prices(lambda: next(modes))
    for rows in (1, 3) * 100:
        prices.note_step(rows, (1 + 0.1 * (rows - 1)) * PLAIN)
    prices.note_guesses("head", 1, 0.3 * PLAIN)
    crew, asked = prices.rows(3), prices.guess("head", 1)
    for rows in (1, 3) * 100:
        prices.note_step(rows, (2 + 0.5 * (rows - 1)) * PLAIN)
    assert math.isclose(prices.rows(3), 0.5, abs_tol=0.05) and crew < 0.25
    prices.note_guesses("head", 1, PLAIN)
    prices.note_step(1, PLAIN)
    assert (prices.rows(3), prices.guess("head", 1)) == (crew, asked)


def test_rows_that_were_never_measured_cost_more_than_those_that_were() -> None:
    prices = Prices()
    for _ in range(60):
        prices.note_step(1, PLAIN)
        prices.note_step(3, 1.5 * PLAIN)
    assert prices.rows(1) == 0.0
    assert prices.rows(2) > 0.0 and prices.rows(3) < prices.rows(4) < prices.rows(9)
    assert math.isclose(prices.rows(3), 0.5, abs_tol=0.05)


def test_a_bad_moment_does_not_end_drafting() -> None:
    """What was slow while others used the machine is tried again, and not forgotten at once."""
    prices = known(0.1, most=0)
    for rows in range(2, 10):
        for _ in range(3):
            prices.note_step(rows, 8 * PLAIN)
    made, sure = machine(0.1), text([8] * 60, 0.95)
    before = play(sure, made, Adaptive(prices=prices))
    assert before.by_rows == {1: 60} and prices.rows(2) > 1.0
    for _ in range(2 * MEMORY):
        prices.note_step(1, PLAIN)
    assert prices.rows(3) == 2 * ROW
    assert play(sure, made, Adaptive(prices=prices)).rounds < 15


def test_low_prices_are_remembered_and_those_of_another_mode() -> None:
    modes = ["busy"]
    prices = Prices(lambda: modes[0])
    for rows in (1, 5) * 60:
        prices.note_step(rows, (1 + 0.9 * (rows - 1)) * PLAIN)
    dear = prices.rows(5)
    modes[0] = "idle"
    for rows in (1, 5) * 60:
        prices.note_step(rows, (1 + 0.01 * (rows - 1)) * PLAIN)
    cheap = prices.rows(5)
    for _ in range(3 * MEMORY):
        prices.note_step(1, PLAIN)
    assert prices.rows(5) == cheap < 4 * ROW
    modes[0] = "busy"
    prices.note_step(1, PLAIN)
    assert prices.rows(5) == dear > 3.0


def test_further_guesses_have_a_price_of_their_own() -> None:
    prices = known(0.1, question=0.2, further=0.04)
    assert math.isclose(prices.guess("eagle3", 1), 0.2, rel_tol=0.15)
    assert prices.guess("eagle3", 2) == prices.guess("eagle3", 5) < 0.1


def test_no_drafter_means_plain_decoding() -> None:
    done = play(text([0] * 30), machine(0.1), Adaptive(), ())
    assert done.by_rows == {1: 30} and done.drafted == 0
    assert math.isclose(speed(done, machine(0.1)), 1.0)
    assert NOTHING.tokens == ()
