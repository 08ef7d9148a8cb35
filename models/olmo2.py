"""OLMo 2: the norms stand behind attention and feed-forward, and over whole rows of q and k.

Source: Team OLMo 2025 (arXiv 2501.00656).
"""

from ggraph import Graph

from . import blocks
from .architecture import Architecture
from .blocks import Step


def build(s: Step) -> Graph:
    """The step graph of an OLMo 2 checkpoint."""
    x = blocks.embed(s)  # [T, E]
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        mixed = blocks.attention(s, x, i, qk_norm="row")
        h = x + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
        x = h + blocks.norm(s, blocks.swiglu(s, h, i), f"blk.{i}.post_ffw_norm")
    return blocks.head(s, x)


OLMO2 = Architecture(
    "olmo2",
    build,
    ("Olmo2ForCausalLM",),
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
