"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward.

Source: Qwen team 2025 (arXiv 2505.09388).
"""

from ggraph import Graph

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a Qwen3 checkpoint with experts."""
    x = blocks.embed(s)  # [T, E]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        h = blocks.attended(s, x, i, qk_norm="head")
        x = h + blocks.experts(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i)
    return blocks.head(s, x)


QWEN3_MOE = Architecture("qwen3moe", build, ("Qwen3MoeForCausalLM",))
