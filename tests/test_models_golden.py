"""Logits and layer inputs of every architecture against golden vectors made with transformers.

The vectors are float32 results of an implementation that shares nothing with ours.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    "tiny/llama_tied", "tiny/llama3_rope_scaled", "tiny/qwen2_bias", "tiny/qwen2_5_vl",
    "tiny/qwen3_qknorm", "tiny/qwen3_moe", "tiny/qwen3_vl", "tiny/qwen3_vl_moe",
    "tiny/mistral_sliding", "tiny/arcee", "tiny/cohere", "tiny/cohere2", "tiny/gemma",
    "tiny2/apertus", "tiny2/deepseek_v2", "tiny2/deepseek_v3", "tiny2/dots1", "tiny2/ernie4_5",
    "tiny2/ernie4_5_moe", "tiny2/exaone4", "tiny2/falcon_h1", "tiny2/gemma2", "tiny2/gemma3_text",
    "tiny2/gemma3n", "tiny2/gemma4_k_eq_v", "tiny2/gemma4_moe", "tiny2/gemma4_text", "tiny2/glm4",
    "tiny2/glm4_moe", "tiny2/glm4_moe_lite", "tiny2/gpt2", "tiny2/gpt_oss", "tiny2/granite",
    "tiny2/granite_hybrid", "tiny2/granite_hybrid_moe", "tiny2/granite_moe",
    "tiny2/hunyuan_v1_dense", "tiny2/hunyuan_v1_moe", "tiny2/lfm2", "tiny2/lfm2_moe",
    "tiny2/llama4_text", "tiny2/minimax_m2", "tiny2/ministral3", "tiny2/mixtral", "tiny2/nemotron",
    "tiny2/nemotron_h", "tiny2/nemotron_h_moe", "tiny2/olmo2", "tiny2/olmo3", "tiny2/olmoe",
    "tiny2/phi3", "tiny2/qwen2_moe", "tiny2/qwen3_5", "tiny2/qwen3_5_moe", "tiny2/qwen3_next",
    "tiny2/seed_oss", "tiny2/smollm3", "tiny2/stablelm", "tiny2/starcoder2",
)  # fmt: skip
SCALED = ("tiny2/gemma2", "tiny2/falcon_h1")  # scales go into matrices: halves would be rounded
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split_at", [None, 1, 47])
def test_logits_and_layer_inputs_equal_the_golden_vectors(name: str, split_at: int | None) -> None:
    expected = np.load(GOLDEN / name / "expected.npz")
    got = run_all(GOLDEN / name, expected["ids"].tolist(), split_at)
    for key in ("logits", "layer_input_2", "layer_input_3"):
        assert got[key].shape == expected[key].shape
        assert spread_error(got[key], expected[key]) < TOLERANCE, key


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_that_we_wrote_gives_the_same(name: str, tmp_path: Path) -> None:
    """q and k rows are re-ordered on the way out, and the rotation changes with them."""
    path = tmp_path / "model.gguf"
    kind = "f32" if name in SCALED else "f16"
    model_to_gguf(open_model(GOLDEN / name), path, kind)
    expected = np.load(GOLDEN / name / "expected.npz")
    got = run_all(path, expected["ids"].tolist())
    for key in ("logits", "layer_input_2", "layer_input_3"):
        assert spread_error(got[key], expected[key]) < TOLERANCE, key


def test_the_older_rope_keys_load_too(tmp_path: Path) -> None:
    """transformers before 5 wrote rope_theta and rope_scaling."""
    folder = tmp_path / "old"
    shutil.copytree(GOLDEN / "tiny/llama3_rope_scaled", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    expected = np.load(folder / "expected.npz")
    got = run_all(folder, expected["ids"].tolist())
    assert spread_error(got["logits"], expected["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_every_op_of_a_step_has_a_kernel(name: str) -> None:
    """One without cuts a step in pieces; checkpoints store norms and biases in halves."""
    session = open_session(threads=2, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    runner = Runner(open_model(GOLDEN / name), session, 64)
    for count in (5, 1, 20):
        runner.text(range(1, count + 1))
    found = {op for op, _ in backend.profile.times}
    session.close()
    assert len(found) > 8
    left = {op.split()[0] for op in found if op.endswith("(NumPy)")}
    assert left == set()
