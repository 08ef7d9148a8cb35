"""ModernBERT, as models of embeddings have it (GTE, Nomic's and Granite's embeddings): an encoder
with norms before each half layer, rotations, gated GELU, and windows in two layers of three.

Source: Warner et al. 2024 (arXiv 2412.13663); transformers `modeling_modernbert`; llama.cpp's
`modern-bert.cpp`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Tensor, ops

from .. import blocks
from ..architecture import FUSED, Architecture
from ..config import DecoderConfig, Keys, Rope, layer_range
from ..step import Step
from ..vectors import vectors
from .cohere import epsilon

PERIOD = 3  # of layers, of which the first sees all
BASE, LOCAL_BASE = 160000.0, 10000.0  # of rotations, the latter of windows
PATTERN = "attention.sliding_window_pattern"


def begin(s: Step) -> Tensor:
    """What the first layer takes: [T, E]."""
    return blocks.layer_norm(s, blocks.embed(s), "token_embd_norm")


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]; the first takes rows that have been through a norm."""
    given = blocks.layer_norm(s, x, f"blk.{i}.attn_norm") if i else x
    h = x + blocks.attention(s, given, i)
    given = blocks.layer_norm(s, h, f"blk.{i}.ffn_norm")
    return h + blocks.gated(s, given, i, ops.geglu_erf, s.config.intermediate_size)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its own keys under their usual names; older configs tell the period of layers without a
    window, and both bases."""
    k = Keys(values, "config.json")
    windows = whole_first(k.integer("global_attn_every_n_layers"), k.integer("num_hidden_layers"))
    return {
        "layer_types": [f"{'sliding' if own else 'full'}_attention" for own in windows],
        **values,
        "sliding_window": k.integer("local_attention"),
        "rope_theta": k.real("global_rope_theta"),
        "rope_local_base_freq": k.real("local_rope_theta"),
    }  # fmt: skip


def whole_first(period: int, layers: int) -> tuple[bool, ...]:
    """Which layers have windows: all but the first of each period."""
    return tuple(i % max(period, 1) > 0 for i in layer_range(layers))


def complete(c: DecoderConfig) -> DecoderConfig:
    """The rotation of windows, where a file does not say."""
    if c.window_rope is not None or c.sliding_window is None:
        return c
    return replace(c, window_rope=Rope(c.rope.mode, c.rope.n_rot, LOCAL_BASE, factors=""))


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """Which layers have windows: those of a period begin with the one that has none."""
    told = k.get(PATTERN)
    listed = not (told is None or isinstance(told, int))
    return {} if listed else {"windowed_layers": whole_first(k.integer(PATTERN, PERIOD), layers)}


MODERN_BERT = Architecture(
    "modern-bert", blocks.Stack(layer, blocks.layer_norm, begin, vectors),
    ("ModernBertModel", "ModernBertForMaskedLM"), causal=False,
    layer_prefix=r"(?:model\.)?layers\.",
    layer_names={
        "attn_norm": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
    },
    top_names={
        f"{lead}{a}.weight": f"{b}.weight" for lead in ("", "model.") for a, b in (
            ("embeddings.tok_embeddings", "token_embd"), ("embeddings.norm", "token_embd_norm"),
            ("final_norm", "output_norm"),
        )
    },
    fused={**FUSED, "ffn_up": ("ffn_gate", "ffn_up")},
    fixed={
        "hidden_activation": ("gelu",), "norm_bias": (False,), "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    hf_defaults={
        "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
        "norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": PERIOD,
        "global_rope_theta": BASE, "local_rope_theta": LOCAL_BASE,
    },
    translate=translate, complete=complete, keys=epsilon, read=read,
)  # fmt: skip
