"""Gemma 4's full layers may have key heads of their own number, whose keys serve as values, too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_models_folders import folder
from test_models_golden import GOLDEN, run_all

from ggraph.decode.model import StepShape
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from models.architecture import Tensors
from models.registry import open_model
from models.run.convert import model_to_gguf

OWN, PLAIN = "tiny2/gemma4_k_eq_v", "tiny2/gemma4_text"
SHAPE = StepShape(4, 32, 1, 64, ())
COUNTS = "gemma4.attention.head_count_kv"


def built(path: Path) -> None:
    """The graph of a step."""
    open_model(path).build(SHAPE)


def written(path: Path, told: dict[str, Any], more: Tensors | None = None, less: str = "") -> Path:
    """A GGUF file that tells otherwise, or has tensors more or less."""
    model_to_gguf(open_model(GOLDEN / OWN), path / "m.gguf", "f16")
    good = open_checkpoint(path / "m.gguf")
    held = {n: t for n, t in good.tensors.items() if n != less} | (more or {})
    write_gguf(path / "changed.gguf", {**good.metadata, **told}, list(held.values()))
    return path / "changed.gguf"


def test_full_layers_have_key_heads_of_their_own(tmp_path: Path) -> None:
    own = open_model(GOLDEN / OWN).config
    assert own.kv_heads == [2, 2, 1, 2, 2, 1]
    model_to_gguf(open_model(GOLDEN / OWN), tmp_path / "m.gguf", "f16")
    held = open_checkpoint(tmp_path / "m.gguf")
    assert np.array_equal(held.metadata[COUNTS], own.kv_heads)
    assert [f"blk.{i}.attn_v.weight" in held.tensors for i in range(6)] == [
        n == 2 for n in own.kv_heads
    ]
    assert open_model(tmp_path / "m.gguf").config.kv_heads == own.kv_heads


def test_the_keys_of_released_configs_mean_the_same(tmp_path: Path) -> None:
    told = {"per_layer_config": None, "global_head_dim": 48, "num_global_key_value_heads": 1}
    again = open_model(folder(OWN, tmp_path / "older", told))
    assert again.config == open_model(GOLDEN / OWN).config


def test_heads_of_full_layers_are_told_only_where_keys_serve(tmp_path: Path) -> None:
    """As transformers has it, by the older of the two keys."""
    told = {"per_layer_config": None, "global_head_dim": 48, "num_global_key_value_heads": 1}
    again = open_model(folder(PLAIN, tmp_path / "older", told))
    assert again.config == open_model(GOLDEN / PLAIN).config


def test_values_that_nobody_reads_change_nothing(tmp_path: Path) -> None:
    path = folder(OWN, tmp_path / "more", {})
    held = load_file(path / "model.safetensors")
    for i in (2, 5):
        keys = held[f"model.layers.{i}.self_attn.k_proj.weight"]
        held[f"model.layers.{i}.self_attn.v_proj.weight"] = keys[::-1].copy()
    save_file(held, path / "model.safetensors")
    ids = np.load(path / "expected.npz")["ids"].tolist()
    both = [run_all(p, ids)["logits"].tobytes() for p in (path, GOLDEN / OWN)]
    assert both[0] == both[1]


def test_values_are_missed_where_keys_do_not_serve(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor 'blk\.2\.attn_v\.weight'"):
        built(folder(OWN, tmp_path / "hf", {"attention_k_eq_v": False}))
    with pytest.raises(ModelError, match=r"no tensor 'blk\.2\.attn_v\.weight'"):
        keys = open_model(GOLDEN / OWN).catalogue["blk.5.attn_k.weight"]
        made = replace(keys, name="blk.5.attn_v.weight")
        built(written(tmp_path, {}, {made.name: made}))  # another full layer has values
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.attn_v\.weight'"):
        built(written(tmp_path, {}, less="blk.1.attn_v.weight"))  # it slides


@pytest.mark.parametrize(
    "counts", [[2, 1, 1, 2, 2, 1], [2, 2, 1, 2, 2, 4], [2, 2, 1], [2, 2, 1, 2, 2, 0]]
)
def test_heads_that_differ_within_a_kind_of_layers_are_refused(
    counts: list[int], tmp_path: Path
) -> None:
    path = written(tmp_path, {COUNTS: np.array(counts, np.int32)})
    with pytest.raises(ModelError, match="head_count_kv differs from layer to layer"):
        open_model(path)


@pytest.mark.parametrize("count", [-1, 0, 3, "1"])
def test_heads_that_no_queries_can_share_are_refused(count: object, tmp_path: Path) -> None:
    each = {"2": {"head_dim": 48, "num_key_value_heads": count}}
    with pytest.raises(ModelError, match=r"num_key_value_heads|key-value heads"):
        open_model(folder(OWN, tmp_path / "hf", {"per_layer_config": each}))
    slid = {"num_key_value_heads": count}
    with pytest.raises(ModelError, match=r"window_kv_heads|key-value heads|attn_k\.weight"):
        built(folder(OWN, tmp_path / "slid", slid))
