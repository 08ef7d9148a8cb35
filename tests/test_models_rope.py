"""How rotations are scaled, by the keys and tensors of either file: against a loop in NumPy."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_models_golden import GOLDEN, TOLERANCE, spread_error

from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.config import Keys
from models.gguf_config import rope_from_gguf
from models.registry import Model, open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session
from models.sharded import ShardedModel

PHI3 = GOLDEN / "tiny2" / "phi3"
TRAINED, MOST = 64, 512  # positions of the training, and what they were stretched to
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.5 + 2.0 * i for i in range(8)]


def by_hand(folder: Path, divisors: list[float], magnitude: float) -> np.ndarray:
    """Logits of a Phi-3 in float64, a layer at a time; 2 features of each divisor turn."""
    c = json.loads((folder / "config.json").read_text())
    w = {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}
    ids = np.load(folder / "expected.npz")["ids"]
    h, kv, d = c["num_attention_heads"], c["num_key_value_heads"], 16
    half, t = len(divisors), len(ids)
    turns = 10000.0 ** (-np.arange(half) / half) / divisors
    angles = np.arange(t)[:, None, None] * turns

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    def turned(x: np.ndarray) -> np.ndarray:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        lead = f"model.layers.{i}"
        mixed = (
            normed(x, f"{lead}.input_layernorm.weight") @ w[f"{lead}.self_attn.qkv_proj.weight"].T
        )
        q, k, v = np.split(mixed.reshape(t, -1, d), [h, h + kv], axis=1)
        q, k = turned(q), np.repeat(turned(k), h // kv, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(d)
        scores[:, np.triu_indices(t, 1)[0], np.triu_indices(t, 1)[1]] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", share, np.repeat(v, h // kv, axis=1)).reshape(t, -1)
        x = x + out @ w[f"{lead}.self_attn.o_proj.weight"].T
        y = normed(x, f"{lead}.post_attention_layernorm.weight")
        gate, up = np.split(y @ w[f"{lead}.mlp.gate_up_proj.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{lead}.mlp.down_proj.weight"].T
    return normed(x, "model.norm.weight") @ w["lm_head.weight"].T


def logits(model: Model, context: int) -> np.ndarray:
    """Logits of every position, in steps for texts of up to `context` tokens."""
    session = open_session(threads=1, exact=True)
    runner = Runner(model.reaching(context), session, context, cache_dtype=F32)
    found = runner.text(np.load(PHI3 / "expected.npz")["ids"].tolist(), every=True).logits
    session.close()
    return found


def phi3(folder: Path, scaling: Mapping[str, Any], **changes: Any) -> Path:
    """The tiny Phi-3 with a rotation scaled so."""
    shutil.copytree(PHI3, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(max_position_embeddings=MOST, original_max_position_embeddings=TRAINED, **changes)
    config["rope_parameters"] = {"rope_theta": 10000.0, **scaling}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_converted(model: Model, out: Path) -> Path:
    """Its GGUF file as llama.cpp's converter writes it: no type of scaling, and no factor."""
    model_to_gguf(model, out, "f32")
    c = open_checkpoint(out)
    told = {k: v for k, v in c.metadata.items() if k != "phi3.rope.scaling.type"}
    assert not any("scaling.factor" in k for k in told)
    write_gguf(out, told, list(c.tensors.values()))
    return out


def test_the_loop_is_transformers() -> None:
    expected = np.load(PHI3 / "expected.npz")["logits"]
    assert spread_error(by_hand(PHI3, [1.0] * 8, 1.0), expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["longrope", "su"])
@pytest.mark.parametrize("turned", [8, 6], ids=["all", "partial"])
def test_longrope_by_either_file(kind: str, turned: int, tmp_path: Path) -> None:
    """Other factors where a text may be longer than those of the training; one magnitude."""
    scaling = {
        "rope_type": kind, "short_factor": SHORT[:turned], "long_factor": LONG[:turned],
        "partial_rotary_factor": turned / 8,
    }  # fmt: skip
    model = open_model(phi3(tmp_path / "hf", scaling))
    converted = open_model(as_converted(model, tmp_path / "m.gguf"))
    grown = math.sqrt(1 + math.log(MOST / TRAINED) / math.log(TRAINED))
    for told, context in ((SHORT, TRAINED), (LONG, TRAINED + 1), (LONG, MOST)):
        expected = by_hand(tmp_path / "hf", told[:turned], grown)
        for m in (model, converted):
            assert spread_error(logits(m, context), expected) < TOLERANCE, (context, m.name)


@pytest.mark.parametrize(
    ("key", "value"),
    [("short_factor", SHORT[:4]), ("long_factor", None), ("long_factor", [0.0] * 8),
     ("short_factor", ["1"] * 8), ("attention_factor", -1.0),
     ("original_max_position_embeddings", 1)],
)  # fmt: skip
def test_an_odd_longrope_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    with pytest.raises(ModelError, match="rope"):
        open_model(phi3(tmp_path / "hf", {**scaling, key: value}))


@pytest.mark.parametrize(
    ("keys", "scale", "magnitude"),
    [
        ({}, 1.0, 1.0),
        ({"scaling.factor": 4.0}, 0.25, 1.0),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 0.25, 1.0),
        ({"scale_linear": 4.0}, 0.25, 1.0),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, 0.5, 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0, 1.0),
        ({"scaling.factor": 0.0}, 1.0, 1.0),
        ({"scaling.attn_factor": 1.5}, 1.0, 1.5),
        ({"scaling.type": "longrope", "scaling.factor": 4.0}, 0.25, 1.0),
    ],
)
def test_what_the_keys_of_a_gguf_file_leave_unsaid(
    keys: dict[str, Any], scale: float, magnitude: float
) -> None:
    """As llama.cpp takes it."""
    k = Keys({f"llama.rope.{key}": v for key, v in keys.items()}, "keys", "llama.")
    rope = rope_from_gguf(k, "normal", 16, 512)
    assert (rope.freq_scale, rope.ext_factor, rope.attn_factor) == (scale, 0.0, magnitude)


@pytest.mark.parametrize(
    "keys", [{"scaling.type": "ntk"}, {"scaling.factor": -1.0}, {"scaling.attn_factor": 0.0}]
)
def test_odd_keys_are_refused(keys: dict[str, Any]) -> None:
    k = Keys({f"llama.rope.{key}": v for key, v in keys.items()}, "keys", "llama.")
    with pytest.raises(ModelError, match="rope"):
        rope_from_gguf(k, "normal", 16, 512)


@pytest.mark.parametrize("title", ["blk.1.attn_q_norm.weight", "rope_factors.weight"])
def test_a_tensor_that_nothing_reads_is_named(title: str, tmp_path: Path) -> None:
    """A file with more than the graph computes is of another model."""
    model_to_gguf(open_model(GOLDEN / "tiny" / "llama_tied"), tmp_path / "plain.gguf", "f32")
    c = open_checkpoint(tmp_path / "plain.gguf")
    more = RawTensor(title, F32, (16,), np.ones(16, np.float32))
    write_gguf(tmp_path / "more.gguf", c.metadata, [*c.tensors.values(), more])
    model = open_model(tmp_path / "more.gguf")
    for m in (model, ShardedModel.of(model, ["cpu", "sim0"])):
        with pytest.raises(ModelError, match=re.escape(f"tensor {title!r} in")):
            m.build(StepShape(1, 32, 1, 33))
