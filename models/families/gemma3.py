"""Gemma 3: Gemma 2 with norms on queries and keys, and two rotations: sliding layers have a base of
their own. No soft caps.

Source: Gemma team 2025 (arXiv 2503.19786); transformers `modeling_gemma3`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .. import blocks
from ..architecture import Architecture
from ..config import DecoderConfig, Rope, layer_range
from . import gemma2

WIDE = 62  # layers of the 27B model
PERIOD = 6
LOCAL_BASE = 10000.0  # of sliding layers, where the file does not say


def complete(c: DecoderConfig) -> DecoderConfig:
    """As in Gemma 2, and the rotation of sliding layers."""
    c = gemma2.complete(c, WIDE, PERIOD)
    if c.window_rope is not None or c.sliding_window is None:
        return c
    return replace(c, window_rope=Rope(c.rope.mode, c.rope.n_rot, LOCAL_BASE, factors=""))


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As in Gemma 2; older configs tell the period of the sliding layers."""
    found = gemma2.translate(values)
    period, layers = values.get("sliding_window_pattern"), values.get("num_hidden_layers")
    if "layer_types" in found or not isinstance(period, int) or not isinstance(layers, int):
        return found
    kinds = ["full" if (i + 1) % period == 0 else "sliding" for i in layer_range(layers)]
    return {**found, "layer_types": [f"{kind}_attention" for kind in kinds]}


GEMMA3 = Architecture(
    "gemma3", blocks.Stack(partial(gemma2.layer, qk_norm="head")),
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    fixed={**gemma2.FIXED, "attn_logit_softcapping": ()},
    hf_defaults={
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
        "max_position_embeddings": 131072, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "rope_theta": 1e6,
        "rope_local_base_freq": LOCAL_BASE, "sliding_window_pattern": PERIOD,
    },
    layer_names=gemma2.NAMES, translate=translate, complete=complete, sanitize=gemma2.sanitize,
    store=partial(gemma2.store, part="attn_q_norm", wide=WIDE), keys=gemma2.keys,
)  # fmt: skip
