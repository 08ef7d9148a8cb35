"""ERNIE 4.5: Llama that pairs neighbours in either file; with experts behind a dense layer, chosen
by their chances and a correction, and one feed-forward for every row, or without.

Source: Baidu 2025, the ERNIE 4.5 report; transformers `modeling_ernie4_5`, `modeling_ernie4_5_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError

from ..architecture import SHARED_NAMES, SWIGLU, Architecture, Tensors, changed, pairing_neighbours
from ..blocks import Stack
from ..config import DecoderConfig, Keys
from .llama import layer

CORRECTION = ".exp_probs_b.bias"


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of the mixture under their usual names. ModelError where experts end before the end."""
    k = Keys(values, "config.json")
    last, layers = k.integer("moe_layer_end_index", -1), k.integer("num_hidden_layers")
    if last != -1 and last < layers - 1:
        raise ModelError(f"config.json: moe_layer_end_index = {last}: expected {layers - 1}")
    return {
        **values, "num_experts": k.integer("moe_num_experts"),
        "num_experts_per_tok": k.integer("moe_k"),
        "first_k_dense_replace": k.integer("moe_layer_start_index"),
        "shared_expert_intermediate_size":
            k.integer("moe_num_shared_experts") * k.integer("moe_intermediate_size"),
    }  # fmt: skip


def complete(c: DecoderConfig) -> DecoderConfig:
    """Shares of experts always sum to 1."""
    return replace(pairing_neighbours(c), norm_topk_prob=True)


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Corrections as vectors: either file may hold them as one row of a matrix."""
    flat = {n: t for n, t in tensors.items() if n.endswith(CORRECTION)}
    return {**tensors, **{n: changed(t, t.data.reshape(-1)) for n, t in flat.items()}}


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """As they are. ModelError for biases, of which llama.cpp reads those of q, k and v alone."""
    if any(n.endswith(".bias") and not n.endswith(CORRECTION) for n in tensors):
        raise ModelError(f"{c.architecture}: GGUF cannot say that matrices have biases")
    return tensors


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Which layers have experts, and how many every row takes."""
    return {
        "leading_dense_block_count": c.leading_dense,
        "interleave_moe_layer_step": 1,
        "expert_shared_count": c.shared_intermediate_size // max(c.moe_intermediate_size, 1),
    }


ERNIE45 = Architecture(
    "ernie4_5", Stack(layer), ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), "normal",
    fixed=SWIGLU,
    complete=pairing_neighbours,
    hf_defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128, "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
)  # fmt: skip
ERNIE45_MOE = Architecture(
    "ernie4_5-moe", Stack(layer), ("Ernie4_5_MoeForCausalLM",), "normal", translate=translate,
    complete=complete, load=load, store=store, keys=keys,
    top_names={"lm_head.bias": "output.bias"},
    fixed={**SWIGLU, "moe_layer_interval": (1,), "moe_norm_min": (1e-12,)},
    layer_names={**SHARED_NAMES, "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    hf_defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "moe_k": 6,
        "moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
    },
)  # fmt: skip
