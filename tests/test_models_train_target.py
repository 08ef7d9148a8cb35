"""The target in PyTorch: features and texts of ggraph's own engine; training in a time limit."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import TINY, small_model

from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import ModelError
from models.registry import Model, open_model
from models.run.load import load, open_session
from models.train.prompts import Turn

torch = pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
target_module = importlib.import_module("models.train.target")
online = importlib.import_module("models.train.online")
parts = importlib.import_module("models.train.parts")

TAPS = (3, 0, 2)  # any order


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def on_cpu(model: Model) -> Any:
    return target_module.TorchTarget(model, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["llama_tied", "llama3_rope_scaled", "qwen2_bias", "qwen3_qknorm"])
def test_features_are_those_of_ggraph(name: str) -> None:
    model = open_model(TINY / name)
    ids = np.load(TINY / name / "expected.npz")["ids"].tolist()[:24]
    layers = (*TAPS, model.layer_count)
    runner = Runner(model, open_session(threads=1, exact=True), 64, taps=layers, cache_dtype=F32)
    found = runner.text(ids, every=True)
    want = np.concatenate([found.taps[i] for i in layers], -1)
    features = on_cpu(model).features(torch.tensor([ids, ids[::-1]]), TAPS)
    assert features.shape == (2, len(ids), 4 * model.width)
    assert np.abs(features[0].numpy() - want).max() < 2e-4 * np.abs(want).max()
    logits = on_cpu(model).logits(features[0, :, -model.width :]).numpy()
    assert np.abs(logits - found.logits).max() < 2e-4 * np.ptp(found.logits)


@pytest.mark.parametrize("name", ["mistral_sliding", "qwen3_moe"])
def test_other_targets_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="only plain dense targets"):
        on_cpu(open_model(TINY / name))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("target") / "small.gguf")


def test_texts_are_what_the_engine_writes(small: Path) -> None:
    """Given prompts are answered greedily as by ggraph; own prompts are closed and answered."""
    m = load(small, threads=1, exact=True, cache_type="f32", ctx_size=64)
    turn = Turn.of(m.tokenizer)
    given = [m.prompt_ids("Hi"), m.prompt_ids("What?")]
    how = target_module.Writing(turn, sorted(m.tokenizer.eos_ids), length=48)
    made = target_module.write_texts(
        on_cpu(m.model), how, given, 6, torch.Generator().manual_seed(3)
    )
    for row, ids in enumerate(given):
        m.engine.reset()
        limit = 48 - len(ids)
        want = list(m.engine.generate(ids, lambda x: int(x.argmax()), lambda t: None, limit=limit))
        length = int(made.lengths[row])
        assert made.tokens[row, :length].tolist() == [*ids, *want]
        assert int(made.prompts[row]) == len(ids)
        assert not made.tokens[row, length:].any()
    opening = list(turn.before)
    for row in range(2, 8):
        text, prompt = made.tokens[row].tolist(), int(made.prompts[row])
        assert text[: len(opening)] == opening
        if prompt < (length := int(made.lengths[row])):
            assert text[prompt - len(turn.after) : prompt] == list(turn.after)
        else:
            assert prompt == length == 48, "a prompt that was not finished has no answer"
    m.close()


def test_a_head_learns_within_its_time(small: Path, tmp_path: Path) -> None:
    """The texts are given here: repetitions, which can be learnt."""
    m = load(small, threads=1)
    how = target_module.Writing(Turn.of(m.tokenizer), sorted(m.tokenizer.eos_ids), length=64)
    o = parts.TrainOptions(draft_vocab=64, batch_tokens=256, rate=3e-3, steps=2)
    t = online.OnlineTraining(
        parts.Target.of(m.model), TAPS, how, o, online.OnlineOptions(4.0, tell_seconds=0.0),
        tmp_path,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    for i in range(96):
        cycle = draw.integers(0, 40, 3).tolist()
        tokens = np.array((cycle * 20)[: 30 + i % 20], np.int32)
        t.texts.append(online.Text(i, 6, tokens, online.NONE))
    net, ids = t.learn()
    lines = [json.loads(x) for x in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens"] > 0 and len(lines) > 1
    assert lines[-1]["accepted_length"] > lines[0]["accepted_length"] - 1e-9
    assert len(ids) == 64 and net.config.vocabulary == 64
    again, _ = t.learn(net.state_dict())
    assert again.config == net.config
    m.close()
