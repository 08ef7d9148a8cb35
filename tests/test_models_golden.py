"""Logits and layer inputs of every architecture against golden vectors made with transformers.

The vectors are float32 results of an implementation that shares nothing with ours.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_kit import GOLDEN, NAMES, TOLERANCE, run_all, spread_error

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.runner import Runner
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session

SCALED = ("tiny2/gemma2", "tiny2/falcon_h1")  # scales go into matrices: halves would be rounded


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
