"""What either file tells of rotations and of the layers that slide, and what it leaves unsaid."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from cli_kit import ggraph_here
from golden_kit import GOLDEN, TOLERANCE, changed, folder, run_all, spread_error
from safetensors.numpy import load_file, save_file

from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from ggraph.dtype import F32, dtype
from ggraph.errors import InputError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.architecture import Architecture
from models.blocks import Stack
from models.config import LONG_FACTORS, SHORT_FACTORS, SIGMOID, SOFT_MAX, Keys
from models.families import llama
from models.families.deepseek2 import DEEPSEEK2
from models.families.qwen35 import QWEN35
from models.gguf_config import from_gguf, rope_from_gguf
from models.hf_config import from_hf
from models.registry import Model, open_model
from models.run.convert import model_to_gguf, told
from models.run.load import open_session
from models.sharded import ShardedModel

PHI3 = GOLDEN / "tiny2" / "phi3"
TRAINED, MOST = 64, 512  # positions of the training, and what they were stretched to
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.5 + 2.0 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def by_hand(source: Path, divisors: list[float], magnitude: float) -> np.ndarray:
    """Logits of a Phi-3 in float64, a layer at a time; 2 features of each divisor turn."""
    c = json.loads((source / "config.json").read_text())
    w = {n: t.astype(np.float64) for n, t in load_file(source / "model.safetensors").items()}
    ids = np.load(source / "expected.npz")["ids"]
    h, kv, d = c["num_attention_heads"], c["num_key_value_heads"], 16
    half, t = len(divisors), len(ids)
    turns = 10000.0 ** (-np.arange(half) / half) / divisors
    angles = np.arange(t)[:, None, None] * turns

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        even: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"])
        return even * w[name]

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


def phi3(out: Path, scaling: Mapping[str, Any], trained: int = TRAINED) -> Path:
    """The tiny Phi-3 with a rotation scaled so."""
    sizes = {"max_position_embeddings": MOST, "original_max_position_embeddings": trained}
    rope = {"rope_theta": 10000.0, **scaling}
    return folder("tiny2/phi3", out, {**sizes, "rope_parameters": rope})


def test_layers_that_only_draft_are_no_layers_of_a_hybrid(tmp_path: Path) -> None:
    """Files tell of them, too, where they tell of each layer."""
    model = open_model(GOLDEN / "tiny2" / "nemotron_h_moe")
    model_to_gguf(model, tmp_path / "m.gguf", "f32")
    c = open_checkpoint(tmp_path / "m.gguf")
    told, lead = dict(c.metadata), "nemotron_h_moe."
    told |= {f"{lead}block_count": 8, f"{lead}nextn_predict_layers": 1}
    for key, value in (("attention.head_count_kv", 2), ("feed_forward_length", 48)):
        told[f"{lead}{key}"] = [*map(int, told[f"{lead}{key}"]), value]
    write_gguf(tmp_path / "more.gguf", told, list(c.tensors.values()))
    assert open_model(tmp_path / "more.gguf").config == open_model(tmp_path / "m.gguf").config


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


def test_a_plan_shown_is_the_one_that_runs(tmp_path: Path) -> None:
    """Of LongRoPE it has the factors that a text of that length is turned by."""
    phi3(tmp_path / "hf", LONGROPE)
    for context, used, unused in ((TRAINED, SHORT_FACTORS, LONG_FACTORS),
                                  (TRAINED + 1, LONG_FACTORS, SHORT_FACTORS)):  # fmt: skip
        asked = ("--context", "8", "-c", context, "--dot")
        status, shown, _ = ggraph_here("plan", tmp_path / "hf", *map(str, asked))
        assert status == 0
        assert used in shown
        assert unused not in shown


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
    for divisors, context in ((SHORT, TRAINED), (LONG, TRAINED + 1), (LONG, MOST)):
        expected = by_hand(tmp_path / "hf", divisors[:turned], grown)
        for m in (model, converted):
            assert spread_error(logits(m, context), expected) < TOLERANCE, (context, m.name)


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny/cohere"])
def test_dynamic_ntk_turns_nothing_else_in_a_context_of_the_training(
    name: str, tmp_path: Path
) -> None:
    """There transformers gives the golden logits, too; one token more changes every row of its."""
    expected = np.load(GOLDEN / name / "expected.npz")
    ids = expected["ids"].tolist()
    rope = json.loads((GOLDEN / name / "config.json").read_text())["rope_parameters"]
    scaled = {**rope, "rope_type": "dynamic", "factor": 4.0}
    told = {"rope_parameters": scaled, "max_position_embeddings": len(ids)}
    model = open_model(folder(name, tmp_path / "hf", told))
    model_to_gguf(model.reaching(len(ids)), tmp_path / "m.gguf", "f32")
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        assert spread_error(run_all(path, ids)["logits"], expected["logits"]) < TOLERANCE
    assert open_model(tmp_path / "m.gguf").context_length == len(ids)
    with pytest.raises(InputError, match=f"{len(ids) + 1} tokens: hf has a dynamic .* 1 to 48"):
        model.reaching(len(ids) + 1)


@pytest.mark.parametrize("factor", [0.5, None])
def test_an_odd_factor_of_dynamic_ntk_is_refused(factor: float | None, tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
    with pytest.raises(ModelError, match=r"dynamic factor 0\.5|factor is missing"):
        open_model(folder("tiny/llama_tied", tmp_path / "hf", {"rope_parameters": scaled}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("short_factor", SHORT[:4]), ("long_factor", None), ("long_factor", [0.0] * 8),
     ("short_factor", ["1"] * 8), ("attention_factor", -1.0),
     ("original_max_position_embeddings", 1)],
)  # fmt: skip
def test_an_odd_longrope_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rope"):
        open_model(phi3(tmp_path / "hf", {**LONGROPE, key: value}))


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


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_an_older_file_of_qwen_3_next_has_one_tensor_for_two(kind: str, tmp_path: Path) -> None:
    """Rows of q, k, v and z as Hugging Face has them, and a quantised row is moved as it is."""
    name, new, old = "tiny2/qwen3_next", tmp_path / "new.gguf", tmp_path / "old.gguf"
    model_to_gguf(open_model(GOLDEN / name), new, kind)
    c, hf = open_checkpoint(new), load_file(GOLDEN / name / "model.safetensors")
    kept = [t for n, t in c.tensors.items() if not n.endswith(("attn_qkv.weight", "gate.weight"))]
    assert len(c.tensors) - len(kept) == 2 * 5
    for given, data in hf.items():
        if given.endswith("in_proj_qkvz.weight"):
            title, raw = f"blk.{given.split('.')[2]}.ssm_in.weight", data.astype(np.float32)
            if kind == "q8_0":
                raw = gguf.quants.quantize(raw, gguf.GGMLQuantizationType.Q8_0)
            kept.append(RawTensor(title, dtype(kind), data.shape, raw))
    write_gguf(old, c.metadata, kept)
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()
    assert np.array_equal(run_all(old, ids)["logits"], run_all(new, ids)["logits"])


SEEING = {
    "qwen2vl": "tiny/qwen2_5_vl", "qwen3vl": "tiny/qwen3_vl", "qwen3vlmoe": "tiny/qwen3_vl_moe",
}  # fmt: skip
SECTIONS = {"qwen2vl": [2, 3, 3, 0], "qwen3vl": [3, 3, 2, 0], "qwen3vlmoe": [3, 3, 2, 0]}


def seeing(lead: str, out: Path, metadata: Mapping[str, Any]) -> Path:
    """A golden model in a GGUF file of what answers in a Qwen that sees, with other `metadata`."""
    model_to_gguf(open_model(GOLDEN / SEEING[lead]), out, "f32")
    c = open_checkpoint(out)
    told = {**c.metadata, "general.architecture": lead}
    told |= {k.replace(f"{c.architecture}.", f"{lead}.", 1): v for k, v in c.metadata.items()}
    told[f"{lead}.rope.dimension_sections"] = np.array(SECTIONS[lead], np.int32)
    told[f"{lead}.n_deepstack_layers"] = 0
    write_gguf(out, {**told, **metadata, "general.architecture": lead}, list(c.tensors.values()))
    return out


@pytest.mark.parametrize("lead", SEEING)
def test_a_gguf_file_of_what_answers_in_a_qwen_that_sees(lead: str, tmp_path: Path) -> None:
    path = seeing(lead, tmp_path / "m.gguf", {})
    expected = np.load(GOLDEN / SEEING[lead] / "expected.npz")
    assert open_model(path).config.architecture == lead
    got = run_all(path, expected["ids"].tolist())["logits"]
    assert spread_error(got, expected["logits"]) < TOLERANCE


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 1.25,
    "rope.scaling.original_context_length": 64, "attention.sliding_window": 8,
}  # fmt: skip


@pytest.mark.parametrize("told", [None, [True, False, True, True, True, False]])
def test_yarn_turns_the_full_layers_of_olmo_3_alone(
    told: list[bool] | None, tmp_path: Path
) -> None:
    keys = YARN if told is None else {**YARN, "attention.sliding_window_pattern": told}
    model = open_model(changed("tiny2/olmo2", tmp_path / "m.gguf", keys))
    model_to_gguf(model, tmp_path / "again.gguf", "f32")
    for c in (model.config, open_model(tmp_path / "again.gguf").config):
        for i, slides in enumerate(told or [True, True, True, False, True, True]):
            rope = c.rope_of(i)
            assert rope is not None and c.slides(i) == slides
            found = rope.freq_scale, rope.ext_factor, rope.attn_factor
            assert found == ((1.0, 0.0, 1.0) if slides else (0.125, 1.0, 1.25)), i


ALTERNATING = ("gemma2", "gemma3_text", "gemma3n", "gpt_oss", "exaone4", "exaone_moe", "olmo3")


@pytest.mark.parametrize("name", ALTERNATING)
def test_a_file_of_layers_that_all_slide_says_so(name: str, tmp_path: Path) -> None:
    """Where it said nothing, every so-manieth would see everything."""
    golden = f"tiny2/{name}"
    layers = json.loads((GOLDEN / golden / "config.json").read_text())["num_hidden_layers"]
    kinds = {"layer_types": ["sliding_attention"] * layers, "sliding_window": 8}
    hf, out = folder(golden, tmp_path / "hf", kinds), tmp_path / "m.gguf"
    model_to_gguf(open_model(hf), out, "f32")
    c = open_model(out).config
    assert [c.slides(i) for i in range(layers)] == [True] * layers
    ids = np.load(GOLDEN / golden / "expected.npz")["ids"].tolist()
    found, expected = (run_all(path, ids)["logits"] for path in (out, hf))
    assert spread_error(found, expected) < TOLERANCE


CONVERTED = {  # what llama.cpp's converter leaves out
    "attention.sliding_window_pattern": None, "rope.dimension_count": None,
    "attention.key_length": None, "attention.value_length": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ["tiny/cohere2", "tiny2/afmoe", "tiny2/exaone_moe"])
def test_layers_that_alone_turn_as_they_were_converted(name: str, tmp_path: Path) -> None:
    path = changed(name, tmp_path / "m.gguf", CONVERTED)
    expected = np.load(GOLDEN / name / "expected.npz")
    got = run_all(path, expected["ids"].tolist())["logits"]
    assert spread_error(got, expected["logits"]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tiny/cohere", "logit_scale", None),
        ("tiny/cohere", "logit_scale", 0.0),
        *(
            (name, "attention.sliding_window", none)
            for name in ("tiny/cohere2", "tiny2/afmoe", "tiny2/exaone_moe")
            for none in (None, 0)
        ),
    ],
)
def test_what_such_a_file_must_say(name: str, key: str, value: Any, tmp_path: Path) -> None:
    path = changed(name, tmp_path / "m.gguf", {key: value})
    with pytest.raises(ModelError, match=f"{key} is missing|{key} =|logits_scaling = 0.0"):
        open_model(path)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
WHOLE = {**LLAMA3, "rope_type": "yarn", "truncate": False}


@pytest.mark.parametrize("full", [LLAMA3, WHOLE], ids=["llama3", "yarn"])
@pytest.mark.parametrize("name", ["gemma3_text", "granite_hybrid"])
def test_a_rotation_by_which_no_layer_turns_is_left_alone(
    name: str, full: dict[str, Any], tmp_path: Path
) -> None:
    """Where all layers slide and turn by another, or none turns."""
    golden = json.loads((GOLDEN / "tiny2" / name / "config.json").read_text())
    slides = {"layer_types": ["sliding_attention"] * golden["num_hidden_layers"]}
    ropes = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}
    still = {"position_embedding_type": "nope"}
    plain = slides if name == "gemma3_text" else still
    scaled = {"rope_parameters": ropes if name == "gemma3_text" else full}
    ids = np.load(GOLDEN / "tiny2" / name / "expected.npz")["ids"].tolist()
    found = []
    for i, more in enumerate(({}, scaled)):
        hf, out = folder(f"tiny2/{name}", tmp_path / str(i), {**plain, **more}), tmp_path / "m.gguf"
        model_to_gguf(open_model(hf), out, "f32")
        found += [run_all(path, ids)["logits"] for path in (hf, out)]
    assert all(spread_error(logits, found[0]) < TOLERANCE for logits in found)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_factor_slows_a_proportional_rotation(share: float, tmp_path: Path) -> None:
    """As a linear one does, and in a GGUF file, too."""
    kinds = {"proportional": {"partial_rotary_factor": share}, "linear": {}}
    found = []
    for kind, more in kinds.items():
        full = {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0, **more}
        ropes = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}
        hf = folder("tiny2/gemma4_text", tmp_path / kind, {"rope_parameters": ropes})
        found.append(open_model(hf))
    proportional, linear = (m.config.rope for m in found)
    turned = round(proportional.n_rot * share / 2)
    assert proportional.freq_factors is not None
    assert proportional.freq_factors[:turned] == (1.0,) * turned
    assert replace(proportional, freq_factors=None) == linear
    model_to_gguf(found[0], tmp_path / "m.gguf", "f32")
    assert open_model(tmp_path / "m.gguf").config.rope.freq_scale == 0.25
    if share == 1:
        ids = np.load(GOLDEN / "tiny2" / "gemma4_text" / "expected.npz")["ids"].tolist()
        ours, expected = (run_all(tmp_path / kind, ids)["logits"] for kind in kinds)
        assert spread_error(ours, expected) < TOLERANCE


def test_the_scale_of_gemma_2_goes_into_the_biases_of_queries_too(tmp_path: Path) -> None:
    """A file does not tell of it: what makes the queries is multiplied by it."""
    hf = folder("tiny2/gemma2", tmp_path / "hf", {"query_pre_attn_scalar": 40})
    tensors, at = load_file(hf / "model.safetensors"), "model.layers.{}.self_attn.q_proj"
    for i in range(6):
        rows = tensors[f"{at.format(i)}.weight"].shape[0]
        tensors[f"{at.format(i)}.bias"] = np.linspace(-1, 1, rows, dtype=np.float16)
    save_file(tensors, hf / "model.safetensors")
    model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
    ids = np.load(GOLDEN / "tiny2" / "gemma2" / "expected.npz")["ids"].tolist()
    found, expected = (run_all(path, ids)["logits"] for path in (tmp_path / "m.gguf", hf))
    assert spread_error(found, expected) < TOLERANCE


def test_gemma_2_without_keys_that_its_files_may_leave_out(tmp_path: Path) -> None:
    """And a model that has no caps and no window says so in its file."""
    keys = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    for value, expected in ((None, (4096, 50.0, 30.0)), (0, (None, 0.0, 0.0))):
        path = changed("tiny2/gemma2", tmp_path / "m.gguf", dict.fromkeys(keys, value))
        model_to_gguf(open_model(path), tmp_path / "again.gguf", "f32")
        for c in (open_model(path).config, open_model(tmp_path / "again.gguf").config):
            found = c.sliding_window, c.attn_logit_softcapping, c.final_logit_softcapping
            assert found == expected and c.slides(0) == bool(expected[0]) and not c.slides(1)


QWEN = {"sliding_window": 8, "max_window_layers": 4, "layer_types": None}
FULL = "full_attention"


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({**QWEN, "use_sliding_window": True}, [4, 5]),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": None}, []),
        ({**QWEN, "use_sliding_window": False}, []),
        ({**QWEN, "use_sliding_window": None}, []),
        ({**QWEN, "use_sliding_window": True, "layer_types": [FULL] * 6}, []),
        (
            {**QWEN, "use_sliding_window": True, "layer_types": ["sliding_attention", *[FULL] * 5]},
            [0],
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen2_bias", "qwen3_qknorm"])
def test_which_layers_of_qwen_slide(
    name: str, changes: dict[str, Any], slides: list[int], tmp_path: Path
) -> None:
    c = open_model(folder(f"tiny/{name}", tmp_path / "hf", changes)).config
    assert [i for i in range(6) if c.slides(i)] == slides
    assert c.sliding_window == (8 if slides else None)


def test_which_layers_of_smollm3_turn(tmp_path: Path) -> None:
    """One whose layers all turn is a Llama; no GGUF file can tell of it."""

    def turns(out: str, **changes: Any) -> list[bool]:
        c = open_model(folder("tiny2/smollm3", tmp_path / out, changes)).config
        return [c.rope_of(i) is not None for i in range(6)]

    assert turns("plain") == [True, True, True, False, True, True]
    assert turns("unsaid", no_rope_layers=None, no_rope_layer_interval=None) == turns("again")
    assert turns("third", no_rope_layers=None, no_rope_layer_interval=3) == [True, True, False] * 2
    assert turns("listed", no_rope_layers=[0, 1, 1, 1, 1, 0]) == [False, *[True] * 4, False]
    whole = {"no_rope_layers": [1] * 6}
    ours = open_model(folder("tiny2/smollm3", tmp_path / "whole", whole))
    llama_too = folder("tiny2/smollm3", tmp_path / "llama", {"architectures": ["LlamaForCausalLM"]})
    assert np.array_equal(logits(ours, 64), logits(open_model(llama_too), 64))
    with pytest.raises(ModelError, match="GGUF cannot say"):
        model_to_gguf(ours, tmp_path / "m.gguf", "f32")
    for odd in ({"no_rope_layers": [1, 0]}, {"no_rope_layers": [2] * 6},
                {"no_rope_layers": None, "no_rope_layer_interval": 0}):  # fmt: skip
        with pytest.raises(ModelError, match=r"no_rope_layer|rotated_layers"):
            turns(f"odd {odd}", **odd)


def mixtral(out: Path, spread: float) -> Path:
    """The tiny Llama's GGUF file with experts that differ from its feed-forward by `spread`."""
    model_to_gguf(open_model(GOLDEN / "tiny" / "llama_tied"), out, "f32")
    c, rng, count = open_checkpoint(out), np.random.default_rng(1), 4
    found = []
    for name, t in c.tensors.items():
        role = name.split(".")[-2]
        if role in ("ffn_gate", "ffn_up", "ffn_down"):
            name, plain = name.replace(role, f"{role}_exps"), np.stack([t.float32()] * count)
            data = plain + np.float32(spread) * rng.standard_normal(plain.shape).astype(np.float32)
            t = RawTensor(name, F32, data.shape, data)
        found.append(t)
        if role == "ffn_norm":
            data = rng.standard_normal((count, 64)).astype(np.float32)
            title = name.replace(role, "ffn_gate_inp")
            found.append(RawTensor(title, F32, data.shape, data))
    told = {"llama.expert_count": count, "llama.expert_used_count": 2}
    write_gguf(out, {**c.metadata, **told}, found)
    return out


def test_mixtral_whose_experts_are_alike_is_its_llama(tmp_path: Path) -> None:
    model = open_model(mixtral(tmp_path / "m.gguf", 0.0))
    model_to_gguf(model, tmp_path / "again.gguf", "f32")
    expected = np.load(GOLDEN / "tiny" / "llama_tied" / "expected.npz")
    for path in (tmp_path / "m.gguf", tmp_path / "again.gguf"):
        got = run_all(path, expected["ids"].tolist())
        assert spread_error(got["logits"], expected["logits"]) < TOLERANCE


def test_two_shared_experts_survive_gguf(tmp_path: Path) -> None:
    hf = folder("tiny2/glm4_moe_lite", tmp_path / "hf", {"n_shared_experts": 2})
    tensors, rng = load_file(hf / "model.safetensors"), np.random.default_rng(2)
    for name, t in tensors.items():
        if ".shared_experts." in name:
            axis = int("down_proj" in name)
            more = rng.permuted(t.astype(np.float32), axis=1).astype(t.dtype)
            tensors[name] = np.ascontiguousarray(np.concatenate([t, more], axis=axis))
    save_file(tensors, hf / "model.safetensors")
    model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
    ids = np.load(hf / "expected.npz")["ids"].tolist()
    of_folder, of_file = (run_all(p, ids)["logits"] for p in (hf, tmp_path / "m.gguf"))
    assert spread_error(of_file, of_folder) < TOLERANCE


LINEAR = "linear_attention"


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        ([LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR], 4),
        ([LINEAR, FULL] * 3, 2),
        ([LINEAR, LINEAR, FULL] * 2, 3),
        ([LINEAR] * 6, 7),
        ([LINEAR, FULL, FULL, LINEAR, LINEAR, FULL], None),
    ],
)
def test_what_qwen_35_tells_of_its_layers_is_what_they_are(
    kinds: list[str], period: int | None
) -> None:
    """Readers that know the period alone take 4 where none is told, and meet other tensors."""
    config = json.loads((GOLDEN / "tiny2" / "qwen3_5" / "config.json").read_text())
    rope = {**config["rope_parameters"], "mrope_section": [2, 1, 1]}
    c = from_hf({**config, "layer_types": kinds, "rope_parameters": rope}, "qwen35")
    keys = told(QWEN35, c)
    assert keys.get("qwen35.full_attention_interval") == period
    assert keys["qwen35.rope.dimension_sections"].tolist() == [2, 1, 1, 0]
    again = from_gguf(keys, "qwen35", "neox")
    assert again.recurrent_layers == c.recurrent_layers and again.mrope_section == (2, 1, 1)


DEEPSEEK = "tiny2/deepseek_v2"


def older_deepseek(hf: Path, out: Path, mscale: float, metadata: Mapping[str, Any]) -> Path:
    """The folder's GGUF file as it was made in 2024: heads by their own sizes, keys and values that
    one matrix makes, and nothing of how experts are chosen."""
    model = open_model(hf)
    model_to_gguf(model, out, "f32")
    c, lead = open_checkpoint(out), "deepseek2"
    heads = model.config.num_attention_heads
    sizes = {"head_count_kv": heads, "key_length": model.config.head_dim,
             "value_length": model.config.v_head_dim}  # fmt: skip
    told = {**c.metadata, **{f"{lead}.attention.{key}": value for key, value in sizes.items()}}
    told[f"{lead}.rope.scaling.yarn_log_multiplier"] = 0.1 * mscale
    gone = ("_mla", "expert_gating_func", "expert_weights_norm")
    told = {k: v for k, v in told.items() if not k.endswith(gone)} | dict(metadata)
    whole = {n: t for n, t in model.catalogue.items() if n.endswith(".attn_kv_b.weight")}
    kept = {n: t for n, t in c.tensors.items() if "_k_b." not in n and "_v_b." not in n}
    write_gguf(out, told, [*kept.values(), *whole.values()])
    return out


def test_an_older_file_of_deepseek_v2(tmp_path: Path) -> None:
    path = older_deepseek(GOLDEN / DEEPSEEK, tmp_path / "m.gguf", 0.707, {})
    expected = np.load(GOLDEN / DEEPSEEK / "expected.npz")
    got = run_all(path, expected["ids"].tolist())["logits"]
    assert spread_error(got, expected["logits"]) < TOLERANCE
    with pytest.raises(ModelError, match=r"YaRN and latent attention without .*log_multiplier"):
        open_model(older_deepseek(GOLDEN / DEEPSEEK, tmp_path / "untold.gguf", 0.0, {}))


@pytest.mark.parametrize(("tokens", "chosen"), [(154880, SIGMOID), (102400, SOFT_MAX)])
def test_how_experts_are_chosen_where_a_file_does_not_say(tokens: int, chosen: int) -> None:
    """GLM-4.7-Flash is known by its vocabulary, as in llama.cpp."""
    c = open_model(GOLDEN / DEEPSEEK).config
    untold = replace(c, vocab_size=tokens, expert_gating_func=0)
    assert DEEPSEEK2.complete(untold).expert_gating_func == chosen
    told = replace(untold, expert_gating_func=SIGMOID)
    assert DEEPSEEK2.complete(told).expert_gating_func == SIGMOID


def test_widths_that_an_older_file_of_qwen_2_with_experts_leaves_out(tmp_path: Path) -> None:
    """Those of the feed-forward, shared by as many experts as a row has."""
    keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    path = changed("tiny2/qwen2_moe", tmp_path / "m.gguf", dict.fromkeys(keys))
    c = open_model(path).config
    assert (c.intermediate_size, c.num_experts_per_tok) == (96, 2)
    assert (c.moe_intermediate_size, c.shared_intermediate_size) == (48, 96)


@pytest.mark.parametrize("mode", ["norm", "NEOX", ""])
def test_no_such_pairing(mode: str) -> None:
    with pytest.raises(ModelError, match=f"rope_mode = '{mode}': expected 'normal' or 'neox'"):
        Architecture("own", Stack(llama.layer), rope_mode=mode)


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
