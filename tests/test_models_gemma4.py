"""Gemma 4's full layers may have key heads of their own number, whose keys serve as values, too;
all layers may have experts beside the feed-forward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import GOLDEN, run_all
from safetensors.numpy import load_file, save_file
from test_models_folders import folder

from ggraph.decode.model import StepShape
from ggraph.dtype import F32
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.architecture import Tensors
from models.families.gemma4 import GEMMA4
from models.registry import open_model
from models.run.convert import model_to_gguf

OWN, PLAIN, EXPERTS = "tiny2/gemma4_k_eq_v", "tiny2/gemma4_text", "tiny2/gemma4_moe"
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


def test_experts_that_are_not_enabled_are_none(tmp_path: Path) -> None:
    told = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}
    again = open_model(folder(OWN, tmp_path / "hf", told))
    assert again.config == open_model(GOLDEN / OWN).config


@pytest.mark.parametrize("key", ["num_experts", "top_k_experts", "moe_intermediate_size"])
def test_experts_are_told_whole(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{key} is missing"):
        open_model(folder(EXPERTS, tmp_path / "hf", {key: None}))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_experts_parts_are_read_apart_or_in_one(kind: str, tmp_path: Path) -> None:
    """Files of llama.cpp's converter have them in one tensor, and it reads both."""
    model_to_gguf(open_model(GOLDEN / EXPERTS), tmp_path / "one.gguf", kind)
    one, held = open_checkpoint(tmp_path / "one.gguf"), open_model(tmp_path / "one.gguf").catalogue
    assert one.tensors["blk.0.ffn_gate_up_exps.weight"].shape == (5, 32, 64)
    apart = {n: t for n, t in one.tensors.items() if "gate_up" not in n}
    for i in range(5):
        for part in ("gate", "up"):
            title = f"blk.{i}.ffn_{part}_exps.weight"
            assert title not in apart and held[title].shape == (5, 16, 64)
            apart[title] = held[title]
    write_gguf(tmp_path / "apart.gguf", one.metadata, list(apart.values()))
    ids = np.load(GOLDEN / EXPERTS / "expected.npz")["ids"].tolist()
    model_to_gguf(open_model(tmp_path / "apart.gguf"), tmp_path / "again.gguf", kind)
    paths = [tmp_path / f"{n}.gguf" for n in ("one", "apart", "again")]
    assert len({run_all(p, ids)["logits"].tobytes() for p in paths}) == 1
    assert set(open_checkpoint(paths[2]).tensors) == set(one.tensors)


def test_parts_of_two_types_stay_apart(tmp_path: Path) -> None:
    model_to_gguf(open_model(GOLDEN / EXPERTS), tmp_path / "m.gguf", "f16")
    model = open_model(tmp_path / "m.gguf")
    up = model.catalogue["blk.3.ffn_up_exps.weight"]
    wide = RawTensor(up.name, F32, up.shape, up.float32())
    held = GEMMA4.stored({**model.catalogue, up.name: wide}, model.config)
    assert held[up.name] is wide and "blk.3.ffn_gate_exps.weight" in held
    assert "blk.3.ffn_gate_up_exps.weight" not in held and "blk.2.ffn_gate_up_exps.weight" in held


def test_parts_of_odd_shapes_are_refused(tmp_path: Path) -> None:
    title = "blk.0.ffn_gate_up_exps.weight"
    model_to_gguf(open_model(GOLDEN / EXPERTS), tmp_path / "m.gguf", "f16")
    good = open_checkpoint(tmp_path / "m.gguf")
    for shape in ((5, 31, 64), (160, 64)):
        data = np.zeros(shape, np.float32)
        odd = {**good.tensors, title: RawTensor(title, F32, shape, data)}
        write_gguf(tmp_path / "odd.gguf", good.metadata, list(odd.values()))
        with pytest.raises(ModelError, match="experts' gate and up of shape"):
            open_model(tmp_path / "odd.gguf")
