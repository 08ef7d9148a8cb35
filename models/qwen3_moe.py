"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward.

Source: Qwen team 2025 (arXiv 2505.09388).
"""

from collections.abc import Mapping
from typing import Any

from ggraph import Graph, Tensor

from . import blocks, qwen2
from .architecture import SWIGLU, Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a Qwen3 checkpoint with experts."""
    return blocks.stacked(s, layer)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i, qk_norm="head")
    return h + blocks.experts(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers slide, if any does."""
    return {**qwen2.translate(values), "layer_types": None}


QWEN3_MOE = Architecture(
    "qwen3moe", build, ("Qwen3MoeForCausalLM",), fixed=SWIGLU, translate=translate,
    hf_defaults={"num_experts_per_tok": 8, "sliding_window": 4096},
)  # fmt: skip
