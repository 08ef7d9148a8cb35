"""GLM-4.5 to 4.7: experts chosen by sigmoids behind dense layers, and one feed-forward for every
row; half of each head turns, and large ones have an RMS norm on each head of q and k.

Source: Z.ai 2025 (arXiv 2508.06471); transformers `modeling_glm4_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Tensor

from .. import blocks
from ..architecture import SHARED_NAMES, SWIGLU, Architecture
from ..config import SIGMOID, DecoderConfig, Keys
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed = any(s.has(f"blk.{i}.attn_{role}_norm.weight") for role in "qk")
    h = blocks.attended(s, x, i, qk_norm="head" if normed else "")
    return h + blocks.feed_forward(s, blocks.norm(s, h, f"blk.{i}.post_attention_norm"), i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of what every row takes, told as so many experts'."""
    k = Keys(values, "config.json")
    wide = k.integer("n_shared_experts") * k.integer("moe_intermediate_size")
    return {**values, "shared_expert_intermediate_size": wide}


def complete(c: DecoderConfig) -> DecoderConfig:
    """How experts are chosen, where a file does not say."""
    return replace(c, expert_gating_func=c.expert_gating_func or SIGMOID)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Which layers have experts, and what their shares sum to."""
    return {
        "leading_dense_block_count": c.leading_dense,
        "expert_shared_count": c.shared_intermediate_size // max(c.moe_intermediate_size, 1),
        "expert_weights_norm": c.norm_topk_prob,
    }


GLM4_MOE = Architecture(
    "glm4moe", blocks.Stack(layer), ("Glm4MoeForCausalLM",), translate=translate,
    complete=complete, keys=keys,
    layer=layer,
    layer_names={
        **SHARED_NAMES, "post_attention_layernorm": "post_attention_norm",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
    gguf_defaults={"expert_weights_norm": False},
    fixed={"hidden_act": SWIGLU["hidden_act"]},
    hf_defaults={
        "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
)  # fmt: skip
