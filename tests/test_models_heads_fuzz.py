"""Heads damaged at random: each is opened, or refused in one line."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from head_loop import TINY, Weights, grown, saved, variant
from hypothesis import given
from hypothesis import strategies as st

from ggraph.errors import GgraphError
from models.eagle3 import Head
from models.heads.eagle1 import FirstHead
from models.heads.layouts import open_head
from models.registry import open_model

TARGET = open_model(TINY / "llama_tied")
ODD: list[Any] = [
    None, 0, 1, -1, 3, 2**31, 2.5, -0.0, 1e308, True, False, "x", "", [], [1], [1, 2], ["a"],
    [2, 3, 3], [-1, 0, 1], [[1], [2], [3]], {}, {"x": 1}, {"rope_type": "yarn"},
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0},
    {"type": "linear", "factor": 0.0}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]},
]  # fmt: skip
KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window",
    "eagle_config", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "parallel_drafting",
    "ptd_token_id", "mask_token_id", "dflash_config", "kv_lora_rank", "q_lora_rank", "v_head_dim",
    "qk_rope_head_dim", "qk_nope_head_dim", "rope_interleave", "partial_rotary_factor",
    "num_hidden_layers", "intermediate_size", "draft_vocab_size", "vocab_size", "architectures",
    "speculators_model_type", "use_last_layernorm", "mla_use_nope", "tie_word_embeddings",
)  # fmt: skip
SOURCES = ("plain", "two layers", "qk_norm", "biases", "latent", "latent, small queries",
           "latent with yarn", "own width", "fc_norm and norm_output")  # fmt: skip


def spoilt(value: np.ndarray[Any, Any], how: int) -> np.ndarray[Any, Any]:
    """One of the ways in which a tensor can be wrong."""
    if how == 0:
        return value.T
    if how == 1:
        return value.reshape(-1)
    if how == 2:
        return value[:-1]
    if how == 3:
        return np.concatenate([value, value])
    if how == 4:
        return np.full_like(value, 0 if value.dtype == bool else 255)
    if how == 5:
        return value.astype(np.float16)
    if how == 6:
        return value[None]
    if how == 7:
        return value[..., :0]
    return value.astype(np.int32)


def weights_of(source: str, masked: bool) -> tuple[Weights, dict[str, Any]]:
    weights, options = variant(source)
    if masked:
        weights["mask_hidden"] = grown(1, 1, weights["fc.weight"].shape[1])
        options["ptd_token_id"] = 310
    return weights, options


@given(st.data())
def test_a_damaged_head_is_opened_or_refused_in_one_line(data: st.DataObject) -> None:
    weights, options = weights_of(
        data.draw(st.sampled_from(SOURCES)), data.draw(st.booleans())
    )  # fmt: skip
    for _ in range(data.draw(st.integers(0, 2))):
        options[data.draw(st.sampled_from(KEYS))] = data.draw(st.sampled_from(ODD))
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(weights)))
        how = data.draw(st.integers(-1, 8))
        if how < 0:
            del weights[name]
        else:
            weights[name] = spoilt(weights[name], how)
    with tempfile.TemporaryDirectory() as folder:
        try:
            head = open_head(saved(Path(folder) / "head", weights, options), TARGET)
        except GgraphError as error:
            assert "\n" not in str(error)
            return
    assert isinstance(head, (Head, FirstHead))


def test_no_heads_at_all(tmp_path: Path) -> None:
    weights, options = variant("latent")
    for i, heads in enumerate((0, -4, 3)):
        with pytest.raises(GgraphError):
            open_head(
                saved(tmp_path / str(i), weights, {**options, "num_attention_heads": heads}), TARGET
            )
