"""A head that drafts blocks says in a batch what it says alone, and changes no text there."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import openai
import pytest
from serve_kit import served
from serving_kit import CONTEXT, World, differences, history
from small_model import small_model
from test_serving_heads import Noting, always, best, finish

from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.sampler import SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.serving.blocks import ListBlock
from ggraph.serving.heads import HeadDrafter
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from models.heads.dflash import BlockHead
from models.run.generation import Generation
from models.run.load import load

GOLDEN = Path(__file__).parent / "golden"
TARGET, DRAFTER = GOLDEN / "tiny" / "qwen3_qknorm", GOLDEN / "dflash"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7], list(range(40)), [2, 7, 1, 8, 2, 8]]
HISTORIES = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("blocks") / "small.gguf", source=TARGET)


@pytest.fixture(scope="module")
def world(path: Path) -> World:
    return World.of(path, head=DRAFTER)


@pytest.fixture(scope="module")
def oracle(path: Path) -> list[Noting]:
    """What the head drafts for each prompt by itself, over a cache and a mask of its own."""
    m, found = load(path, ctx_size=CONTEXT, threads=1, head=DRAFTER), []
    assert isinstance(m.head, BlockHead)
    for prompt in PROMPTS:
        runner = BlockRunner(m.head, m.session, CONTEXT, target=m.runner)
        drafter = BlockDrafter(runner, m.head.mask, m.head.block, name="head")
        noting = Noting(6)
        m.engine.reset()
        drafts = Speculation([drafter], noting)
        list(m.engine.generate(prompt, best, lambda _: None, limit=24, drafts=drafts))
        found.append(noting)
    m.close()
    return found


def asked(w: World, prompt: Sequence[int], noting: Noting) -> Request:
    drafts = Speculation([HeadDrafter("head", always)], noting)
    return Request(prompt, Plain(best, w.batch.tokenizer.eos_ids), 24, drafts=drafts)


def test_a_block_in_a_batch_is_the_block_alone(world: World, oracle: list[Noting]) -> None:
    """Guess by guess, though windows slide in one layer, slots lie anywhere and others ask."""
    batch = world.fresh(Limits())
    assert [type(g) for g in batch.guessers] == [ListBlock]
    notes = [Noting(6) for _ in PROMPTS]
    for prompt, noting in zip(PROMPTS, notes, strict=True):
        batch.submit(asked(world, prompt, noting))
    finish(batch)
    assert batch.counters.accepted
    for noting, wanted in zip(notes, oracle, strict=True):
        common = noting.drafts.keys() & wanted.drafts.keys()
        assert len(common) > 3
        for at in common:
            assert noting.drafts[at].tokens == wanted.drafts[at].tokens


def test_no_history_changes_a_text(world: World) -> None:
    seen: Counter[str] = Counter()
    wrong = [d for s in range(HISTORIES) for d in differences(world, history(s), seen)]
    assert not wrong and seen["accepted"] and seen["refused"]


def test_blocks_that_find_no_spare_slots_are_not_drafted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggraph.serving.blocks.SPARE", 9)
    batch = world.fresh(Limits())
    notes = [Noting(6) for _ in PROMPTS]
    for prompt, noting in zip(PROMPTS, notes, strict=True):
        batch.submit(asked(world, prompt, noting))
    finish(batch)
    assert any(len(d) for d in notes[0].drafts.values())
    assert not all(len(d) for d in notes[1].drafts.values())


def test_it_is_served(path: Path) -> None:
    with (
        served(path, "--head", str(DRAFTER)) as running,
        closing(load(path, threads=1)) as alone,
    ):
        for drafters in (["head"], ["suffix", "head"]):
            wish = {"speculative": {"drafters": drafters, "most": 6}, "temperature": 0.0}
            reply = running.client.completions.create(
                model="any", prompt="to be or", max_tokens=24, extra_body=wish
            )
            ids = alone.tokenizer.encode("to be or", bos=None)
            wanted = "".join(Generation(alone, ids, SamplerConfig(temp=0.0), 24).run(None))
            assert reply.choices[0].text == wanted
        with pytest.raises(openai.BadRequestError, match="this head makes no trees"):
            running.client.completions.create(
                model="any", prompt="to", extra_body={"speculative": {"drafters": ["tree"]}}
            )
