"""How much is drafted follows what was measured, and no text can lose more than is allowed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.acceptance import Kept
from ggraph.decode.costs import KEYS, LATE, NEXT, Costs, Mean
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.habits import FREE
from ggraph.decode.length import DEBT, DEBT_PER_TOKEN, RISK, STALE, Adaptive
from ggraph.decode.policy import Fixed

PLAIN = 0.004  # seconds of a step of one row
RIGHT, WRONG = 1, 0


@dataclass
class Says:
    """A drafter on paper: a guess costs `guess` plain steps, and it calls each `chance` likely."""

    name: str
    guess: float
    chance: float | None  # None: it does not say
    knows: bool = True  # whether it can be right at all


@dataclass
class Played:
    """What a text took in plain steps, and how much of it was drafted when."""

    steps: float = 0.0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # rounds in which a dear drafter was asked
    rested: int = 0  # rounds in which nobody could be asked

    @property
    def speed(self) -> float:
        return self.tokens / self.steps


def play(
    policy: Adaptive,
    drafters: Sequence[Says],
    right: Sequence[int],
    row: float,
    past: int = 100,
) -> Played:
    """Decode a text: in round i the first `right[i]` tokens of any draft are kept. A row more than
    one costs `row` plain steps."""
    done, names = Played(), [d.name for d in drafters]
    resting = since = 0
    for i, good in enumerate(right):
        resting = resting or policy.rest(names, past + done.tokens)
        if resting:
            resting, since = resting - 1, since + 1
            done.steps += 1
            done.tokens += 1
            done.rested += 1
            done.lengths.append(0)
            if not resting or i == len(right) - 1:
                policy.rested(since, PLAIN, (since - 1) * PLAIN)
                since = 0
            continue
        policy.begin(past + done.tokens)
        best, held = NOTHING, 0.0
        for d in drafters:
            wanted = policy.length(d.name, 64, held)
            if not wanted:
                continue
            chances: list[float] = []
            while not policy.whole and len(chances) < wanted:
                chances.append(d.chance or 0.5)
                if d.chance is not None and not policy.goes_on(d.name, chances):
                    break
            made = wanted if policy.whole else len(chances)
            sound = min(good, made) if d.knows else 0
            done.steps += made * d.guess
            done.asked += [i] if d.guess > 0.05 else []
            tokens = [RIGHT] * sound + [WRONG] * (made - sound)
            said = chances if d.chance is not None else ()
            draft = Draft.chain(tokens, said)
            draft, worth = policy.weigh(d.name, draft, made * d.guess * PLAIN)
            best, held = (draft, worth) if worth > held else (best, held)
        kept = tuple(range(best.tokens.count(RIGHT)))
        step = 1 + row * len(best)
        policy.learn(best, Kept(kept, (RIGHT,) * (len(kept) + 1)), step * PLAIN)
        done.steps += step
        done.tokens += len(kept) + 1
        done.lengths.append(len(best))
    return done


def known(row: float, most: int, drafters: Sequence[Says] = ()) -> Costs:
    """Costs that were measured before."""
    costs = Costs()
    costs.settle(100)
    for rows in (*range(1, most + 2), *range(1, most + 2)):
        costs.note_step(rows, (1 + row * (rows - 1)) * PLAIN)
    for d in drafters:
        costs.note_guesses(d.name, 1, d.guess * PLAIN)
    return costs


CHEAP = Says("cheap", 0.001, None)


def speed_of(length: int, right: int, row: float) -> float:
    """Tokens per plain step's time of one length."""
    return (1 + min(length, right)) / (1 + length * (row + CHEAP.guess))


@given(st.integers(0, 8), st.sampled_from([0.02, 0.1, 0.4]))
def test_the_choice_settles_at_nearly_the_best_speed(right: int, row: float) -> None:
    found = play(Adaptive(most=8), [CHEAP], [right] * 300, row)
    best = max(speed_of(k, right, row) for k in range(9))
    late = sorted(found.lengths[200:])[50]
    assert speed_of(late, right, row) > 0.95 * best, (right, row, found.lengths[200:])


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.06, 0.15, 0.4]),
    st.lists(
        st.builds(
            Says,
            st.sampled_from(["a", "b"]),
            st.sampled_from([0.001, 0.1, 0.3]),
            st.sampled_from([None, 0.05, 0.3, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=2,
        unique_by=lambda d: d.name,
    ),
    st.integers(1, 8),
)
def test_no_text_loses_more_than_it_may(
    right: list[int], row: float, drafters: list[Says], most: int
) -> None:
    """Whatever is right when, whatever drafters say and cost, however short the text: the time is
    at most the allowed debt above plain decoding's, twice where drafters lie when they are sure.
    Only what asking a cheap one cost beyond the first guess was not known before."""
    policy = Adaptive(most=most, costs=known(row, most, drafters))
    found = play(policy, drafters, right, row)
    cheap = sum(d.guess for d in drafters if d.guess < 0.02) * 8
    assert found.steps <= found.tokens + allowed(found.tokens, row) + cheap + 1e-9, found


def allowed(tokens: int, row: float) -> float:
    """Plain steps that a text of so many tokens may lose."""
    return (max(DEBT, RISK * row + FREE) + DEBT_PER_TOKEN * tokens) / RISK


def test_rounds_in_which_nobody_is_asked_are_known_beforehand() -> None:
    """A text that nobody foresees is decoded plainly for most of the time."""
    head, suffix = Says("head", 0.12, 0.6), Says("suffix", 0.01, 0.5)
    costs = known(0.1, 8, [head, suffix])
    found = play(Adaptive(costs=costs), [suffix, head], [0] * 400, 0.1)
    assert found.rested > 300


def test_a_plain_step_is_made_now_and_then_where_every_round_has_a_draft() -> None:
    """Else nobody would notice that plain decoding has become faster. Two at a time: the first
    finds the caches as a draft left them."""
    suffix = Says("suffix", 0.01, 0.9)
    policy = Adaptive(most=1, costs=known(0.1, 1, [suffix]))
    found = play(policy, [suffix], [1] * 300, 0.1)
    whole = [1] * STALE + [0, 0]
    assert found.lengths == (whole * 300)[:300]


def test_what_is_never_right_is_nearly_left_alone() -> None:
    dear, cheap = Says("head", 0.12, 0.6), Says("suffix", 0.001, 0.5)
    costs = known(0.1, 8, [dear, cheap])
    found = play(Adaptive(costs=costs), [cheap, dear], [0] * 400, 0.1)
    assert found.speed > 0.98
    assert sum(found.lengths) < 40
    assert len(found.asked) < 25


def test_a_drafter_that_begins_to_be_right_is_found_again() -> None:
    for drafter in (Says("suffix", 0.001, 0.5), Says("head", 0.12, 0.6)):
        policy = Adaptive(costs=known(0.06, 8, [drafter]))
        play(policy, [drafter], [0] * 200, 0.06)
        found = play(policy, [drafter], [8] * 400, 0.06)
        assert found.lengths[-1] >= 4, (drafter, found.lengths[-20:])


def test_what_asking_was_worth_in_earlier_texts_is_where_the_next_begins() -> None:
    """A head reads the prompt, and with it makes its first guess, behind texts in which it paid."""
    head = Says("head", 0.15, 0.5)
    for right in (4, 0):
        costs = known(0.06, 8, [head])
        assert Adaptive(costs=costs).hopes("head"), "it was never tried"
        for _ in range(40):
            play(Adaptive(costs=costs), [head], [right] * 60, 0.06)
        assert (costs.worth("head") > 0) == (right > 0)
        assert Adaptive(costs=costs).hopes("head") == (right > 0)


def test_a_guess_that_was_made_with_the_prompt_costs_nothing_in_the_next_round() -> None:
    head = Says("head", 0.15, 0.5)
    for chance, verified in ((0.9, 1), (0.1, 0)):
        policy = Adaptive(costs=known(0.12, 8, [head]))
        assert policy.rest(["head"], 100) > 0, "a question of its own cannot be afforded yet"
        policy.was_read("head")
        assert policy.rest(["head"], 100) <= 0
        policy.begin(100)
        assert policy.length("head", 8, 0.0) > 0
        assert not policy.goes_on("head", [chance]), "a further guess has its price"
        before = policy.credit
        draft, _ = policy.weigh("head", Draft.chain([RIGHT], [chance]), PLAIN)
        assert len(draft) == verified, "what is nearly sure puts half of a step's cost at stake"
        assert policy.credit == before
        assert math.isclose(policy.costs.guess("head"), 0.15), "it tells nothing of the price"
        policy.learn(draft, Kept((), (WRONG,)), PLAIN)
        assert policy.rest(["head"], 101) > 0, "the text has gone on"
    policy = Adaptive(costs=known(0.12, 8, [head]))
    policy.was_read("head")
    policy.rested(1, PLAIN, 0.0)
    assert policy.rest(["head"], 101) > 0
    whole = Adaptive(most=8, whole=True, costs=known(0.12, 8, [head]))
    whole.was_read("head")
    assert whole.rest(["head"], 100) > 0, "of a tree the first guesses are the least part"


def test_a_plain_step_behind_a_question_tells_nothing_of_plain_decoding() -> None:
    """The drafter's weights lie in the caches then; that belongs to the price of asking."""
    head = Says("head", 0.1, 0.05)
    policy = Adaptive(costs=known(0.3, 8, [head]), credit=50.0)
    for i in range(40):
        policy.begin(100 + i)
        assert policy.length("head", 8, 0.0) or i
        policy.weigh("head", Draft.chain([WRONG], [0.05]), 0.1 * PLAIN)
        policy.learn(NOTHING, Kept((), (RIGHT,)), 1.2 * PLAIN)
    assert math.isclose(policy.costs.plain, PLAIN)
    assert math.isclose(policy.costs.asked(), 0.2)
    before = policy.credit
    policy.learn(NOTHING, Kept((), (RIGHT,)), 1.2 * PLAIN)
    assert math.isclose(before - policy.credit, 0.2 - DEBT_PER_TOKEN)
    assert policy.rest(["head"], 140) == 2, "now and then one that tells"
    policy.rested(2, 1.5 * PLAIN, PLAIN)
    assert math.isclose(policy.costs.plain, PLAIN), "the second of them"


def test_a_drafter_that_promises_too_much_is_believed_less() -> None:
    """Right in one of four rounds while it says nine of ten, and a row costs a third of a step."""
    boaster = Says("suffix", 0.001, 0.9)
    policy = Adaptive(costs=known(0.34, 8, [boaster]))
    found = play(policy, [boaster], [1, 0, 0, 0] * 100, 0.34)
    assert sum(found.lengths[200:]) < 20
    honest = Adaptive(costs=known(0.06, 8, [boaster]))
    assert sum(play(honest, [boaster], [1, 0, 0, 0] * 100, 0.06).lengths[200:]) > 150


def test_the_better_draft_is_taken_and_a_dear_one_asked_for_only_where_it_may_be_better() -> None:
    sure, head = Says("suffix", 0.001, 0.95), Says("head", 0.12, 0.5)
    policy = Adaptive(costs=known(0.06, 8, [sure, head]))
    found = play(policy, [sure, head], [4] * 100, 0.06)
    assert len(found.asked) <= 3
    unsure = Says("suffix", 0.001, 0.1, knows=False)
    policy = Adaptive(costs=known(0.06, 8, [unsure, head]))
    found = play(policy, [unsure, head], [2] * 200, 0.06)
    assert len(found.asked) >= 100


def test_least_and_most_bound_the_length() -> None:
    found = play(Adaptive(most=5, least=3), [CHEAP], [4] * 200, 0.05)
    assert {n for n in found.lengths if n} <= {1, 2, 3, 4, 5}
    assert set(found.lengths[50:]) <= {0, 3, 4, 5}
    assert found.lengths[50:].count(0) <= 2 * (1 + 150 // STALE), "plain steps, now and then"
    costs = known(0.05, 8, [CHEAP, Says("dear", 0.1, None)])
    policy = Adaptive(most=8, costs=costs, credit=1.0)
    policy.begin(100)
    play(policy, [], [0], 0.05)
    assert policy.length("dear", 0, 0.0) == 0
    assert 0 < policy.length("dear", 3, 0.0) <= 3
    assert policy.length(CHEAP.name, 3, 0.0) == 3
    assert Adaptive(most=0).length("d", 9, 0.0) == 0
    assert [Fixed(4).length("d", n, 0.0) for n in (9, 3, 0)] == [4, 3, 0]
    assert Fixed(4).length("d", 9, 2.0) == 0, "the first drafter that proposes something"


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    policy = Adaptive()
    policy.begin(7)
    assert policy.length("d", 8, 0.0) == 0


TREE = Draft(tuple(range(15)), (-1, -1, -1, 0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4))


@pytest.mark.parametrize(("hits", "paid"), [(3, True), (0, False)])
def test_a_tree_is_drafted_whole_or_not_at_all(hits: int, paid: bool) -> None:
    policy = Adaptive(most=15, whole=True, costs=known(0.01, 15, [Says("t", 0.001, None)]))
    chosen = []
    for i in range(400):
        policy.begin(100 + i)
        wanted = policy.length("t", 64, 0.0)
        draft, _ = policy.weigh("t", TREE, 0.015 * PLAIN) if wanted else (NOTHING, 0.0)
        chosen.append(len(draft))
        kept = tuple(range(hits)) if draft else ()
        policy.learn(draft, Kept(kept, (*kept, 0)), (1 + 0.01 * len(draft)) * PLAIN)
    assert set(chosen) <= {0, 15}
    assert (sum(chosen[200:]) > 15 * 150) == paid


def test_a_tree_of_unknown_cost_is_tried_once() -> None:
    """What is assumed of 16 rows is more than any text may lose; what they cost shows once."""
    for row, again in ((0.3, False), (0.005, True)):
        policy = Adaptive(most=15, whole=True)
        chosen = []
        for i in range(60):
            policy.begin(100 + i)
            wanted = policy.length("t", 64, 0.0)
            draft, _ = policy.weigh("t", TREE, 0.01 * PLAIN) if wanted else (NOTHING, 0.0)
            chosen.append(len(draft))
            kept = (0, 3, 9) if draft else ()
            policy.learn(draft, Kept(kept, (*kept, 0)), (1 + row * len(draft)) * PLAIN)
        assert chosen[1] == 15
        assert (sum(chosen[2:]) > 0) == again, (row, chosen)


def test_a_mean_hardly_moves_at_a_single_disturbance() -> None:
    mean = Mean()
    for x in [9.0, *[1.0] * 20, 50.0]:
        mean.add(x)
    assert 1.0 <= mean.value < 1.06, "neither the first run nor a spike"
    for _ in range(60):
        mean.add(2.0)
    assert abs(mean.value - 2.0) < 0.02, "but it follows"


def test_costs_of_another_length_serve_until_there_are_own_ones() -> None:
    costs = known(0.1, 4)
    costs.settle(5000)
    assert costs.plain == PLAIN
    assert abs(costs.extra(3) - 0.2) < 1e-9
    for _ in range(2):
        costs.note_step(1, 2 * PLAIN)
        costs.note_step(3, 4 * PLAIN)
    assert costs.plain == 2 * PLAIN
    assert abs(costs.extra(3) - 1.0) < 1e-9
    assert costs.extra(1) == 0.0
    assert costs.longest == 5


def test_a_machine_that_slows_down_for_a_while_changes_no_price() -> None:
    """Half speed for a hundred steps at a time, and rows looked at in some of those alone."""
    costs = Costs()
    costs.settle(10)
    for step in range(2000):
        slow = 2.0 if step // 100 % 4 == 1 else 1.0
        costs.note_step(1, slow * PLAIN)
        if slow > 1 and step % 10 == 5:
            costs.note_step(5, slow * 1.4 * PLAIN)
            costs.note_guesses("head", 1, slow * 0.2 * PLAIN)
    assert abs(costs.extra(5) - 0.4) < 0.1
    assert abs(costs.guess("head") - 0.2) < 0.02


def test_a_first_run_that_took_very_long_is_not_believed() -> None:
    costs = Costs()
    costs.settle(10)
    for _ in range(2):
        costs.note_step(1, PLAIN)
    costs.note_step(2, 90 * PLAIN)
    assert costs.extra(2) <= 0.5
    costs.note_step(2, 1.3 * PLAIN)
    assert abs(costs.extra(2) - 0.3) < 1e-9


def test_a_first_run_that_took_very_long_does_not_keep_a_length_from_being_tried_again() -> None:
    """Chains of two pay here. The first run of three rows touches the plan's memory."""
    head = Says("head", 0.1, 0.9)
    costs = known(0.05, 1, [head])
    costs.settle(100)
    costs.note_step(3, 9 * PLAIN)
    found = play(Adaptive(most=2, costs=costs), [head], [2] * 60, 0.05)
    assert found.lengths[20:].count(2) >= 38, "the others are plain steps, made now and then"


def test_further_guesses_have_a_price_of_their_own() -> None:
    costs = Costs()
    costs.settle(10)
    costs.note_step(1, PLAIN)
    for _ in range(3):
        costs.note_guesses("head", 1, 0.2 * PLAIN)
        costs.note_guesses("head", 1, 0.5 * PLAIN, late=True)
    assert costs.guess("head", NEXT) == costs.guess("head"), "until one was measured"
    for _ in range(3):
        costs.note_guesses("head", 4, 0.32 * PLAIN)
    assert math.isclose(costs.guess("head"), 0.2)
    assert math.isclose(costs.guess("head", LATE), 0.5)
    assert math.isclose(costs.guess("head", NEXT), 0.04)
    for _ in range(60):
        costs.note_guesses("head", 3, 0.1 * PLAIN)
    assert costs.guess("head", NEXT) > 0, "a draft that took less than one guess is no gift"


def test_rows_that_were_never_measured_lie_between_or_above_those_that_were() -> None:
    costs = Costs()
    costs.settle(10)
    for rows, steps in ((1, 1.0), (2, 1.1), (5, 1.7)) * 2:
        costs.note_step(rows, steps * PLAIN)
    found = costs.extras(6)
    assert 0.1 < found[2] < found[3] < 0.7 < found[5]


def test_a_length_of_which_few_runs_are_known_is_drawn_to_the_others() -> None:
    """Rows of 0.1 steps each, and one lucky run of seven rows that seemed to cost nothing."""
    costs = known(0.1, 4)
    for _ in range(20):
        for rows in (1, 2, 3, 4, 5):
            costs.note_step(rows, (1 + 0.1 * (rows - 1)) * PLAIN)
    costs.note_step(7, PLAIN)
    assert costs.extra(7) == 0.0
    found = costs.extras(9)
    assert found[0] == 0.0 and found == sorted(found)
    assert all(math.isclose(found[n], 0.1 * n, abs_tol=0.02) for n in range(5))
    assert found[6] > 0.4
    for _ in range(40):
        costs.note_step(7, 1.2 * PLAIN)
    assert costs.extras(9)[6] < 0.45, "what was measured often is believed"
    assert Costs().extras(3) == [0.0, 0.1, 0.2]


def test_costs_of_another_length_count_with_the_attention_of_this_one() -> None:
    """A second row that cost 0.1 steps of a short text, where a step is half as long again here."""
    costs = known(0.1, 3)
    costs.settle(1000)
    assert math.isclose(costs.extra(2), 0.1)  # nothing is known of such texts yet
    for _ in range(2):
        costs.note_step(1, 1.5 * PLAIN)
    assert math.isclose(costs.extra(2), (0.1 + 0.5 * KEYS) / 1.5)
    assert math.isclose(costs.extra(3), (0.2 + 2 * 0.5 * KEYS) / 1.5)
    for _ in range(2):
        costs.note_step(2, 1.6 * PLAIN)
    assert math.isclose(costs.extra(2), 1.6 / 1.5 - 1)  # measured is measured
    costs.settle(100)
    assert math.isclose(costs.extra(2), 0.1)
