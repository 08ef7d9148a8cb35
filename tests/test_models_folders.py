"""What a Hugging Face folder may say in more than one way, and what it may leave out."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_models_golden import GOLDEN, TOLERANCE, run_all, spread_error
from test_models_unsaid import folder

from ggraph.errors import ModelError
from ggraph.tensor import Array
from models.registry import open_model

MIXTURES = ("tiny/qwen3_moe", "tiny2/glm4_moe_lite", "tiny2/mixtral", "tiny2/qwen3_5_moe")
PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def error(path: Path, name: str) -> float:
    """Of its logits, held against the golden vectors of `name`."""
    expected = np.load(GOLDEN / name / "expected.npz")
    return spread_error(run_all(path, expected["ids"].tolist())["logits"], expected["logits"])


def stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """All experts of a layer in two tensors, as transformers 5 keeps and may save them."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[tuple[int, int], Array]] = {}
    for given, t in tensors.items():
        name = given.replace("block_sparse_moe", "mlp")
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            found[name] = t
        else:
            experts.setdefault(match[1], {})[int(match[2]), PARTS[match[3]]] = t
    for lead, parts in experts.items():
        count = range(len(parts) // 3)
        both = [np.concatenate([parts[x, 0], parts[x, 1]]) for x in count]
        found[f"{lead}.gate_up_proj"] = np.stack(both)
        found[f"{lead}.down_proj"] = np.stack([parts[x, 2] for x in count])
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_one_tensor_are_those_in_many(name: str, tmp_path: Path) -> None:
    hf = folder(name, tmp_path / "hf", {})
    made = stacked(load_file(hf / "model.safetensors"))
    save_file(made, hf / "model.safetensors")
    assert error(hf, name) < TOLERANCE
    for odd in (made["model.layers.2.mlp.experts.gate_up_proj"][:, 1:], np.ones(3, np.float16)):
        damaged = {**made, "model.layers.2.mlp.experts.gate_up_proj": np.ascontiguousarray(odd)}
        save_file(damaged, hf / "model.safetensors")
        with pytest.raises(ModelError, match=r"gate_up_proj'.*gate and up of shape"):
            open_model(hf)


def test_olmo_3_as_it_was_released(tmp_path: Path) -> None:
    """One scaling, of the full layers alone; the sliding ones listed, or not."""
    config = json.loads((GOLDEN / "tiny2" / "olmo3" / "config.json").read_text())
    scaling = dict(config["rope_parameters"]["full_attention"])
    older = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    for i, more in enumerate(({}, {"layer_types": None})):
        changes = {"rope_parameters": None, **older, **more}
        assert error(folder("tiny2/olmo3", tmp_path / str(i), changes), "tiny2/olmo3") < TOLERANCE
