"""EXAONE 4: OLMo 2's norms, but over each head of q and k; where layers slide, only those turn.

Source: LG AI Research 2025 (arXiv 2507.11407); transformers `modeling_exaone4`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ggraph import ModelError

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import DecoderConfig, Keys
from ..gguf_config import types_every
from . import olmo2

PERIOD = 4  # of the full layers, where a file does not say


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers slide and turn, as listed or by a period; all turn where none slides."""
    if values.get("sliding_window") is None:
        return {**values, "layer_types": None}
    k = Keys(values, "config.json")
    kinds = values.get("layer_types")
    if not kinds:
        period = k.integer("sliding_window_pattern", PERIOD)
        kinds = types_every(period, k.integer("num_hidden_layers"))
    turned = [t == "sliding_attention" for t in kinds] if isinstance(kinds, list) else None
    return {**values, "layer_types": kinds, "rotated_layers": turned}


def complete(c: DecoderConfig) -> DecoderConfig:
    """Those that slide turn, which GGUF files do not tell."""
    return replace(c, rotated_layers=c.rotated_layers or c.windowed_layers)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Nothing; ModelError for layers that neither slide nor turn where none slides."""
    if c.rotated_layers != c.windowed_layers:
        raise ModelError(f"exaone4: GGUF cannot say that only {c.rotated_layers} turn")
    return {}


EXAONE4 = Architecture(
    "exaone4", blocks.Stack(partial(olmo2.layer, qk_norm="head")), ("Exaone4ForCausalLM",),
    translate=translate, complete=complete, keys=keys,
    fixed=SWIGLU, layer_names=olmo2.OLMO2.layer_names,
    gguf_defaults={"attention.sliding_window_pattern": PERIOD},
    hf_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32},
)  # fmt: skip
