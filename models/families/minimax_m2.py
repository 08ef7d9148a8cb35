"""MiniMax-M2: a mixture in every layer, chosen by sigmoids; an RMS norm over whole rows of q and k,
of whose heads a half turns.

Source: MiniMax 2025, the M2 release; transformers `modeling_minimax_m2`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import SWIGLU, Architecture
from ..blocks import Stack
from ..config import DecoderConfig, Keys
from ..hf_config import without_window
from . import glm4_moe
from .olmoe import layer


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of experts, and the share of heads that turns, told as so many features."""
    k = Keys(values, "config.json")
    found = {**without_window(values), "moe_intermediate_size": k.integer("intermediate_size")}
    if k.has("rotary_dim") and not k.has("partial_rotary_factor"):
        found["partial_rotary_factor"] = k.integer("rotary_dim") / max(k.integer("head_dim"), 1)
    return found


def complete(c: DecoderConfig) -> DecoderConfig:
    """Experts are chosen by sigmoids, and their shares sum to 1, whatever a file says of it."""
    return replace(glm4_moe.complete(c), norm_topk_prob=True)


MINIMAX_M2 = Architecture(
    "minimax-m2", Stack(layer), ("MiniMaxM2ForCausalLM",), translate=translate, complete=complete,
    fixed={"hidden_act": SWIGLU["hidden_act"], "scoring_func": ("sigmoid",)},
    layer_names={
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.e_score_correction_bias": "exp_probs_b.bias",
    },
    hf_defaults={
        "intermediate_size": 1536, "head_dim": 128, "num_key_value_heads": 8,
        "num_experts_per_tok": 8, "num_local_experts": 256, "rope_theta": 5e6,
        "max_position_embeddings": 196608,
    },
)  # fmt: skip
