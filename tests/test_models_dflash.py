"""DFlash: a block's logits are the reference's, its drafts are kept as often, and change no text.

The golden folder is a drafter of three layers, the second sliding over 16 positions, which was
trained for a minute on texts of the golden Qwen3, in float16. Expected by the `dflash` package
0.1.0 with transformers 5.23 in float32: logits of blocks behind texts of several lengths, and of
two prompts the greedy text and how many tokens each round of drafts added.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import TOLERANCE, spread_error
from identity_kit import Target
from safetensors.numpy import load_file, save_file
from small_model import small_model

from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import TreeShape
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import InputError, ModelError
from models.heads.dflash import BlockHead
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import dflash_to_gguf
from models.run.drafting import DraftOptions, make_drafters
from models.run.load import load, open_session

GOLDEN = Path(__file__).parent / "golden"
TARGET, DRAFTER = GOLDEN / "tiny" / "qwen3_qknorm", GOLDEN / "dflash"
MODEL = open_model(TARGET)
EXPECTED = np.load(DRAFTER / "expected.npz")
IDS, FEATURES = EXPECTED["ids"].tolist(), EXPECTED["features"]
LENGTHS = (1, 5, 15, 16, 17, 30, 47)  # the window is 16


@pytest.fixture(scope="module", params=["folder", "gguf"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockHead:
    """The golden folder, and a GGUF file that we wrote of it."""
    found = open_head(DRAFTER, MODEL)
    assert isinstance(found, BlockHead)
    if request.param == "folder":
        return found
    out = tmp_path_factory.mktemp("dflash") / "dflash.gguf"
    dflash_to_gguf(found, MODEL, out, "f16")
    read = open_head(out, MODEL)
    assert isinstance(read, BlockHead)
    return read


def block_logits(head: BlockHead, length: int, parts: int) -> np.ndarray:
    """Logits of a block behind the golden text's first tokens, which are read in parts."""
    session = open_session(threads=1, exact=True)
    runner = BlockRunner(head, session, 96, cache_dtype=F32)
    drafter, said = BlockDrafter(runner, head.mask, head.block), []
    step = runner.step
    runner.step = lambda *a, **k: said.append(step(*a, **k)) or said[-1]  # type: ignore[func-returns-value,method-assign]
    drafter.begin(IDS[0])
    for at in range(0, length, parts):
        end = min(at + parts, length)
        drafter.observe(IDS[at + 1 : end + 1], FEATURES[at:end])
        drafter.read()
    draft = drafter.propose(head.block - 1)
    session.close()
    logits, *_ = said
    assert list(draft.tokens) == logits.argmax(axis=1).tolist()
    return logits


@pytest.mark.parametrize("length", LENGTHS)
def test_a_block_has_the_golden_logits(head: BlockHead, length: int) -> None:
    found = block_logits(head, length, 64)
    assert spread_error(found, EXPECTED[f"logits.{length}"]) < TOLERANCE


def test_texts_have_the_same_bits_however_they_were_read() -> None:
    found = open_head(DRAFTER, MODEL)
    assert isinstance(found, BlockHead)
    whole = block_logits(found, 30, 64)
    for parts in (1, 7, 16):
        assert np.array_equal(block_logits(found, 30, parts), whole)


@pytest.mark.parametrize("prompt", [0, 1])
def test_rounds_keep_as_many_tokens_as_the_reference(head: BlockHead, prompt: int) -> None:
    """The last round is cut by the length of the text there."""
    ids, text = EXPECTED[f"prompt.{prompt}"].tolist(), EXPECTED[f"text.{prompt}"].tolist()
    session = open_session(threads=1, exact=True)
    target = Runner(MODEL, session, 128, cache_dtype=F32, taps=head.taps)
    engine = Engine(target, ends=())
    runner = BlockRunner(head, session, 128, cache_dtype=F32, target=target)
    drafter, kept = BlockDrafter(runner, head.mask, head.block), []
    observe = drafter.observe
    drafter.observe = lambda t, f: kept.append(len(t)) or observe(t, f)  # type: ignore[func-returns-value,method-assign]
    s = Sampler(SamplerConfig(temp=0.0), MODEL.vocab_size)
    drafts = Speculation([drafter], Fixed(head.block - 1))
    said = engine.generate(ids, s.sample, s.accept, limit=len(text) - len(ids), drafts=drafts)
    assert list(said) == text[len(ids) :]
    told = EXPECTED[f"kept.{prompt}"].tolist()
    assert kept[1 : len(told)] == told[:-1] and sum(told[:-1]) > 2 * len(told)
    session.close()


@pytest.mark.parametrize("name", ["tiny/qwen3_qknorm", "tiny2/qwen3_5", "tiny/llama_tied"])
def test_drafts_change_no_text(name: str) -> None:
    """Greedy and seeded, also of a model with states; for another model the drafter's guesses are
    nearly all wrong."""
    ids = EXPECTED["prompt.0"].tolist()
    t = Target(GOLDEN / name, ids, DRAFTER)
    found = t.held(lambda _: [t.heads()], 7)
    assert found.same == found.texts == 2, found
    assert found.kept >= 10 or name != "tiny/qwen3_qknorm", found
    t.session.close()


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def edited(folder: Path, edit: Edit) -> Path:
    """The golden drafter, changed."""
    out = folder / "changed"
    shutil.copytree(DRAFTER, out)
    config, tensors = (
        json.loads((out / "config.json").read_text()),
        load_file(out / "model.safetensors"),
    )
    edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


BAD: dict[str, tuple[Edit, str]] = {
    "second": (lambda c, t: t.update(selector=t["norm.weight"]), "DFlash variant"),
    "lacks": (lambda c, t: t.pop("fc.weight"), "'fc.weight'"),
    "norm": (lambda c, t: t.pop("layers.1.self_attn.k_norm.weight"), "blk.1.attn_k_norm"),
    "mask": (lambda c, t: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "token": (lambda c, t: c["dflash_config"].update(mask_token_id=320), "masked token 320"),
    "layers": (lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 3, 6]), "tapped layers"),
    "listed": (lambda c, t: c["dflash_config"].update(target_layer_ids="all"), "no list"),
    "fewer": (lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 3]), "fc.weight"),
    "block": (lambda c, t: c.update(block_size=1), "blocks of 1"),
    "wide": (lambda c, t: c.update(hidden_size=128), "another model"),
    "seen": (lambda c, t: c.update(is_causal=False), "sliding layers that see later rows"),
    "more": (lambda c, t: t.update({"layers.0.mlp.bias": t["norm.weight"]}), "layers.0.mlp.bias"),
    "factor": (lambda c, t: c.update(output_multiplier=0), "logits times 0"),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_what_does_not_fit_is_one_clear_line(what: str, tmp_path: Path) -> None:
    edit, words = BAD[what]
    with pytest.raises(ModelError, match=words) as said:
        open_head(edited(tmp_path, edit), MODEL)
    assert "\n" not in str(said.value)


def test_a_block_makes_no_tree(tmp_path: Path) -> None:
    m = load(small_model(tmp_path / "small.gguf", {}, TARGET, "f32"), threads=1, head=DRAFTER)
    for name in ("dflash", "eagle3"):
        (made,) = make_drafters(m, DraftOptions((name,)))
        assert isinstance(made, BlockDrafter) and made.name == name
        with pytest.raises(InputError, match="no tree"):
            make_drafters(m, DraftOptions((name,), tree=TreeShape(12, 3, 3)))
    with pytest.raises(InputError, match="own layers draft"):
        make_drafters(m, DraftOptions(("mtp",)))
    m.close()


def test_logits_are_scaled_and_bent_as_the_config_says(tmp_path: Path) -> None:
    """`output_multiplier` multiplies; the cap bends what comes of it."""

    def told(c: dict[str, Any], _: object) -> None:
        c.update(output_multiplier=0.5, final_logit_softcapping=3.0)

    found = open_head(edited(tmp_path, told), MODEL)
    assert isinstance(found, BlockHead)
    wanted = np.tanh(EXPECTED["logits.16"] * 0.5 / 3.0) * 3.0
    assert spread_error(block_logits(found, 16, 64), wanted) < TOLERANCE
