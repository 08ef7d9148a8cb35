"""Qwen3: Llama's layer with an RMS norm on each head of q and k before the rotation.

Source: Qwen team 2025 (arXiv 2505.09388).
"""

from ggraph import Graph

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a dense Qwen3 checkpoint."""
    x = blocks.embed(s)  # [T, E]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        h = blocks.attended(s, x, i, qk_norm="head")
        x = blocks.fed_forward(s, h, i)
    return blocks.head(s, x)


QWEN3 = Architecture("qwen3", build, ("Qwen3ForCausalLM",))
