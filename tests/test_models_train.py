"""Training: data that resumes, the training-time test against decoding, and a head that learns."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import learnable_model
from typer.testing import CliRunner

from ggraph import InputError
from ggraph.decode.draft.hidden import NEXT_ROW, ROOT_ROW
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.rows import Rows
from ggraph.errors import FormatError
from models.cli.app import app
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.run.load import Loaded, load
from models.train.data import AnswerOptions, make_answers, read_shard, shards
from models.train.prompts import Turn, read_prompts, without

OPTIONS = AnswerOptions(
    new_tokens=24, text_tokens=128, lanes=8, sampled_every=4, own_share=0.5, seed=3
)
TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(learnable_model(tmp_path_factory.mktemp("train")), ctx_size=128)


def prompts(count: int) -> list[str]:
    return [f"What is {i} and {i * i % 17}?" for i in range(count)]


@pytest.fixture(scope="module")
def data(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_answers(loaded, prompts(160), TAPS, folder, OPTIONS)
    return folder


def tokens_of(folder: Path) -> dict[int, list[int]]:
    return {t.index: t.tokens.tolist() for p in shards(folder) for t in read_shard(p)}


def test_stored_answers_are_the_engines_own(loaded: Loaded, data: Path) -> None:
    texts = {t.index: t for p in shards(data) for t in read_shard(p)}
    greedy = [i for i in texts if i < 160 and i % 4 != 3][:5]
    assert len(greedy) == 5
    engine = load(Path(loaded.model.checkpoint.path), ctx_size=128).engine
    for i in greedy:
        engine.reset()
        ids = loaded.prompt_ids(prompts(160)[i])
        new = list(engine.generate(ids, lambda x: int(np.argmax(x)), lambda _: None, limit=24))
        found = texts[i]
        assert found.prompt_length == len(ids)
        assert found.tokens[: len(ids) + len(new)].tolist() == [*ids, *new]


def test_own_prompts_stand_inside_the_template(loaded: Loaded, data: Path) -> None:
    turn = Turn.of(loaded.tokenizer)
    own = [t for p in shards(data) for t in read_shard(p) if t.index >= 1 << 24]
    assert len(own) >= 150
    for t in own:
        tokens = t.tokens.tolist()
        assert tokens[: len(turn.before)] == list(turn.before)
        if t.prompt_length < len(tokens) - 1:
            assert tokens[: t.prompt_length][-len(turn.after) :] == list(turn.after)


def test_own_prompts_may_begin_with_an_opening(loaded: Loaded, tmp_path: Path) -> None:
    given = ("What is", "Say ")
    options = replace(OPTIONS, openings=given, own_share=1.0)
    make_answers(loaded, [], TAPS, tmp_path, options, enough=1)
    before = Turn.of(loaded.tokenizer).before
    begun = [[*before, *loaded.tokenizer.encode(o, bos=False)] for o in given]
    found = [t.tokens.tolist() for t in read_shard(shards(tmp_path)[0])]
    counts = [sum(t[: len(b)] == b for t in found) for b in begun]
    assert sum(counts) == len(found)
    assert min(counts) >= len(found) // 4
    with pytest.raises(InputError, match="made otherwise: openings differ"):
        make_answers(loaded, [], TAPS, tmp_path, replace(options, openings=()))
    long = replace(options, openings=(*given, "word " * 200))
    with pytest.raises(InputError, match=r"an opening of \d+ tokens: expected at most 64"):
        make_answers(loaded, [], TAPS, tmp_path / "long", long, enough=1)
    assert not (tmp_path / "long").exists(), "before anything is made"


def test_an_interrupted_run_goes_on(loaded: Loaded, data: Path, tmp_path: Path) -> None:
    make_answers(loaded, prompts(160), TAPS, tmp_path, OPTIONS, enough=1)
    first = tokens_of(tmp_path)
    assert len(first) == 64
    (tmp_path / "part-00001.tmp").write_bytes(b"torn")
    make_answers(loaded, prompts(160), TAPS, tmp_path, OPTIONS)
    assert tokens_of(tmp_path) == tokens_of(data)


def test_a_folder_that_holds_enough_stays_as_it_is(loaded: Loaded, data: Path) -> None:
    before = [p.name for p in shards(data)]
    make_answers(loaded, prompts(200), TAPS, data, OPTIONS, enough=1)
    assert [p.name for p in shards(data)] == before


def test_a_folder_made_otherwise_is_refused(loaded: Loaded, data: Path) -> None:
    with pytest.raises(InputError, match="made otherwise: options differ"):
        make_answers(loaded, prompts(9), TAPS, data, replace(OPTIONS, seed=4))


def test_features_are_the_targets_layer_inputs(loaded: Loaded, data: Path) -> None:
    m = load(Path(loaded.model.checkpoint.path), ctx_size=128, exact=False)
    m.runner.taps = (*TAPS, m.model.layer_count)
    text = next(t for t in read_shard(shards(data)[0]) if t.index < 160)
    result = m.runner.text(text.tokens[:-1].tolist())
    wide = np.concatenate([result.taps[i] for i in m.runner.taps], 1)
    assert np.array_equal(wide.astype(np.float16), text.features)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.jsonl", "{", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"prompt": 3}', "a.jsonl:1: expected"),
        ("a.txt", "\n\n", "holds no prompts"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str, match: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((FormatError, InputError), match=match):
        read_prompts(tmp_path / name)
    with pytest.raises(InputError, match="no file of prompts"):
        read_prompts(tmp_path / "absent")


def test_prompts_that_are_not_utf8_are_refused_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("grün\n".encode() + b"\xff")
    with pytest.raises(InputError, match=r"prompts\.txt is not UTF-8: .* 0xff at offset 6$"):
        read_prompts(path)


def test_excluded_prompts_are_left_out() -> None:
    assert without(["What's up?", "Hello"], ["what s UP"]) == ["Hello"]


def test_a_torn_shard_is_refused(data: Path, tmp_path: Path) -> None:
    whole = shards(data)[0].read_bytes()
    (tmp_path / "part-00000.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="part-00000"):
        read_shard(tmp_path / "part-00000.npz")


@pytest.fixture(scope="module")
def trained(
    loaded: Loaded, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, list[dict[str, Any]]]:
    """A small head after some epochs, the folder of its files, and what was reported.

    Needs PyTorch, which neither running nor the other tests do.
    """
    pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
    loop = importlib.import_module("models.train.loop")
    export = importlib.import_module("models.train.export")
    options = loop.TrainOptions(
        draft_vocab=128, epochs=3, batch_tokens=512, rate=3e-3, save_seconds=0, loss="kl"
    )
    loop.use_threads(1)
    out = tmp_path_factory.mktemp("trained")
    entries: list[dict[str, Any]] = []
    net, ids = loop.train(loop.Target.of(loaded.model), data, out, options, entries.append)
    export.export_folder(net, loaded.model, TAPS, ids, out / "head")
    return net, out, entries


Trained = tuple[Any, Path, list[dict[str, Any]]]


def test_a_head_learns(trained: Trained) -> None:
    _, out, entries = trained
    losses = [e["loss"] for e in entries]
    third = len(losses) // 3
    assert third >= 3 and np.mean(losses[-third:]) < 0.5 * np.mean(losses[:third])
    assert entries[-1]["accepted_length"] > 1.2 > 1 + 3 / 128  # chance is one hit in 128
    lines = (out / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [e["tokens"] for e in entries]


def test_the_training_time_test_is_what_decoding_does(
    loaded: Loaded, trained: Trained, data: Path
) -> None:
    """Three steps of the module equal a true pass and two fed-back steps of the decoder's graph."""
    torch = importlib.import_module("torch")
    net, out, _ = trained
    exact = load(Path(loaded.model.checkpoint.path), ctx_size=128, exact=True)
    head = open_head(out / "head", exact.model)
    assert isinstance(head, Head)
    text = max(read_shard(shards(data)[0]), key=lambda t: len(t.tokens))
    wide = text.features[:, : -exact.model.width].astype(np.float32)
    tokens, p = text.tokens.tolist(), len(text.tokens) // 2
    table = exact.model.catalogue["token_embd.weight"].float32()
    with torch.no_grad():
        net.half().float()  # the file holds float16
        embedded = torch.from_numpy(table[tokens[1 : p + 4]])[None]
        outs = net(torch.from_numpy(wide[: p + 1])[None], embedded, 3)
        expected = [net.logits(o)[0, p].numpy() for o in outs]
    runner = DraftRunner(head, exact.session, 128)
    true = Rows(tokens[1 : p + 2], range(p + 1), range(p + 1))
    found = [runner.step(true, [p], wide[: p + 1], fed_back=False)[0]]
    for i, behind in ((1, ROOT_ROW), (2, NEXT_ROW)):
        row = Rows([tokens[p + 1 + i]], [p + i], [p + i])
        found.append(runner.step(row, [0], behind, fed_back=True)[0])
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 2e-3 * np.ptp(theirs)


@pytest.mark.parametrize("bf16", [False, True])
def test_training_goes_on_where_it_stopped(
    loaded: Loaded, data: Path, tmp_path: Path, bf16: bool
) -> None:
    torch = pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
    loop = importlib.import_module("models.train.loop")
    target = loop.Target.of(loaded.model)
    options = loop.TrainOptions(
        draft_vocab=64, epochs=1, batch_tokens=512, save_seconds=0, bf16=bf16
    )

    class Stop(Exception):
        pass

    def stop(entry: dict[str, Any]) -> None:
        if entry["tokens"] > entry["of"] // 2:
            raise Stop

    whole, ids = loop.train(target, data, tmp_path / "whole", options)
    assert whole.lm_head.bf16 == bf16
    with pytest.raises(Stop):
        loop.train(target, data, tmp_path / "parts", options, stop)
    parts, same = loop.train(target, data, tmp_path / "parts", options)
    assert np.array_equal(ids, same)
    log = (tmp_path / "parts" / "training.jsonl").read_text()
    again, _ = loop.train(target, data, tmp_path / "parts", options)
    assert (tmp_path / "parts" / "training.jsonl").read_text() == log
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
        assert torch.equal(value, again.state_dict()[name]), name
    other = replace(options, draft_vocab=32)
    with pytest.raises(InputError, match="made with other options or data"):
        loop.train(target, data, tmp_path / "parts", other)


def test_a_head_becomes_gguf(loaded: Loaded, trained: Trained, tmp_path: Path) -> None:
    export = importlib.import_module("models.train.export")
    folder = trained[1] / "head"
    again = export.export_gguf(folder, loaded.model, tmp_path / "h.gguf", "f16")
    head = open_head(folder, loaded.model)
    assert isinstance(head, Head)
    assert again.config.taps == head.config.taps == TAPS
    assert np.array_equal(again.target_ids, head.target_ids)
    assert len(head.target_ids) == head.config.draft_vocab_size == 128


def test_options_out_of_range_are_refused() -> None:
    pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
    loop = importlib.import_module("models.train.loop")
    for bad in ({"loss": "mse"}, {"steps": 0}, {"rate": 0.0}, {"epochs": 0}, {"single": 2.0}):
        with pytest.raises(InputError):
            loop.TrainOptions(**bad)
    for bad in ({"own_share": 2.0}, {"lanes": 0}, {"text_tokens": 100}):
        with pytest.raises(InputError):
            AnswerOptions(**bad)


def test_the_command_makes_a_head(loaded: Loaded, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
    arguments = ["--tokens", "4000", "--new-tokens", "16", "--lanes", "8", "--draft-vocab", "64"]
    arguments += ["--steps", "2", "--epochs", "1", "--batch-tokens", "256", "--threads", "1"]
    arguments += ["--taps", "1,2,4", "--target", loaded.model.checkpoint.path]
    arguments += ["--out", str(tmp_path), "--json", "--bf16"]
    result = CliRunner().invoke(app, ["train-eagle3", *arguments])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    head = open_head(Path(told["head"]), loaded.model)
    assert isinstance(head, Head)
    assert head.config.draft_vocab_size == told["draft_vocabulary"] == 64


def test_without_pytorch_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in sys.modules if n.startswith("models.train.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, ["train-eagle3", "--out", str(tmp_path)])
    assert isinstance(result.exception, InputError)
    assert "pip install 'ggraph-runtime[train]'" in str(result.exception)
