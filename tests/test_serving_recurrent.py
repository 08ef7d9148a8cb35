"""Many texts of a recurrent model at once are the texts that decoding alone gives."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from serving_kit import (
    CONTEXT,
    RECURRENT,
    SLOTS,
    STATES,
    TEXTS,
    Asked,
    World,
    alone,
    differences,
    history,
    request_of,
)  # fmt: skip

from ggraph import InputError
from ggraph.decode.draft.tree import Draft
from ggraph.decode.model import LOG, LONGEST_DRAFT
from ggraph.decode.policy import Fixed
from ggraph.decode.speculation import Speculation
from ggraph.serving.batch import Batch
from ggraph.serving.states import KEPT
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from ggraph.tensor import Array

HISTORIES = 6  # as many more as wanted: python scripts/check_serving.py --histories 2000


@pytest.fixture(scope="module", params=RECURRENT)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.recurrent(request.param, tmp_path_factory.mktemp("recurrent"))


class Foreknowing:
    """Drafts the whole rest of a text at once."""

    name, taps = "foreknowing", ()

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.at = text, 0

    def begin(self, first: int) -> None:
        self.at = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        self.at += len(tokens)

    def propose(self, limit: int) -> Draft:
        return Draft.chain(self.text[self.at : self.at + limit])


def of(prompt: Sequence[int], limit: int, drafter: str = "") -> Asked:
    return Asked(0, tuple(prompt), limit, 0.0, 0, drafter, 0, 0)


def finish(batch: Batch) -> None:
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)


def test_histories_change_no_text(world: World) -> None:
    seen: Counter[str] = Counter()
    assert [line for s in range(HISTORIES) for line in differences(world, history(s), seen)] == []
    del seen["restored"]  # which hangs on when the disk's thread had its turn
    happened = {what for what, count in seen.items() if count}
    assert happened == set(seen), f"nothing was {set(seen) - happened}"


def test_a_prompt_is_read_in_pieces_beside_texts_that_go_on(world: World) -> None:
    batch = world.fresh(Limits(texts=3, alone=16, beside=3))
    first = of([1, 2, 3], 40, "tree")
    texts = [(first, batch.submit(request_of(world, first, batch.prices)))]
    for _ in range(4):
        batch.step()
    for late in (of(range(60), 8), of([*range(9)] * 5, 8, "chain")):
        texts.append((late, batch.submit(request_of(world, late, batch.prices))))
    finish(batch)
    for a, text in texts:
        assert text.tokens[len(a.prompt) :] == alone(world, a)


def test_drafts_longer_than_the_log_together(world: World) -> None:
    """Six texts know all that they will say: what becomes text waits in the log for the next step,
    and others draft no more than the log has room for."""
    batch = world.fresh(Limits(texts=TEXTS, rows=256))
    every = [of([i, i + 1], 70) for i in range(TEXTS)]
    texts = []
    for a in every:
        drafts = Speculation([Foreknowing([*a.prompt, *alone(world, a)])], Fixed(64))
        voice = Plain(lambda row: int(row.argmax()), world.batch.tokenizer.eos_ids)
        texts.append(batch.submit(Request(a.prompt, voice, a.limit, drafts=drafts)))
    fullest = 0
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)
        fullest = max(fullest, KEPT - batch.memory.log.free)
    assert fullest > LONGEST_DRAFT  # more than one text fills
    for a, text in zip(every, texts, strict=True):
        assert text.tokens[len(a.prompt) :] == alone(world, a)
    assert batch.memory.log.free == KEPT == LOG - 1


def test_texts_whose_features_are_kept_run_beside_drafts(world: World) -> None:
    """A step of a batch is then two of the model; the log keeps what either needs."""
    layers = world.batch.model.layer_count
    runner = ListRunner(
        world.batch.model, world.batch.session, SLOTS, CONTEXT, taps=(0, layers), texts=STATES
    )
    batch = Batch(runner, Limits(texts=TEXTS))
    every, texts = [of([i, 5, 6], 20, "chain") for i in range(4)], []
    for i, a in enumerate(every):
        r = request_of(world, a, batch.prices)
        kept = Request(r.prompt, r.voice, r.limit, drafts=r.drafts, features=bool(i % 2))
        texts.append(batch.submit(kept))
    finish(batch)
    assert batch.counters.accepted
    for a, text in zip(every, texts, strict=True):
        new = text.tokens[len(a.prompt) :]
        assert new == alone(world, a)
        if text.features:
            assert len(np.concatenate(text.features)) == len(a.prompt) + len(new) - 1


def test_what_cannot_be_had_is_refused(world: World) -> None:
    m = world.batch
    runner = ListRunner(m.model, m.session, SLOTS, CONTEXT, texts=2)
    with pytest.raises(InputError, match=r"the runner of \w+ has states for 2 texts"):
        Batch(runner, Limits(texts=3))
