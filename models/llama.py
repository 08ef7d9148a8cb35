"""Llama: RMS norm, rotary attention with grouped heads, SwiGLU. Also Mistral's sliding window.

Source: Touvron et al. 2023 (arXiv 2302.13971), Jiang et al. 2023 (arXiv 2310.06825).
"""

from ggraph import Graph

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a llama or mistral checkpoint."""
    x = blocks.embed(s)  # [T, E]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        h = blocks.attended(s, x, i)
        x = blocks.fed_forward(s, h, i)
    return blocks.head(s, x)


LLAMA = Architecture("llama", build, ("LlamaForCausalLM",), "normal")
MISTRAL = Architecture("mistral", build, ("MistralForCausalLM",), "normal", written_as="llama")
