"""Configs that say odd things: a model is opened and planned, or refused in one line.

Nobody may meet a traceback for a key that is missing, of another type, or of no sense, nor for a
tensor that is missing or of another shape.
"""

import functools
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_kit import ENCODERS, encoder_folder
from hypothesis import given
from hypothesis import strategies as st
from mtp_kit import GLM, QWEN, with_draft_layer
from safetensors.numpy import load_file, save_file
from test_models_families import NAMES, TINY

from ggraph.decode.draft.head import DraftShape
from ggraph.decode.model import StepShape
from ggraph.errors import GgraphError, ModelError
from ggraph.formats import Checkpoint, open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.graph import Graph
from ggraph.tensor import Array
from models.gguf_config import from_gguf
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.convert import model_to_gguf

ODD = (None, 0, -1, 1, 3, 7, 1 << 40, 0.5, -2.5, 1e308, True, "", "yes", [], [1, "a"], {}, {"a": 1},
       1 << 70, 10**400, "x" * 5000, [1] * 5000, [[1], [2, 3]],
       {"rope_type": [1] * 5000})  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (  # of GGUF's types
    0, -1, 1, 3, 1 << 31, 1 << 40, (1 << 64) - 1, 0.0, 0.5, -2.5, math.inf, math.nan, True, "",
    "yarn", "x" * 5000, [], [0], [1] * 64, [1.5] * 64, [True] * 64, ["a"] * 64,
    np.full(64, 7), np.full(5000, 1 << 63, np.uint64), np.full(64, np.nan, np.float32),
)  # fmt: skip
NESTED = [[np.array([1, 2]), np.array([3])], [[np.array([1])]], [["a", "b"], ["c"]]]
MORE_KEYS = (
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.yarn_truncate", "rope.freq_base_swa",
    "attention.sliding_window", "attention.sliding_window_pattern", "full_attention_interval",
    "attention.recurrent_layers", "rope.dimension_sections", "attention.head_count_kv",
)  # fmt: skip
SHAPE = StepShape(3, 32, 3, 33, ())
ENCODED = StepShape(16, 16, 4, 16, (), listed=16)
DRAFT = DraftShape(2, 256, 2, 609, fed_back=False)
TARGET = open_model(TINY / "gemma4_text")
ASSISTANT = TINY.parent / "gemma4_assistant"


def loaded(name: str) -> tuple[dict[str, Any], dict[str, Array]]:
    folder = TINY / name
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def built(path: Path) -> Graph:
    model: Model = open_model(path)
    return model.build(SHAPE)


CHECKPOINTS = {name: loaded(name) for name in NAMES}


@pytest.mark.parametrize("name", [n for n in NAMES if "num_hidden_layers" in CHECKPOINTS[n][0]])
def test_a_config_of_more_layers_than_memory_is_refused(name: str, tmp_path: Path) -> None:
    config, tensors = CHECKPOINTS[name]
    with pytest.raises(ModelError, match="layer"):
        open_model(saved(tmp_path / "hf", {**config, "num_hidden_layers": 1 << 40}, tensors))


ODD_GGUF = {  # by the family whose keys they are among
    "gemma3_text": {"rope.scaling.type": [1, 2]}, "granite": {"logit_scale": 0.0},
    "qwen3_5_moe": {"attention.recurrent_layers": 1}, "lfm2": {"attention.head_count_kv": [2, 0]},
    "gemma2": {"attention.sliding_window_pattern": [1, 0]}, "smollm3": {"block_count": 0},
    "ernie4_5_moe": {"interleave_moe_layer_step": 2}, "lfm2_moe": {"expert_gating_func": 3},
    "gpt_oss": {"rope.dimension_count": 1 << 31}, "olmo3": {"rope.freq_base": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_GGUF)
def test_an_odd_key_of_a_gguf_file_is_refused(name: str, tmp_path: Path) -> None:
    model_to_gguf(open_model(TINY / name), tmp_path / "good.gguf", "f16")
    good = open_checkpoint(tmp_path / "good.gguf")
    odd = {f"{good.architecture}.{key}": value for key, value in ODD_GGUF[name].items()}
    write_gguf(tmp_path / "odd.gguf", {**good.metadata, **odd}, list(good.tensors.values()))
    with pytest.raises(ModelError) as found:
        built(tmp_path / "odd.gguf")
    assert "\n" not in str(found.value)


@functools.cache
def converted(name: str) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        model_to_gguf(open_model(TINY / name), Path(folder) / "m.gguf", "f16")
        return open_checkpoint(Path(folder) / "m.gguf")  # a mapped file lives on


@given(st.sampled_from(NAMES), st.data())
def test_a_gguf_file_of_odd_values_is_built_or_refused_in_one_line(
    name: str, data: st.DataObject
) -> None:
    good = converted(name)
    known = [k for k in good.metadata if not k.startswith("tokenizer.")]
    keys = st.sampled_from([*known, *(f"{good.architecture}.{k}" for k in MORE_KEYS)])
    odd = data.draw(st.dictionaries(keys, st.sampled_from(ODD_VALUES), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "odd.gguf"
        write_gguf(path, {**good.metadata, **odd}, list(good.tensors.values()))
        try:
            graph = built(path)
        except GgraphError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, error
            return
    assert graph["logits"].shape[0] == SHAPE.wanted


@pytest.mark.parametrize("key", MORE_KEYS)
def test_arrays_within_arrays_are_no_hyperparameters(key: str) -> None:
    """Other writers' files may hold them."""
    good = converted("gpt_oss")
    for value in NESTED:
        odd = {**good.metadata, f"{good.architecture}.{key}": value}
        with pytest.raises(ModelError) as found:
            from_gguf(odd, good.architecture, "neox")
        assert "\n" not in str(found.value)


@given(st.data())
def test_a_damaged_config_is_built_or_refused_in_one_line(data: st.DataObject) -> None:
    config, tensors = CHECKPOINTS[data.draw(st.sampled_from(NAMES))]
    config, tensors = dict(config), dict(tensors)
    for _ in range(data.draw(st.integers(1, 2))):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(st.sampled_from(ODD))
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(tensors)))
        kept = data.draw(st.sampled_from((None, 0, 1, -1)))
        if kept is None:
            del tensors[name]
        else:
            tensors[name] = np.ascontiguousarray(np.atleast_1d(tensors[name])[:kept])
    with tempfile.TemporaryDirectory() as folder:
        try:
            graph = built(saved(Path(folder) / "m", config, tensors))
        except GgraphError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, error
            return
    assert graph["logits"].shape[0] == SHAPE.wanted


@pytest.mark.parametrize("name", ENCODERS)
def test_an_odd_key_or_tensor_of_an_encoder_is_built_or_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    """Every key with every odd value; every tensor left out, and cut."""
    folder = encoder_folder(name, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")

    def asked(said: str) -> bool:
        try:
            model = open_model(folder)
            graph = model.build(SHAPE if model.causal else ENCODED)
        except GgraphError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, (said, error)
            return False
        made = "logits" if model.causal else "vectors"  # of a Gemma that is no encoder
        assert graph[made].shape[0] == (SHAPE.wanted if model.causal else 2 * ENCODED.wanted), said
        return True

    assert asked("as it is")
    for key in sorted({*config} - {"architectures"}):
        for value in ODD:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            asked(f"{key} {value!r:.40}")
    (folder / "config.json").write_text(json.dumps(config))
    for title, t in tensors.items():
        left = {n: other for n, other in tensors.items() if n != title}
        for held in (left, {**left, title: np.ascontiguousarray(t[:-1])}):
            save_file(held, folder / "model.safetensors")
            optional = title.endswith("bias") and held is left
            assert not asked(title) or optional or title.startswith("pooler."), title


@given(st.data())
def test_a_damaged_assistant_is_built_or_refused_in_one_line(data: st.DataObject) -> None:
    config = json.loads((ASSISTANT / "config.json").read_text())
    tensors = load_file(ASSISTANT / "model.safetensors")
    for part in (config["text_config"], config)[: data.draw(st.integers(1, 2))]:
        part[data.draw(st.sampled_from(sorted({*part} - {"architectures"})))] = data.draw(
            st.sampled_from(ODD)
        )
    name, kept = data.draw(st.sampled_from(sorted(tensors))), data.draw(st.sampled_from((0, 1, 32)))
    tensors[name] = np.ascontiguousarray(np.atleast_1d(tensors[name])[:kept])
    with tempfile.TemporaryDirectory() as folder:
        try:
            graph = open_head(saved(Path(folder) / "m", config, tensors), TARGET).build(DRAFT)
        except GgraphError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, error
            return
    assert graph["logits"].shape == (DRAFT.wanted, TARGET.vocab_size)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Of the last layer, of each role: by the name that GGUF files have."""
    config, tensors = CHECKPOINTS[name]
    numbers = [int(m[1]) for n in tensors if (m := re.search(r"\.(\d+)\.", n))]
    last = f".{max(numbers)}."
    needed = [n for n in tensors if last in n and not n.endswith(("bias", "sinks"))]
    for i, left_out in enumerate(needed[:: max(1, len(needed) // 4)]):
        held = {n: t for n, t in tensors.items() if n != left_out}
        with pytest.raises(ModelError) as found:
            built(saved(tmp_path / str(i), config, held))
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [0, -4, 3, 1 << 21])
def test_no_such_number_of_heads(name: str, heads: int, tmp_path: Path) -> None:
    config, tensors = CHECKPOINTS[name]
    key = "n_head" if name == "gpt2" else "num_attention_heads"
    with pytest.raises(ModelError):
        built(saved(tmp_path / "m", {**config, key: heads}, tensors))


@pytest.mark.parametrize("name", [QWEN, GLM])
def test_a_draft_layer_that_the_config_does_not_tell_of_is_left_alone(
    name: str, tmp_path: Path
) -> None:
    path = with_draft_layer(name, tmp_path / "hf")
    config = json.loads((path / "config.json").read_text())
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config))
    assert built(path)["logits"].shape == (SHAPE.wanted, 320)
