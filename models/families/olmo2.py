"""OLMo 2: the norms stand behind attention and feed-forward, and over whole rows of q and k.

Of OLMo 3 three of four layers slide, and YaRN turns the full ones alone; its GGUF files have the
name of OLMo 2. Sources: Team OLMo 2025 (arXiv 2501.00656); llama.cpp's `olmo2.cpp`; transformers
`modeling_olmo3`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import DecoderConfig, Keys, Rope
from ..gguf_config import types_every
from ..hf_config import without_window
from ..step import Step

PERIOD = 4  # of OLMo 3's full layers, where a file does not say


def layer(s: Step, x: Tensor, i: int, qk_norm: str = "row") -> Tensor:
    """Layer i: [T, E] -> [T, E]; `qk_norm` as in `blocks.attention`."""
    mixed = blocks.attention(s, x, i, qk_norm=qk_norm)
    h = s.asked(x, i) + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
    return h + blocks.norm(s, blocks.swiglu(s, h, i), f"blk.{i}.post_ffw_norm")


def complete(c: DecoderConfig) -> DecoderConfig:
    """Sliding layers turn as they were trained, whatever stretches the others."""
    if c.window_rope is not None or c.sliding_window is None:
        return c
    plain = Rope(c.rope.mode, c.rope.n_rot, c.rope.freq_base, factors="")
    return replace(c, window_rope=plain)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """OLMo 3's sliding layers, where its config does not list them."""
    if values.get("layer_types"):
        return values
    layers = Keys(values, "config.json").integer("num_hidden_layers")
    return {**values, "layer_types": types_every(PERIOD, layers)}


OLMO2 = Architecture(
    "olmo2",
    blocks.Stack(layer),
    ("Olmo2ForCausalLM",),
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    gguf_defaults={"attention.sliding_window_pattern": PERIOD},
    hf_defaults={"rms_norm_eps": 1e-5},
    fixed=SWIGLU,
    translate=without_window,
    complete=complete,
)
OLMO3 = replace(
    OLMO2, name="olmo3", hf=("Olmo3ForCausalLM",), written_as="olmo2", translate=translate,
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
)  # fmt: skip
