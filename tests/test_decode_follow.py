"""Tokens that follow one another: their steps are made ahead, and bring what text brings."""

import random
from pathlib import Path

import numpy as np
import pytest

from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import InputError
from ggraph.tensor import Array
from models.registry import open_model
from models.run.load import open_session

GOLDEN = Path(__file__).parent / "golden"
CONTEXT = 280  # beyond the smallest bucket of contexts
NAMES = (
    "tiny/llama_tied", "tiny/mistral_sliding", "tiny2/qwen3_5", "tiny2/lfm2",
    "tiny2/granite_hybrid",
)  # fmt: skip


def played(runner: Runner, seed: int, *, ahead: bool) -> list[Array]:
    """What a history of texts brings: appended, drafted behind, forgotten and begun again."""
    rng, found = random.Random(seed), []
    runner.past = 0
    for _ in range(12):
        tokens = [rng.randrange(1, 200) for _ in range(rng.choice([1, 1, 3, 40]))]
        room = CONTEXT - runner.past
        what = rng.choice(["text", "follow", "follow", "follow", "draft", "again", "picks"])
        if what == "again" or room < len(tokens):
            runner.past = 0
        elif what == "picks":
            runner.picks = rng.choice([0, 1])
        elif what == "text":
            found.append(runner.text(tokens).logits)
        elif what == "follow":
            steps = [runner.follow(t) if ahead else runner.text([t]) for t in tokens]
            found += [s.logits for s in steps]
        elif room > 4 and runner.past:
            at = range(runner.past, runner.past + 3)
            found.append(runner.step(Rows(tokens[:1] * 3, at, at, runner.past), range(3)).logits)
            runner.keep(range(rng.choice([1, 2, 3])))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_follow_are_text(name: str) -> None:
    model, runners = open_model(GOLDEN / name), []
    for _ in range(2):
        runner = Runner(model, open_session(threads=2, exact=True), CONTEXT, cache_dtype=F32)
        runners.append(runner)
    steps = 0
    for seed in range(8):
        left, right = (
            played(r, seed, ahead=a) for r, a in zip(runners, (True, False), strict=True)
        )
        assert len(left) == len(right)
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True)), seed
        assert runners[0].past == runners[1].past
        steps += len(left)
    assert steps > 200


def test_a_step_that_was_made_ahead_is_checked_and_used_once() -> None:
    runner = Runner(open_model(GOLDEN / NAMES[0]), open_session(threads=1, exact=True), 64)
    runner.text([1, 2, 3])
    first = runner.follow(4).logits.copy()
    for wrong in (-1, 1 << 30):
        with pytest.raises(InputError, match="indices"):
            runner.follow(wrong)
        assert runner.past == 4
    runner.past = 3
    assert np.array_equal(runner.follow(4).logits, first)
    assert runner.past == 4


def test_the_context_ends() -> None:
    runner = Runner(open_model(GOLDEN / NAMES[0]), open_session(threads=1, exact=True), 8)
    runner.text(range(1, 8))
    runner.follow(3)
    with pytest.raises(InputError, match="full"):
        runner.follow(3)
    assert runner.past == 8


def test_a_step_beyond_the_cache_is_told_as_such() -> None:
    session = open_session(threads=1, exact=True)
    runner = Runner(open_model(GOLDEN / "tiny/llama_tied"), session, 32)
    slots = runner.shape(1, 1, 1).cache_rows - 1
    at = range(slots, slots + 1)
    with pytest.raises(InputError, match=f"a step to slot {slots}: the cache has {slots} slots"):
        runner.step(Rows([1], at, at, 0), [0])
    session.close()
