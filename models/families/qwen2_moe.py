"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, experts, and a feed-forward that every row takes as
far as a gate opens.

Source: Qwen team 2024, the Qwen1.5-MoE-A2.7B release; transformers `modeling_qwen2_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import DecoderConfig
from ..step import Step
from . import qwen35
from .qwen2 import sliding


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i)
    return h + blocks.feed_forward(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i, opens=True)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers slide, where any does: every other one of the first `max_window_layers`."""
    return sliding(values, lambda i, last: i < last and i % 2 == 0)


def complete(c: DecoderConfig) -> DecoderConfig:
    """Widths that older GGUF files leave out, as llama.cpp takes them."""
    each = c.moe_intermediate_size or c.intermediate_size // max(c.num_experts_per_tok, 1)
    shared = c.shared_intermediate_size or c.intermediate_size
    return replace(c, moe_intermediate_size=each, shared_intermediate_size=shared)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """None. ModelError for shares that sum to 1: in GGUF files they are chances as they are."""
    if c.norm_topk_prob:
        raise ModelError(f"{c.architecture}: GGUF cannot say that experts' shares sum to 1")
    return {}


QWEN2_MOE = Architecture(
    "qwen2moe", blocks.Stack(layer), ("Qwen2MoeForCausalLM",), fixed=SWIGLU,
    layer_names=qwen35.SHARED_EXPERT,
    translate=translate, complete=complete, load=qwen35.load, store=qwen35.store, keys=keys,
    gguf_defaults={"expert_weights_norm": False},
    hf_defaults={
        "num_experts_per_tok": 4, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "sliding_window": 4096,
        "num_key_value_heads": 16, "max_position_embeddings": 32768,
    },
)  # fmt: skip
