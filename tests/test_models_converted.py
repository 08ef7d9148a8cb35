"""GGUF files as llama.cpp's converter writes them, where they are not as ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import GOLDEN, TOLERANCE, changed, folder, run_all, spread_error

from ggraph.dtype import F32
from ggraph.errors import ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.config import LONG_FACTORS, Keys, yarn_magnitude
from models.gguf_config import rope_from_gguf
from models.registry import open_model
from models.run.convert import model_to_gguf

QKV = ("attn_q", "attn_k", "attn_v")
GATE_UP = ("ffn_gate_exps", "ffn_up_exps")


def fused(path: Path, out: Path, whole: str, parts: tuple[str, ...], axis: int) -> int:
    """A file whose tensors `parts` of a layer stand in one, one below the other: how many do."""
    c = open_checkpoint(path)
    left, found = dict(c.tensors), []
    for first in [n for n in c.tensors if n.split(".")[2:3] == [parts[0]]]:
        pieces = [left.pop(first.replace(parts[0], p)) for p in parts]
        data = np.concatenate([p.data for p in pieces], axis=axis)
        shape = list(pieces[0].shape)
        shape[axis] = sum(p.shape[axis] for p in pieces)
        title = first.replace(parts[0], whole)
        found.append(RawTensor(title, pieces[0].dtype, tuple(shape), data))
    write_gguf(out, c.metadata, [*left.values(), *found])
    return len(found)


def ids_of(name: str) -> list[int]:
    """The golden text."""
    found: list[int] = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()
    return found


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize(
    ("name", "count"),
    [("tiny/llama_tied", 6), ("tiny/qwen2_bias", 12), ("tiny2/gemma3_text", 6),
     ("tiny2/granite_hybrid", 2), ("tiny2/qwen3_5", 1), ("tiny2/qwen3_next", 1)],
)  # fmt: skip
def test_queries_keys_and_values_may_be_one_tensor(
    name: str, count: int, kind: str, tmp_path: Path
) -> None:
    """By --fuse-qkv; queries may bring a gate along, and layers with a state have such a tensor
    anyway. Quantised rows are moved as they are."""
    plain, one = tmp_path / "plain.gguf", tmp_path / "one.gguf"
    model_to_gguf(open_model(GOLDEN / name), plain, kind)
    assert fused(plain, one, "attn_qkv", QKV, 0) == count
    ids = ids_of(name)
    assert np.array_equal(run_all(one, ids)["logits"], run_all(plain, ids)["logits"])


@pytest.mark.parametrize("rows", [-1, 1])
def test_one_tensor_of_other_rows_is_refused(rows: int, tmp_path: Path) -> None:
    plain, one = tmp_path / "plain.gguf", tmp_path / "one.gguf"
    model_to_gguf(open_model(GOLDEN / "tiny" / "llama_tied"), plain, "f32")
    fused(plain, one, "attn_qkv", QKV, 0)
    c = open_checkpoint(one)
    t = c.tensors["blk.0.attn_qkv.weight"]
    data = np.resize(t.data, (t.shape[0] + rows, t.shape[1]))
    odd = {**c.tensors, t.name: RawTensor(t.name, t.dtype, data.shape, data)}
    write_gguf(one, c.metadata, list(odd.values()))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.weight.*rows"):
        open_model(one)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize(("name", "count"), [("tiny2/qwen3_5_moe", 6), ("tiny2/qwen3_next", 6)])
def test_gates_of_experts_may_stand_above_the_others(
    name: str, count: int, kind: str, tmp_path: Path
) -> None:
    """By --fuse-gate-up-exps."""
    plain, one = tmp_path / "plain.gguf", tmp_path / "one.gguf"
    model_to_gguf(open_model(GOLDEN / name), plain, kind)
    assert fused(plain, one, "ffn_gate_up_exps", GATE_UP, 1) == count
    ids = ids_of(name)
    assert np.array_equal(run_all(one, ids)["logits"], run_all(plain, ids)["logits"])


def test_corrections_of_ernie_may_be_a_row(tmp_path: Path) -> None:
    """As its own checkpoints have them."""
    name, out = "tiny2/ernie4_5_moe", tmp_path / "m.gguf"
    model_to_gguf(open_model(GOLDEN / name), out, "f32")
    c = open_checkpoint(out)
    rows = {
        n: RawTensor(n, t.dtype, (1, *t.shape), t.data.reshape(1, -1))
        for n, t in c.tensors.items() if n.endswith("exp_probs_b.bias")
    }  # fmt: skip
    assert len(rows) == 5
    write_gguf(out, c.metadata, list({**c.tensors, **rows}.values()))
    expected = np.load(GOLDEN / name / "expected.npz")["logits"]
    assert spread_error(run_all(out, ids_of(name))["logits"], expected) < TOLERANCE


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}


def yarn(keys: Mapping[str, Any]) -> float:
    """The magnitude of a rotation, as ggml's is told to multiply it."""
    named = {f"llama.rope.{key}": v for key, v in {**YARN, **keys}.items()}
    return rope_from_gguf(Keys(named, "keys", "llama."), "normal", 16, 512).attn_factor


@pytest.mark.parametrize(
    ("keys", "whole"),
    [
        ({}, yarn_magnitude(4.0, 1.0)),
        ({"scaling.yarn_attn_factor": 1.4}, 1.4),
        ({"scaling.yarn_attn_factor": 1.0}, 1.0),
        ({"scaling.yarn_attn_factor": 1.4, "scaling.attn_factor": 1.5}, 2.1),
        ({"scaling.yarn_ext_factor": 1.0}, yarn_magnitude(4.0, 1.0)),
    ],
)
def test_a_magnitude_of_yarn_that_a_config_told(keys: dict[str, Any], whole: float) -> None:
    """transformers' `attention_factor` is the whole of it."""
    assert yarn(keys) * yarn_magnitude(4.0, 1.0) == pytest.approx(whole)


def test_half_a_yarn_is_refused() -> None:
    with pytest.raises(ModelError, match=r"yarn_ext_factor = 0\.5"):
        yarn({"scaling.yarn_ext_factor": 0.5})


def test_rows_that_see_later_ones_are_refused_by_either_file(tmp_path: Path) -> None:
    path = changed("tiny/llama_tied", tmp_path / "m.gguf", {"attention.causal": False})
    with pytest.raises(ModelError, match=r"attention\.causal"):
        open_model(path)
    changed("tiny/llama_tied", path, {"attention.causal": True})
    assert open_model(path).layer_count == 6
    with pytest.raises(ModelError, match="is_causal False"):
        open_model(folder("tiny/llama_tied", tmp_path / "hf", {"is_causal": False}))


def test_longrope_without_factors_is_refused(tmp_path: Path) -> None:
    """The converter writes them for Phi-3 alone, and the type for every family."""
    longrope = {"rope.scaling.type": "longrope"}
    with pytest.raises(ModelError, match=LONG_FACTORS):
        open_model(changed("tiny/llama_tied", tmp_path / "m.gguf", longrope))


def test_values_of_sliding_layers_are_as_wide_as_keys(tmp_path: Path) -> None:
    odd = {"attention.value_length_swa": 48}
    with pytest.raises(ModelError, match="value_length_swa"):
        open_model(changed("tiny2/gemma4_text", tmp_path / "m.gguf", odd))


@pytest.mark.parametrize("part", ["attn_k", "ffn_gate", "ssm_in"])
def test_a_bias_of_falcon_h1_is_refused_as_its_config_is(part: str, tmp_path: Path) -> None:
    """The factor that it may need is in the matrix alone."""
    out, name = tmp_path / "m.gguf", f"blk.1.{part}.bias"
    model_to_gguf(open_model(GOLDEN / "tiny2" / "falcon_h1"), out, "f32")
    c = open_checkpoint(out)
    rows = c.tensors[f"blk.1.{part}.weight"].shape[0]
    bias = RawTensor(name, F32, (rows,), np.ones(rows, np.float32))
    write_gguf(out, c.metadata, [*c.tensors.values(), bias])
    with pytest.raises(ModelError, match=f"a bias without its factor.*{name}"):
        open_model(out)
