"""Files of random weights: as many weights as the published models, types as llama.cpp mixes them,
and steps that stay finite."""

import json
import re
import sys
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import random_model

from ggraph import dtypes
from ggraph.decode.runner import Runner
from ggraph.formats import open_checkpoint
from ggraph.formats.quants import dequantize
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import tensor_types
from models.run.load import open_session

WEIGHTS = {  # billions, as their makers tell, with the draft layer of Qwen3.5
    "llama-3.2-1b": 1.24, "qwen2.5-0.5b": 0.49, "qwen3-4b": 4.02, "qwen3.5-0.8b": 0.77,
    "gemma-3-1b": 1.00, "lfm2-1.2b": 1.17, "llama-3.1-8b": 8.03,
}  # fmt: skip
CUT = {
    "qwen3.5-0.8b": {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full"]},
    "gemma-3-1b": {"num_hidden_layers": 6},
    "lfm2-1.2b": {"num_hidden_layers": 3, "full_attn_idxs": [2]},
    "granite-4.0-h-1b": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "attention"]},
    "qwen3-moe-3gb": {"num_hidden_layers": 1, "num_experts": 8},
}


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_as_many_weights_as_are_published(name: str) -> None:
    _, _, found = random_model.opened(random_model.SHAPES[name])
    count = sum(prod(t.shape) for t in found.values())
    assert round(count / 1e9, 2) == WEIGHTS[name]


@pytest.mark.parametrize("name", sorted(random_model.SHAPES))
def test_files_hold_tensors_that_llama_cpp_knows(name: str) -> None:
    """Qwen3.5's held the factors that three rotations have, too: no other engine opened it."""
    _, _, found = random_model.opened(random_model.SHAPES[name])
    known = set(gguf.TENSOR_NAMES.values())
    for n in found:
        own = re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|bias)$", "", n))
        assert own in known, n


PUBLISHED = {  # bytes of llama.cpp's own files of Q4_K_M, with their tokenizer
    "gemma-3-1b": 806e6, "lfm2-1.2b": 731e6, "llama-3.2-1b": 807.7e6, "llama-3.1-8b": 4920.7e6,
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_a_file_is_as_large_as_the_published_one(name: str, size: float) -> None:
    _, _, found = random_model.opened(random_model.SHAPES[name])
    shapes = {n: t.shape for n, t in found.items()}
    kept = tensor_types(shapes, "q4_k_m")
    total = sum(prod(s[:-1]) * kept[n].row_bytes(s[-1]) for n, s in shapes.items())
    assert abs(total / size - 1) < 0.01


@pytest.mark.parametrize("dtype", [t for t in dtypes.ALL if t.is_block], ids=str)
def test_weights_of_every_type_are_of_one_size(dtype: dtypes.DType) -> None:
    rows = random_model.rows_of(dtype, 64, 512, np.random.default_rng(0))
    values = dequantize(rows, dtype)
    assert 0.8 < values.std() / random_model.SIZE < 1.25  # scales of 8 bits are far apart
    assert abs(values.mean()) < random_model.SIZE / 2  # codes of two bits need not lie evenly


@pytest.mark.parametrize("name", sorted(CUT))
def test_a_step_of_a_cut_shape_is_finite(name: str, tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "cut.gguf"
    config.write_text(json.dumps({**random_model.SHAPES[name], **CUT[name], "vocab_size": 49152}))
    random_model.write(str(config), "q4_k_m", out)
    assert {t.dtype.name for t in open_checkpoint(out).tensors.values()} >= {"q6_k", "f32"}
    session, model = open_session(threads=1), open_model(out)
    for name_of, t in model.catalogue.items():  # else what a layer remembers would grow and grow
        if name_of.endswith((".ssm_a", "norm.weight")):
            assert np.all(t.float32() == (-1 if name_of.endswith("_a") else 1)), name_of
    runner = Runner(model, session, 64)
    for _ in range(2):
        assert np.isfinite(runner.text(range(3, 10)).logits).all()
    assert (model.config.num_nextn_predict_layers == 1) == (name == "qwen3.5-0.8b")
    if model.config.num_nextn_predict_layers:
        assert open_head(out, model).taps == (4,)
    session.close()
