"""SmolLM3: Llama with no rotation in every fourth layer.

Source: Hugging Face 2025, the SmolLM3 release; transformers `modeling_smollm3`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError

from ..architecture import SWIGLU, Architecture
from ..blocks import Stack
from ..config import DecoderConfig, Keys
from ..gguf_config import every
from .llama import layer

STEP = 4  # GGUF has no key for it: llama.cpp takes every fourth


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers that rotate: as listed, or all but each so-manieth. The others may slide."""
    k = Keys(values, "config.json")
    step = k.integer("no_rope_layer_interval", STEP)
    if step < 1:
        raise ModelError(f"config.json: no_rope_layer_interval = {step}: expected 1 or more")
    listed = values.get("no_rope_layers") or list(every(step, k.integer("num_hidden_layers")))
    found = {**values, "rotated_layers": listed}
    if k.flag("use_sliding_window") and not values.get("layer_types") and isinstance(listed, list):
        found["layer_types"] = [f"{'full' if t else 'sliding'}_attention" for t in listed]
    return found


def complete(c: DecoderConfig) -> DecoderConfig:
    """The layers that rotate, which GGUF files do not tell."""
    return c if c.rotated_layers else replace(c, rotated_layers=every(STEP, c.num_hidden_layers))


def keys(c: DecoderConfig) -> dict[str, object]:
    """Nothing; ModelError for a pattern that no GGUF file can tell."""
    if c.rotated_layers != every(STEP, c.num_hidden_layers):
        raise ModelError(f"smollm3: GGUF cannot say that only {c.rotated_layers} rotate")
    return {}


SMOLLM3 = Architecture(
    "smollm3", Stack(layer), ("SmolLM3ForCausalLM",), "normal", translate=translate,
    complete=complete,
    keys=keys, fixed=SWIGLU,
    hf_defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "max_position_embeddings": 32768},
)  # fmt: skip
