"""A draft head in a batch says what it says alone, whoever else asks it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_kit import CONTEXT, World
from small_model import TINY, learnable_model, padded, small_model

from ggraph import InputError
from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.runner import Runner
from ggraph.decode.speculation import Speculation
from ggraph.serving.batch import Batch
from ggraph.serving.heads import HeadDrafter
from ggraph.serving.smaller import ListModel
from ggraph.serving.steps import Row
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits
from models.registry import open_model
from models.run.load import load

HEAD = TINY / "eagle3_for_llama_tied"
TREE = TreeShape(9, 3, 3)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7], [2, 7, 1, 8, 2, 8], list(range(40))]


@dataclass
class Noting:
    """Always `most` tokens; keeps every draft with the number of the token behind which it came."""

    most: int = 4
    drafts: dict[int, Draft] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    at: int = 1

    def ask(
        self, drafter: str, room: int, best: Draft = NOTHING, chances: Sequence[float] = ()
    ) -> int:
        return min(self.most, room)

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        self.drafts[self.at] = draft
        self.chances += draft.chances
        return draft

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        self.at += len(kept.tokens)


def always(chances: Sequence[float]) -> bool:
    return True


def best(logits: np.ndarray) -> int:
    return int(np.argmax(logits))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("heads")
    return World.of(learnable_model(folder), head=HEAD, smaller=small_model(folder / "other.gguf"))


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[TreeShape | None, list[Noting]]:
    """What the head drafts for each prompt by itself, over a cache and a mask of its own."""
    path = learnable_model(tmp_path_factory.mktemp("alone"))
    m = load(path, ctx_size=CONTEXT, threads=1, head=HEAD)
    assert m.head is not None
    found: dict[TreeShape | None, list[Noting]] = {}
    for tree in (None, TREE):
        found[tree] = []
        for prompt in PROMPTS:
            noting = noting_of(tree)
            runner = DraftRunner(m.head, m.session, CONTEXT, target=m.runner)
            drafter = EagleDrafter(runner, name="head", tree=tree)
            m.engine.reset()
            drafts = Speculation([drafter], noting)
            list(m.engine.generate(prompt, best, lambda _: None, limit=24, drafts=drafts))
            found[tree].append(noting)
    m.close()
    return found


@pytest.fixture(scope="module")
def alone(oracles: dict[TreeShape | None, list[Noting]]) -> list[Noting]:
    """Of chains."""
    return oracles[None]


def noting_of(tree: TreeShape | None) -> Noting:
    return Noting() if tree is None else Noting(tree.total_tokens - 1)


def asked(
    w: World,
    prompt: Sequence[int],
    noting: Noting,
    limit: int = 24,
    tree: TreeShape | None = None,
    asks: str = "head",
) -> Request:
    drafts = Speculation([HeadDrafter(asks, always, tree, asks=asks)], noting)
    return Request(prompt, Plain(best, w.batch.tokenizer.eos_ids), limit, drafts=drafts)


def finish(batch: Batch, wanted: int = 0) -> None:
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)


def test_a_head_says_in_a_batch_what_it_says_alone(world: World, alone: list[Noting]) -> None:
    """Guess by guess: the oracle has a cache in order, and a mask."""
    batch = world.fresh(Limits())
    notes = [Noting() for _ in PROMPTS]
    for prompt, noting in zip(PROMPTS, notes, strict=True):
        batch.submit(asked(world, prompt, noting))
    finish(batch)
    for noting, by_itself in zip(notes, alone, strict=True):
        assert noting.drafts == by_itself.drafts and len(noting.drafts) > 5
        assert np.allclose(noting.chances, by_itself.chances, rtol=1e-4)


def test_a_head_alone_in_a_batch_says_the_same(world: World, alone: list[Noting]) -> None:
    batch, noting = world.fresh(Limits(alone=16, beside=16, texts=2, rows=8)), Noting()
    batch.submit(asked(world, PROMPTS[3], noting))
    finish(batch)
    assert noting.drafts == alone[3].drafts


def test_trees_and_chains_of_a_head_grow_beside_each_other(
    world: World, oracles: dict[TreeShape | None, list[Noting]]
) -> None:
    """Node by node: the oracle has a mask, under which a node sees its forerunners."""
    batch, asking = world.fresh(Limits()), (TREE, None, TREE, TREE)
    notes = [noting_of(tree) for tree in asking]
    for prompt, noting, tree in zip(PROMPTS, notes, asking, strict=True):
        batch.submit(asked(world, prompt, noting, tree=tree))
    finish(batch)
    for i, (noting, tree) in enumerate(zip(notes, asking, strict=True)):
        assert noting.drafts == oracles[tree][i].drafts and len(noting.drafts) > 5
        branched = [d for d in noting.drafts.values() if not d.is_chain]
        assert bool(branched) == (tree is not None)


def test_trees_of_many_texts_end_where_there_is_no_room_for_their_rows(world: World) -> None:
    """Sixteen trees ask for more rows of guesses than there are: what is there is drafted."""
    batch, wide = world.fresh(Limits()), TreeShape(40, 8, 6)
    plain = World.fresh(world, Limits())
    texts = []
    for i in range(16):
        texts.append(batch.submit(asked(world, [i, 5, 9], Noting(12), 12, wide)))
        plain.submit(Request([i, 5, 9], Plain(best, world.batch.tokenizer.eos_ids), 12))
    others = list(plain.waiting)
    finish(batch)
    finish(plain)
    assert [t.tokens for t in texts] == [t.tokens for t in others]
    assert batch.counters.drafted > 0


def test_many_texts_whose_prompts_wait_ask_the_head_at_once(
    world: World, alone: list[Noting]
) -> None:
    """More true rows than a step has."""
    batch, noting = world.fresh(Limits()), Noting()
    r = np.random.default_rng(3)
    for _ in range(3):
        batch.submit(asked(world, r.integers(0, 200, 90).tolist(), Noting(), 6))
    batch.submit(asked(world, PROMPTS[3], noting))
    finish(batch)
    assert noting.drafts == alone[3].drafts


def test_who_begins_with_anothers_rows_has_the_heads_too(world: World, alone: list[Noting]) -> None:
    """All but the last token were in the cache, and still the head has read them all."""
    batch = world.fresh(Limits())
    batch.submit(asked(world, PROMPTS[3], Noting()))
    finish(batch)
    noting = Noting()
    text = batch.submit(asked(world, PROMPTS[3], noting))
    finish(batch)
    assert text.reused == len(PROMPTS[3]) - 1
    first = next(iter(alone[3].drafts))
    assert noting.drafts[first] == alone[3].drafts[first]


def test_what_the_head_knew_of_a_slot_goes_with_its_token(
    world: World, alone: list[Noting]
) -> None:
    """A cache so small that every slot has had other tokens, some of texts without a head."""
    batch = world.fresh(Limits(), slots=CONTEXT)
    r = np.random.default_rng(1)
    for _ in range(4):
        noise = r.integers(0, 200, 60).tolist()
        batch.submit(asked(world, noise, Noting(), 30))
        batch.submit(Request(noise[::-1], Plain(best), 30))
        finish(batch)
    assert batch.memory.evicted > CONTEXT
    noting = Noting()
    batch.submit(asked(world, PROMPTS[0], noting))
    finish(batch)
    assert noting.drafts == alone[0].drafts


def test_a_cancelled_text_leaves_the_heads_rows_of_others(
    world: World, alone: list[Noting]
) -> None:
    batch, noting = world.fresh(Limits()), Noting()
    gone: list[Text] = [batch.submit(asked(world, PROMPTS[3], Noting())) for _ in range(2)]
    batch.submit(asked(world, PROMPTS[3], noting))
    for _ in range(3):
        batch.step()
    for text in gone:
        batch.cancel(text)
    finish(batch)
    assert noting.drafts == alone[3].drafts


@pytest.fixture(scope="module")
def model_alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Noting]:
    """What the smaller model drafts for each prompt by itself."""
    m, found = load(learnable_model(tmp_path_factory.mktemp("small")), ctx_size=CONTEXT), []
    other = open_model(small_model(tmp_path_factory.mktemp("other") / "other.gguf"))
    for prompt in PROMPTS:
        noting = Noting()
        drafter = ModelDrafter(Runner(other.beside("small."), m.session, CONTEXT))
        m.engine.reset()
        drafts = Speculation([drafter], noting)
        list(m.engine.generate(prompt, best, lambda _: None, limit=24, drafts=drafts))
        found.append(noting)
    m.close()
    return found


def test_a_smaller_model_says_in_a_batch_what_it_says_alone(
    world: World, model_alone: list[Noting], alone: list[Noting]
) -> None:
    """Beside others that ask the head, and behind one whose rows it has read already."""
    batch, notes = world.fresh(Limits()), [Noting() for _ in PROMPTS]
    beside = Noting()
    batch.submit(asked(world, PROMPTS[0], beside))  # first, so that the head reads its own rows
    for prompt, noting in zip(PROMPTS, notes, strict=True):
        batch.submit(asked(world, prompt, noting, asks="model"))
    finish(batch)
    for noting, by_itself in zip([*notes, beside], [*model_alone, alone[0]], strict=True):
        missing = set(by_itself.drafts) - set(noting.drafts)
        assert missing <= {1}, "who is done with reading first waits for others before it drafts"
        kept = {n: draft for n, draft in by_itself.drafts.items() if n not in missing}
        assert noting.drafts == kept and len(kept) > 5
    again = Noting()
    text = batch.submit(asked(world, PROMPTS[3], again, asks="model"))
    finish(batch)
    assert text.reused == len(PROMPTS[3]) - 1
    assert again.drafts == model_alone[3].drafts


def test_a_smaller_model_reads_what_it_missed_piece_by_piece(
    world: World, monkeypatch: pytest.MonkeyPatch, model_alone: list[Noting]
) -> None:
    """It drafts as soon as it has read all; none of the text depends on it."""
    monkeypatch.setattr("ggraph.serving.smaller.WINDOW", 7)
    batch, noting = world.fresh(Limits()), Noting()
    batch.submit(asked(world, PROMPTS[3], noting, asks="model"))
    finish(batch)
    said = {at: d for at, d in noting.drafts.items() if d}
    assert 0 < len(said) < len(noting.drafts)
    same = [at for at in said if at in model_alone[3].drafts]
    assert same and all(said[at] == model_alone[3].drafts[at] for at in same)


def test_a_smaller_model_reads_tokens_that_it_has_not(tmp_path: Path) -> None:
    """Its files pad the vocabulary less: the text is the target's, and drafts go on."""
    other = padded(tmp_path / "other.gguf", 318)
    w, prompt, noting = (
        World.of(learnable_model(tmp_path), smaller=other),
        [319, 3, 319, 3],
        Noting(),
    )
    w.plain.engine.reset()
    plain = list(w.plain.engine.generate(prompt, best, lambda _: None, limit=24))
    batch = w.fresh(Limits())
    text = batch.submit(asked(w, prompt, noting, asks="model"))
    finish(batch)
    assert text.tokens[len(prompt) :] == plain
    assert sum(len(d.tokens) for d in noting.drafts.values()) > 10


@pytest.mark.parametrize("tree", [None, TREE])
def test_a_smaller_model_reads_no_more_than_it_was_trained_for(
    tmp_path: Path, tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table of positions may end there. Texts that are longer go on without it."""
    trained, places = 24, set[int]()
    other = small_model(tmp_path / "few.gguf", {"llama.context_length": trained})
    w = World.of(learnable_model(tmp_path), smaller=other)
    run = ListModel._run

    def noted(self: ListModel, rows: Sequence[Row], *given: Any, **named: Any) -> Any:
        places.update(r.position for r in rows)
        return run(self, rows, *given, **named)

    monkeypatch.setattr(ListModel, "_run", noted)
    batch, prompts = w.fresh(Limits()), [[3, 1, 4], [7] * 17, [2] * 23, [*range(40)]]
    notes = [noting_of(tree) for _ in prompts]
    texts = [
        batch.submit(asked(w, p, n, 40, tree, "model")) for p, n in zip(prompts, notes, strict=True)
    ]
    finish(batch)
    for text, prompt in zip(texts, prompts, strict=True):
        w.plain.engine.reset()
        plain = list(w.plain.engine.generate(prompt, best, lambda _: None, limit=40))
        assert text.tokens[len(prompt) :] == plain
        assert len(text.tokens) > trained
    assert max(places) < trained, "read beyond"
    assert max(places) >= trained - 2, "it drafted as long as it could"
    assert any(notes[0].drafts.values()) and not any(notes[3].drafts.values())


def test_a_head_is_the_batchs_to_ask() -> None:
    with pytest.raises(InputError, match="come from its head"):
        HeadDrafter("head", always).propose(3)
