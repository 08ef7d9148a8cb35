"""Qwen3: Llama's layer with an RMS norm on each head of q and k before the rotation.

Source: Qwen team 2025 (arXiv 2505.09388).
"""

from ggraph import Graph

from . import blocks
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a dense Qwen3 checkpoint."""
    x = blocks.embed(s)  # [T, E]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
        h = x + blocks.attention(s, normed, i, qk_norm=True)
        x = blocks.fed_forward(s, h, i)
    return blocks.head(s, x)
