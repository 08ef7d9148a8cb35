"""Llama 4's folders as they were released, and what its files say or leave unsaid."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_models_folders import error
from test_models_golden import GOLDEN, TOLERANCE
from test_models_unsaid import changed, folder

from ggraph.decode.rows import Chunk
from ggraph.errors import ModelError
from models.config import Keys
from models.families.llama4 import GROWN, LLAMA4, STRETCH, UNEVEN
from models.registry import open_model
from models.run.convert import model_to_gguf

NAME = "tiny2/llama4_text"
RELEASED = {"attention_chunk_size": STRETCH, "floor_scale": STRETCH, "attn_scale": GROWN}


def test_as_it_was_released(tmp_path: Path) -> None:
    """The text's part of a model that sees, whose rope is told as older configs do."""
    hf = folder(NAME, tmp_path / "hf", {"no_rope_layers": [], "moe_layers": None})
    text = json.loads((hf / "config.json").read_text())
    scaling = text.pop("rope_parameters")
    text |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "layer_types": None}
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    (hf / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    found = {f"language_model.{n}": t for n, t in load_file(hf / "model.safetensors").items()}
    for side in ("vision_model", "multi_modal_projector"):
        found[f"{side}.linear_1.weight"] = np.ones(3, np.float16)
    save_file(found, hf / "model.safetensors")
    assert error(hf, NAME) < TOLERANCE


def test_experts_may_stand_one_by_one(tmp_path: Path) -> None:
    """As folders in codes have them: with a row for each feature."""
    hf = folder(NAME, tmp_path / "hf", {})
    found = load_file(hf / "model.safetensors")
    for name in [n for n in found if ".experts." in n]:
        lead, _, part = name.rpartition(".")
        for x, columns in enumerate(found.pop(name)):
            own = np.split(columns.T, 2) if part == "gate_up_proj" else [columns.T]
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for title, rows in zip(parts, own, strict=True):
                found[f"{lead}.{x}.{title}.weight"] = np.ascontiguousarray(rows)
    save_file(found, hf / "model.safetensors")
    assert error(hf, NAME) < TOLERANCE


def test_a_model_says_that_its_windows_begin_anew() -> None:
    window = open_model(GOLDEN / NAME).sliding_window
    assert isinstance(window, Chunk) and window == 16
    assert not isinstance(open_model(GOLDEN / "tiny2" / "gemma2").sliding_window, Chunk)


UNSAID = {
    "attention.sliding_window": None, "attention.sliding_window_pattern": None,
    "attention.temperature_scale": None, "attention.temperature_length": None,
    "expert_shared_feed_forward_length": None, "rope.freq_base_swa": 10000.0,
}  # fmt: skip


def test_a_file_leaves_unsaid_what_the_released_ones_have_alike(tmp_path: Path) -> None:
    hf = folder(NAME, tmp_path / "hf", RELEASED)
    model_to_gguf(open_model(hf), tmp_path / "told.gguf", "f32")
    told = open_model(tmp_path / "told.gguf").config
    assert (told.sliding_window, told.growth_length) == (STRETCH, STRETCH)
    assert told.query_growth == pytest.approx(GROWN)
    unsaid = open_model(changed(NAME, tmp_path / "m.gguf", UNSAID)).config
    assert unsaid == replace(told, query_growth=GROWN)
    wide = {**UNSAID, "rope.freq_base_swa": 5e5}
    other = open_model(changed(NAME, tmp_path / "wide.gguf", wide)).config
    assert [rope and rope.freq_base for rope in map(other.rope_of, range(4))] == [5e5] * 3 + [None]


@pytest.mark.parametrize(("experts", "even"), [(UNEVEN, False), (16, True)])
def test_maverick_does_not_normalise_its_queries(experts: int, even: bool) -> None:
    k = Keys({"expert_count": experts, "attention.sliding_window": STRETCH}, "GGUF metadata")
    assert LLAMA4.read(k, 4)["even_heads"] == even


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 0),
        ("expert_used_count", 2),
        ("interleave_moe_layer_step", 0),
        ("interleave_moe_layer_step", 3),
    ],
)
def test_a_file_that_says_otherwise_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = changed(NAME, tmp_path / "m.gguf", {key: value})
    with pytest.raises(ModelError, match=r"stretch|experts a row|interleave|no tensor|no place"):
        model_to_gguf(open_model(path), tmp_path / "again.gguf", "f32")
        open_model(path).check_used([])


def test_layers_with_experts_that_follow_no_rule_are_not_written(tmp_path: Path) -> None:
    model = open_model(folder(NAME, tmp_path / "hf", {"moe_layers": [1, 2]}))
    with pytest.raises(ModelError, match="GGUF cannot say which layers have experts"):
        model_to_gguf(model, tmp_path / "m.gguf", "f32")
