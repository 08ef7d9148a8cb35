"""OLMo 2: the norms stand behind attention and feed-forward, and over whole rows of q and k.

GGUF files of OLMo 3 have the same name: three of four layers slide, and YaRN turns the full ones
alone. Sources: Team OLMo 2025 (arXiv 2501.00656); llama.cpp's `olmo2.cpp`.
"""

from dataclasses import replace

from ggraph import Graph, Tensor

from . import blocks
from .architecture import Architecture
from .blocks import Step
from .config import DecoderConfig, Rope


def build(s: Step) -> Graph:
    """The step graph of an OLMo 2 checkpoint."""
    return blocks.stacked(s, layer)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    mixed = blocks.attention(s, x, i, qk_norm="row")
    h = s.asked(x, i) + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
    return h + blocks.norm(s, blocks.swiglu(s, h, i), f"blk.{i}.post_ffw_norm")


def complete(c: DecoderConfig) -> DecoderConfig:
    """Sliding layers turn as they were trained, whatever stretches the others."""
    if c.window_rope is not None or c.sliding_window is None:
        return c
    plain = Rope(c.rope.mode, c.rope.n_rot, c.rope.freq_base, factors="")
    return replace(c, window_rope=plain)


OLMO2 = Architecture(
    "olmo2",
    build,
    ("Olmo2ForCausalLM",),
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    gguf_defaults={"attention.sliding_window_pattern": 4},
    complete=complete,
)
