"""Golden models: how near their vectors results are, and the same models with other keys."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    "tiny/llama_tied", "tiny/llama3_rope_scaled", "tiny/qwen2_bias", "tiny/qwen2_5_vl",
    "tiny/qwen3_qknorm", "tiny/qwen3_moe", "tiny/qwen3_vl", "tiny/qwen3_vl_moe",
    "tiny/mistral_sliding", "tiny/arcee", "tiny/cohere", "tiny/cohere2", "tiny/gemma",
    "tiny2/afmoe", "tiny2/apertus", "tiny2/deepseek_v2", "tiny2/deepseek_v3", "tiny2/dots1",
    "tiny2/ernie4_5", "tiny2/ernie4_5_moe", "tiny2/exaone4", "tiny2/exaone_moe", "tiny2/falcon_h1",
    "tiny2/gemma2", "tiny2/gemma3_text", "tiny2/gemma3n", "tiny2/gemma4_k_eq_v", "tiny2/gemma4_moe",
    "tiny2/gemma4_text", "tiny2/glm4", "tiny2/glm4_moe", "tiny2/glm4_moe_lite", "tiny2/gpt2",
    "tiny2/gpt_oss", "tiny2/granite", "tiny2/granite_hybrid", "tiny2/granite_hybrid_moe",
    "tiny2/granite_moe", "tiny2/hunyuan_v1_dense", "tiny2/hunyuan_v1_moe", "tiny2/lfm2",
    "tiny2/lfm2_moe", "tiny2/llama4_text", "tiny2/minimax_m2", "tiny2/ministral3", "tiny2/mixtral",
    "tiny2/nemotron", "tiny2/nemotron_h", "tiny2/nemotron_h_moe", "tiny2/olmo2", "tiny2/olmo3",
    "tiny2/olmoe", "tiny2/phi2", "tiny2/phi3", "tiny2/qwen2_moe", "tiny2/qwen3_5",
    "tiny2/qwen3_5_moe", "tiny2/qwen3_next", "tiny2/seed_oss", "tiny2/smollm3", "tiny2/stablelm",
    "tiny2/starcoder2",
)  # fmt: skip
TOLERANCE = 2e-4  # of the row's spread


def spread_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest spread of a row."""
    spread = expected.max(axis=-1, keepdims=True) - expected.min(axis=-1, keepdims=True)
    return float((np.abs(got - expected) / spread).max())


def run_all(path: Path, ids: list[int], split_at: int | None = None) -> dict[str, np.ndarray]:
    """Logits of every position and the inputs of layers 2 and 3, in one step or in two."""
    session = open_session(threads=1, exact=True)
    runner = Runner(open_model(path), session, 64, cache_dtype=F32, taps=(2, 3))
    parts = [ids] if split_at is None else [ids[:split_at], ids[split_at:]]
    results = [runner.text(part, every=True) for part in parts]
    out = {"logits": np.concatenate([r.logits for r in results])}
    for i in (2, 3):
        out[f"layer_input_{i}"] = np.concatenate([r.taps[i] for r in results])
    session.close()
    return out


def folder(name: str, out: Path, changes: Mapping[str, Any]) -> Path:
    """A golden folder with other keys, of the text where it also sees; None leaves one out."""
    shutil.copytree(GOLDEN / name, out)
    whole = json.loads((out / "config.json").read_text())
    told = {**whole.get("text_config", whole), **changes}
    kept = {k: v for k, v in told.items() if v is not None or k not in changes}
    whole = {**whole, "text_config": kept} if "text_config" in whole else kept
    (out / "config.json").write_text(json.dumps(whole))
    return out


def changed(name: str, out: Path, changes: Mapping[str, Any]) -> Path:
    """A golden model's GGUF file with other keys of its architecture; None leaves one out."""
    model_to_gguf(open_model(GOLDEN / name), out, "f32")
    c = open_checkpoint(out)
    told = {**c.metadata, **{f"{c.architecture}.{key}": v for key, v in changes.items()}}
    write_gguf(out, {k: v for k, v in told.items() if v is not None}, list(c.tensors.values()))
    return out
