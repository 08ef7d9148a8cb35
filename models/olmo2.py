"""OLMo 2: the norms stand behind attention and feed-forward, and over whole rows of q and k.

Source: Team OLMo 2025 (arXiv 2501.00656).
"""

from ggraph import Graph, Tensor

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of an OLMo 2 checkpoint."""
    return blocks.stacked(s, layer)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    mixed = blocks.attention(s, x, i, qk_norm="row")
    h = s.asked(x, i) + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
    return h + blocks.norm(s, blocks.swiglu(s, h, i), f"blk.{i}.post_ffw_norm")


OLMO2 = Architecture(
    "olmo2",
    build,
    ("Olmo2ForCausalLM",),
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
