"""AFMoE, Arcee's Trinity: norms before and behind each half layer, a gate on what attention finds,
experts chosen by sigmoids behind dense layers, and one feed-forward for every row. Three of four
layers slide, and those alone turn.

Legend: T rows, E width, H heads, D numbers per head.
Source: Arcee 2025, the Trinity release; transformers `modeling_afmoe`; llama.cpp's `afmoe.cpp`.
"""

import math
from collections.abc import Mapping
from typing import Any

from ggraph import ModelError, Tensor, ops

from .. import blocks
from ..architecture import SHARED_NAMES, SWIGLU, Architecture
from ..config import DecoderConfig, Keys
from ..gguf_config import every, told_window
from ..step import Step
from . import exaone4, gemma2, glm4_moe

PERIOD = 4  # of the full layers


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    mixed = attention(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i)
    h = s.asked(x, i) + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
    return gemma2.second_half(s, h, i, blocks.feed_forward)


def attention(s: Step, x: Tensor, i: int) -> Tensor:
    """Self-attention whose result passes a gate, made of what attends: [T, E] -> [T, E]."""
    c, asking = s.config, s.asked(x, i)
    q = blocks.heads(s, asking, i, "q", c.num_attention_heads, "head")
    seen = blocks.remembered(s, x, i, qk_norm="head")
    mixed = blocks.attend(s, blocks.turned(s, q, i, "q"), seen, blocks.mask_of(s, i), i)
    gate = blocks.linear(s, asking, f"blk.{i}.attn_gate", mixed.shape[1])  # [T, H*D]
    return blocks.linear(s, mixed * ops.sigmoid(gate), f"blk.{i}.attn_output", c.hidden_size)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names; shares of experts sum to 1. ModelError without a window."""
    k = Keys(values, "config.json")
    grown = math.sqrt(k.integer("hidden_size")) if k.flag("mup_enabled") else 1.0
    told = {
        **values, "sliding_window": k.integer("sliding_window"),
        "sliding_window_pattern": k.integer("global_attn_every_n_layers"),
        "n_shared_experts": k.integer("num_shared_experts"), "norm_topk_prob": True,
        "routed_scaling_factor": k.real("route_scale"), "embedding_multiplier": grown,
    }  # fmt: skip
    return glm4_moe.translate(exaone4.translate(told))


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """What no key tells: which layers turn, and the factor of the embedding. ModelError without a
    window, which llama.cpp must have."""
    told_window(k)
    grown = math.sqrt(k.integer("embedding_length"))
    return {"rotated_layers": every(PERIOD, layers), "embedding_multiplier": grown}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """As of GLM-4.5. ModelError for what llama.cpp takes for granted and is otherwise here."""
    if c.sliding_window is None or c.rotated_layers != every(PERIOD, c.num_hidden_layers):
        raise ModelError("afmoe: GGUF cannot say that others than each fourth layer see all")
    if c.embedding_multiplier != math.sqrt(c.hidden_size):
        raise ModelError("afmoe: GGUF cannot say that embeddings have no factor")
    return {**glm4_moe.keys(c), "embedding_scale": None}


AFMOE = Architecture(
    "afmoe", blocks.Stack(layer), ("AfmoeForCausalLM",), translate=translate,
    complete=glm4_moe.complete,
    read=read, keys=keys,
    layer_names={
        **SHARED_NAMES, **gemma2.NAMES, "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm", "self_attn.gate_proj": "attn_gate",
        "mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b.bias",
    },
    gguf_defaults={
        "attention.sliding_window_pattern": PERIOD, "expert_weights_norm": False,
    },
    fixed={
        **SWIGLU, "attention_bias": (False,), "score_func": ("sigmoid",), "route_norm": (True,),
        "n_group": (1,), "topk_group": (1,), "num_expert_groups": (1,), "num_limited_groups": (1,),
    },
    hf_defaults={
        "rms_norm_eps": 1e-5, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64,
        "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0,
        "sliding_window": 1024, "global_attn_every_n_layers": PERIOD,
        "max_position_embeddings": 16384,
    },
)  # fmt: skip
