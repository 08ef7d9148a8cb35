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

TINY = Path(__file__).parent / "golden" / "tiny"
NAMES = (
    "llama_tied",
    "llama3_rope_scaled",
    "qwen2_bias",
    "qwen3_qknorm",
    "qwen3_moe",
    "mistral_sliding",
)
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
    session.close()
    out = {"logits": np.concatenate([r.logits for r in results])}
    for i in (2, 3):
        out[f"layer_input_{i}"] = np.concatenate([r.taps[i] for r in results])
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split_at", [None, 1, 47])
def test_logits_and_layer_inputs_equal_the_golden_vectors(name: str, split_at: int | None) -> None:
    expected = np.load(TINY / name / "expected.npz")
    got = run_all(TINY / name, expected["ids"].tolist(), split_at)
    for key in ("logits", "layer_input_2", "layer_input_3"):
        assert got[key].shape == expected[key].shape
        assert spread_error(got[key], expected[key]) < TOLERANCE, key


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_that_we_wrote_gives_the_same(name: str, tmp_path: Path) -> None:
    """q and k rows are re-ordered on the way out, and the rotation changes with them."""
    path = tmp_path / f"{name}.gguf"
    model_to_gguf(open_model(TINY / name), path, "f16")
    expected = np.load(TINY / name / "expected.npz")
    got = run_all(path, expected["ids"].tolist())
    for key in ("logits", "layer_input_2", "layer_input_3"):
        assert spread_error(got[key], expected[key]) < TOLERANCE, key


def test_the_older_rope_keys_load_too(tmp_path: Path) -> None:
    """transformers before 5 wrote rope_theta and rope_scaling."""
    folder = tmp_path / "old"
    shutil.copytree(TINY / "llama3_rope_scaled", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    expected = np.load(folder / "expected.npz")
    got = run_all(folder, expected["ids"].tolist())
    assert spread_error(got["logits"], expected["logits"]) < TOLERANCE


# What chooses experts has no kernels yet: NumPy computes these, in every layer.
ROUTING = {"div", "get_rows", "mul", "sum_rows", "top_k"}


@pytest.mark.parametrize("name", NAMES)
def test_every_op_of_a_step_has_a_kernel(name: str) -> None:
    """One without cuts a step in pieces; checkpoints store norms and biases in halves."""
    session = open_session(threads=2, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    runner = Runner(open_model(TINY / name), session, 64)
    for count in (5, 1, 20):
        runner.text(range(1, count + 1))
    found = {op for op, _ in backend.profile.times}
    session.close()
    assert len(found) > 8
    left = {op.split()[0] for op in found if op.endswith("(NumPy)")}
    assert left == (ROUTING if name == "qwen3_moe" else set())
