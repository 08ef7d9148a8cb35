"""Llama: RMS norm, rotary attention with grouped heads, SwiGLU. Also Mistral's sliding window.

Source: Touvron et al. 2023 (arXiv 2302.13971), Jiang et al. 2023 (arXiv 2310.06825).
"""

from ggraph import Graph, Tensor

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of a llama or mistral checkpoint."""
    return blocks.stacked(s, layer)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    return blocks.fed_forward(s, blocks.attended(s, x, i), i)


LLAMA = Architecture("llama", build, ("LlamaForCausalLM",), "normal")
MISTRAL = Architecture("mistral", build, ("MistralForCausalLM",), "normal", written_as="llama")
