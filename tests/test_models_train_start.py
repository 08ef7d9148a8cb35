"""A head to go on from, and the texts that are only tested on."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import learnable_model

from ggraph import InputError
from ggraph.formats.checkpoint import RawTensor
from models.heads import layouts as heads
from models.run.load import Loaded, load
from models.train.data import OWN_INDEX, AnswerOptions, Text, make_answers

torch = pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
loop = importlib.import_module("models.train.loop")
parts = importlib.import_module("models.train.parts")
export = importlib.import_module("models.train.export")
start = importlib.import_module("models.train.start")
started = start.started

TAPS = (0, 1, 2)
OPTIONS = AnswerOptions(new_tokens=16, text_tokens=128, lanes=8, own_share=0.0, seed=5)
SHORT = loop.TrainOptions(draft_vocab=64, epochs=0.5, batch_tokens=256, save_seconds=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(learnable_model(tmp_path_factory.mktemp("start")), ctx_size=128)


@pytest.fixture(scope="module")
def data(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    prompts = [f"What is {i} and {i * i % 17}?" for i in range(160)]
    make_answers(loaded, prompts, TAPS, folder, OPTIONS)
    return folder


@pytest.fixture(scope="module")
def first(loaded: Loaded, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A head after half an epoch, and its folder, with `head.gguf` beside it."""
    out = tmp_path_factory.mktemp("first")
    net, ids = loop.train(loop.Target.of(loaded.model), data, out, SHORT)
    export.export_folder(net, loaded.model, TAPS, ids, out / "head")
    export.export_gguf(out / "head", loaded.model, out / "head.gguf", "f16")
    return net, out


@pytest.mark.parametrize("name", ["head", "head.gguf"])
def test_a_stored_head_is_the_net_that_it_was(
    name: str, loaded: Loaded, first: tuple[Any, Path]
) -> None:
    net, out = first
    again, ids = started(out / name, loaded.model, TAPS)
    assert again.config == net.config
    assert len(ids) == 64
    for part, value in net.state_dict().items():
        kept = again.state_dict()[part]
        assert torch.equal(kept, value.half().float()), f"{name}: {part}"


def test_a_training_goes_on_from_a_head(
    loaded: Loaded, data: Path, first: tuple[Any, Path], tmp_path: Path
) -> None:
    target = loop.Target.of(loaded.model)
    still = replace(SHORT, rate=1e-9, draft_vocab=32)  # the head's vocabulary counts, not this
    net, ids = loop.train(target, data, tmp_path / "still", still, start=first[1] / "head")
    assert len(ids) == 64
    for part, value in first[0].state_dict().items():
        assert torch.allclose(net.state_dict()[part], value, atol=2e-3), part
    told: list[dict[str, Any]] = []
    more = replace(SHORT, epochs=3, seed=1)
    loop.train(target, data, tmp_path / "more", more, told.append, start=first[1] / "head")
    assert told[-1]["loss"] < told[0]["loss"]


def test_a_head_learns_further_tokens(
    loaded: Loaded, data: Path, first: tuple[Any, Path], tmp_path: Path
) -> None:
    target = loop.Target.of(loaded.model)
    net, ids = started(first[1] / "head", loaded.model, TAPS)
    map_of_rows = torch.from_numpy(
        np.random.default_rng(1).normal(size=(target.output.shape[1],) * 2)
    )
    output = torch.from_numpy(target.output).double()
    net.lm_head.weight.data = (output[torch.from_numpy(ids)] @ map_of_rows).float()
    more = np.setdiff1d(np.arange(target.model.vocab_size), ids)[::3]
    larger, all_ids = start.grown(net, ids, more, target.output)
    assert all_ids.tolist() == sorted([*ids, *more])
    rows = larger.lm_head.weight.data.double()
    assert torch.allclose(rows, output[torch.from_numpy(all_ids)] @ map_of_rows, atol=1e-3)
    for part, value in net.state_dict().items():
        assert part == "lm_head.weight" or torch.equal(larger.state_dict()[part], value)

    told: list[dict[str, Any]] = []
    wider = replace(SHORT, draft_vocab=len(ids) + 9, seed=1)
    net, ids = loop.train(target, data, tmp_path, wider, told.append, start=first[1] / "head")
    assert len(ids) == 64 + 9
    assert net.config.vocabulary == len(ids)
    assert np.isfinite(told[-1]["loss"])


def test_heads_that_cannot_be_gone_on_from_are_refused(
    loaded: Loaded, first: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = first[1] / "head"
    with pytest.raises(InputError, match=r"reads layers \(0, 1, 2\), the data has \(0, 1, 3\)"):
        started(path, loaded.model, (0, 1, 3))
    head = heads.open_head(path, loaded.model)
    assert isinstance(head, heads.Head)
    less = {n: t for n, t in head.catalogue.items() if n != "output.weight"}
    norm = head.catalogue["output_norm.weight"]
    more = {**head.catalogue, "fc_norm.0.weight": RawTensor("x", norm.dtype, norm.shape, norm.data)}
    config = replace(head.config, norm_before_residual=True)
    for other, match in (
        (replace(head, catalogue=less), "needs a 'output.weight' of the head's own"),
        (replace(head, catalogue=more), "no place for 'fc_norm.0.weight'"),
        (replace(head, config=config), "training knows one layer"),
        (object(), "only EAGLE-3 heads that draft in turn"),
    ):
        monkeypatch.setattr("models.train.start.open_head", lambda *_, found=other: found)
        with pytest.raises(InputError, match=match):
            started(path, loaded.model, TAPS)


@pytest.mark.parametrize("every", [2, 3, 4, 5, 8, 16, 32])
def test_held_out_texts_are_like_the_others(every: int) -> None:
    """As many of them are sampled as of all, in given texts and the target's own."""
    nothing = np.zeros(0, np.int32)
    for begin in (0, OWN_INDEX):
        texts = [Text(begin + i, 0, nothing, nothing) for i in range(32_000)]
        held = [t.index for t in texts if parts.is_held(t)]
        assert 0.9 < len(held) / 1000 < 1.1
        sampled = sum(i % every == every - 1 for i in held)
        assert 0.8 < sampled * every / len(held) < 1.2


def test_all_of_an_answer_and_a_share_of_the_prompt_are_learnt_from() -> None:
    tokens = np.arange(801, dtype=np.int32)
    text = Text(7, 401, tokens, np.zeros((800, 1), np.float16))
    answers = parts.positions_of(text, 0.0)
    assert answers.sum() == 400 and answers[400:].all(), "the first answer token is guessed at 400"
    assert parts.positions_of(text, 1.0).all()
    some = parts.positions_of(text, 0.3, (1, 2))
    assert some[400:].all() and 80 < some[:400].sum() < 160
    assert (some == parts.positions_of(text, 0.3, (1, 2))).all()
    assert (some != parts.positions_of(text, 0.3, (1, 3))).any(), "others in the next batch"
    with pytest.raises(InputError, match=r"prompts 1\.5"):
        replace(SHORT, prompts=1.5)
