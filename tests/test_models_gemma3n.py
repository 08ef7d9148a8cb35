"""Gemma 3n's folders as they were released, and what its files say or leave unsaid."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_models_golden import GOLDEN, TOLERANCE, run_all, spread_error
from test_models_unsaid import changed, folder

from ggraph.decode.model import StepShape
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.tensor import Kind
from models.config import Keys
from models.families.gemma3n import GEMMA3N, OPEN
from models.registry import open_model
from models.run.convert import model_to_gguf

NAME = "tiny2/gemma3n"
EXPECTED = GOLDEN / NAME / "expected.npz"
LAYERS, SHARED = 6, 2


def error(path: Path) -> float:
    expected = np.load(EXPECTED)
    got = run_all(path, expected["ids"].tolist())["logits"]
    assert got.shape == expected["logits"].shape
    return spread_error(got, expected["logits"])


def released(out: Path) -> Path:
    """A folder with images and sounds, which have tokens of their own behind those of texts; with
    one width, an older rope, and keys and values that nobody reads."""
    older = {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    hf = folder(NAME, out, {**older, "vocab_size": 330, "intermediate_size": 96})
    text = json.loads((hf / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    (hf / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    given, rng = load_file(hf / "model.safetensors"), np.random.default_rng(3)
    for i in range(LAYERS - SHARED, LAYERS):
        for part in ("k_proj", "v_proj", "k_norm"):
            t = given[f"model.layers.0.self_attn.{part}.weight"]
            drawn = rng.standard_normal(t.shape).astype(t.dtype)
            given[f"model.layers.{i}.self_attn.{part}.weight"] = drawn
    table = given["model.embed_tokens.weight"]
    given["model.embed_tokens.weight"] = np.concatenate([table, 100 + table[:10]])
    found = {n.replace("model.", "model.language_model.", 1): t for n, t in given.items()}
    for side in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        found[f"model.{side}.embedding.weight"] = np.ones(3, np.float16)
    save_file(found, hf / "model.safetensors")
    return hf


def test_as_it_was_released(tmp_path: Path) -> None:
    hf = released(tmp_path / "hf")
    assert error(hf) < TOLERANCE
    assert open_model(hf).vocab_size == 320
    model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
    assert error(tmp_path / "m.gguf") < TOLERANCE


def test_layers_that_share_keys_and_values_have_no_cache() -> None:
    graph = open_model(GOLDEN / NAME).build(StepShape(4, 32, 1, 64, ()))
    states = sorted(t.name for t in graph.leaves(Kind.STATE))
    assert states == [f"cache.{part}.{i}" for part in "kv" for i in range(LAYERS - SHARED)]


def test_layers_share_those_of_the_last_layer_of_their_kind(tmp_path: Path) -> None:
    """There must be one."""
    kinds = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    model = open_model(folder(NAME, tmp_path / "hf", {"layer_types": kinds}))
    with pytest.raises(ModelError, match="gemma3n: layer 5 shares keys and values, but none"):
        model.build(StepShape(4, 32, 1, 64, ()))


def test_a_file_holds_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    """Keys and values of each layer, all matrices of streams in one tensor, shares of streams in
    float32, and -inf where all gates open."""
    model_to_gguf(open_model(GOLDEN / NAME), tmp_path / "m.gguf", "q8_0")
    file = open_checkpoint(tmp_path / "m.gguf")
    for i in range(LAYERS):
        lead = f"blk.{i}"
        assert {f"{lead}.attn_{part}.weight" for part in "qkv"} <= set(file.tensors)
        for part in ("router", "predict_coef", "correct_coef"):
            assert file.tensors[f"{lead}.altup_{part}.weight"].dtype.name == "f32"
    assert file.tensors["altup_proj.weight"].shape == (3, 64, 64)
    told = np.asarray(file.metadata["gemma3n.activation_sparsity_scale"])
    shut, open_ = told[[0, 1, 5]], told[2:5]
    assert np.allclose(shut, [1.2815516, 0.6744898, 0.0], atol=1e-6)
    assert np.isneginf(open_).all()


@pytest.mark.parametrize(("layers", "shared", "shut"), [(35, 15, 10), (30, 10, 10), (6, 0, 6)])
def test_what_a_file_leaves_unsaid_is_what_llama_cpp_takes(
    layers: int, shared: int, shut: int
) -> None:
    found = GEMMA3N.read(Keys({}, "GGUF metadata"), layers)
    assert found["num_kv_shared_layers"] == shared
    gates = found["multipliers"]
    assert gates[shut:] == (OPEN,) * (layers - shut)
    assert np.allclose(gates[:shut], 1.6448536)


UNSAID = {
    "attention.sliding_window_pattern": None, "rope.freq_base_swa": None,
    "altup.active_idx": None, "altup.num_inputs": None, "final_logit_softcapping": None,
}  # fmt: skip


def test_an_older_file_means_every_fifth_layer(tmp_path: Path) -> None:
    c = open_model(changed(NAME, tmp_path / "m.gguf", UNSAID)).config
    assert [i for i in range(LAYERS) if not c.slides(i)] == [4]
    assert c.window_rope is not None and c.window_rope.freq_base == 10000.0
    assert c.final_logit_softcapping == 30.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("altup.active_idx", 1),
        ("altup.num_inputs", 3),
        ("activation_sparsity_scale", [1.0] * 5),
        ("activation_sparsity_scale", [math.nan] * 6),
        ("activation_sparsity_scale", [math.inf] * 6),
        ("activation_sparsity_scale", ["1.0"] * 6),
    ],
)
def test_a_file_that_says_otherwise_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = changed(NAME, tmp_path / "m.gguf", {key: value})
    with pytest.raises(ModelError, match=r"stream|activation_sparsity_scale"):
        open_model(path)
