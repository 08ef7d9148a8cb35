"""What a model makes of a text: against transformers' logits, and by the commands."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_kit import ggraph_here, refused_here
from golden_kit import GOLDEN
from small_model import small_model

from ggraph import InputError
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.text.tokenizer import Tokenizer
from models.registry import open_model
from models.run.load import open_session
from models.run.perplexity import Judgement, chunked, judged

TEXT = "Every byte of a plan has a cause, and each cause is told. " * 12


def chances(logits: np.ndarray) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return wide / wide.sum(axis=1, keepdims=True)


def scored(name: str, other: str | None = None) -> tuple[Judgement, dict]:
    """A golden text as one chunk, and what transformers said of it."""
    expected = dict(np.load(GOLDEN / name / "expected.npz"))
    ids = [int(i) for i in expected["ids"]]
    with open_session(threads=1, exact=True) as a, open_session(threads=1, exact=True) as b:
        runner, base = (
            Runner(open_model(GOLDEN / n), session, 48, cache_dtype=F32) if n else None
            for n, session in ((name, a), (other, b))
        )
        assert runner is not None
        return judged(runner, [ids, ids], base), expected


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny2/qwen3_next"])
def test_perplexity_is_that_of_transformers(name: str) -> None:
    found, expected = scored(name)
    ids, p = expected["ids"], chances(expected["logits"])
    losses = -np.log(p[np.arange(24, 47), ids[25:]])
    assert found.losses.each.shape == (46,)  # of both chunks, which are the same
    np.testing.assert_allclose(found.losses.each, np.tile(losses, 2), atol=2e-3)
    assert found.losses.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-3)
    each = np.tile(losses, 2)
    assert found.losses.error == pytest.approx(
        np.exp(each.mean()) * each.std(ddof=1) / np.sqrt(46), rel=1e-2
    )


def test_distance_is_that_of_transformers_logits() -> None:
    found, said = scored("tiny/llama_tied", "tiny2/granite")
    other = np.load(GOLDEN / "tiny2/granite" / "expected.npz")
    assert found.distance is not None and np.array_equal(other["ids"], said["ids"])
    p, q = chances(other["logits"])[24:47], chances(said["logits"])[24:47]
    divergences = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(found.distance.divergences, np.tile(divergences, 2), rtol=5e-3)
    assert np.array_equal(found.distance.same, np.tile(p.argmax(1) == q.argmax(1), 2))


def test_a_model_is_no_way_from_itself() -> None:
    found, _ = scored("tiny/llama_tied", "tiny/llama_tied")
    told = found.told()
    assert told["ratio"] == 1 and told["divergence"]["most"] == 0
    assert told["divergence"]["same likeliest token"] == 1


def test_models_of_other_vocabularies_are_not_compared() -> None:
    model = open_model(GOLDEN / "tiny/llama_tied")
    fewer = replace(model, config=replace(model.config, vocab_size=64))
    with open_session(threads=1) as a, open_session(threads=1) as b:
        one, other = Runner(model, a, 48), Runner(fewer, b, 48)
        with pytest.raises(InputError, match="they cannot be compared"):
            judged(one, [[1, 2, 3, 4]], other)


def test_chunks_begin_as_prompts_do(tmp_path: Path) -> None:
    model = open_model(small_model(tmp_path / "m.gguf", {"tokenizer.ggml.add_bos_token": True}))
    tokenizer = Tokenizer.from_gguf(model.checkpoint.metadata)
    ids = tokenizer.encode(TEXT)
    parts = chunked(tokenizer, TEXT, 64)
    assert ids[0] == tokenizer.bos_id and len(parts) == len(ids) // 64
    for i, part in enumerate(parts):
        assert part == [tokenizer.bos_id, *ids[i * 64 + 1 : i * 64 + 64]]
    assert chunked(tokenizer, TEXT, 64, 2) == parts[:2]
    with pytest.raises(InputError, match="make no chunk of 4096"):
        chunked(tokenizer, TEXT, 4096)


def test_from_a_text_to_a_better_file(tmp_path: Path) -> None:
    """The commands one after another: importance, two files, and how far each is from the first."""
    model, text, seen = small_model(tmp_path / "m.gguf"), tmp_path / "text", tmp_path / "i.gguf"
    text.write_text(TEXT)
    asked = ["--chunk", "64", "--threads", "1"]
    status, out, err = ggraph_here("imatrix", text, "-m", model, "--out", seen, *asked)
    assert status == 0 and "42 matrices, 10 chunks of 64 tokens" in out, (out, err)
    far = []
    for name, more in (("plain", []), ("weighed", ["--imatrix", seen])):
        file = tmp_path / f"{name}.gguf"
        assert ggraph_here("quantize", model, file, "--type", "q4_0", *more)[0] == 0
        told = ggraph_here("perplexity", text, "-m", file, "--base", model, *asked, "--json")[1]
        found = json.loads(told)
        assert found["chunks"] == 10 and found["tokens"] == 310
        far.append(found["divergence"]["mean"])
    assert 0 < far[1] < far[0]
    said = ggraph_here("perplexity", text, "-m", model, *asked)[1]
    assert said.startswith("perplexity ") and "310 tokens of 10 chunks" in said


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    model, text = small_model(tmp_path / "m.gguf"), tmp_path / "text"
    text.write_text("short")
    other = small_model(tmp_path / "o.gguf", {"tokenizer.ggml.add_bos_token": True})
    assert "make no chunk of 64" in refused_here("perplexity", text, "-m", model, "--chunk", "64")
    text.write_text(TEXT)
    asked = ["-m", model, "--chunk", "64"]
    assert "other tokens" in refused_here("perplexity", text, *asked, "--base", other)
    assert "power of 2" in refused_here(
        "imatrix", text, "-m", model, "--chunk", "63", "--out", tmp_path / "i"
    )
    assert "no importance matrix" in refused_here(
        "quantize", model, tmp_path / "q.gguf", "--imatrix", model
    )
    assert not (tmp_path / "i").exists() and not (tmp_path / "q.gguf").exists()
