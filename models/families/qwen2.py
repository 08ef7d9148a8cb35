"""Qwen2: Llama's layer with biases on q, k and v, which `blocks.linear` adds where they exist; and
what answers in Qwen2-VL and Qwen2.5-VL, which turns rows of images by three positions.

Sources: Qwen team 2024 (arXiv 2407.10671, 2409.12191); transformers `configuration_qwen2`,
`configuration_qwen2_vl`, `configuration_qwen2_5_vl`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..architecture import SWIGLU, Architecture
from ..blocks import Stack
from ..config import DecoderConfig, Keys, layer_range
from .llama import layer

WHOLE = 28  # layers that see everything before others slide, where the config does not say


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers slide, where any does: those behind the first `max_window_layers`."""
    return sliding(values, lambda i, whole: i >= whole)


def sliding(values: Mapping[str, Any], slides: Callable[[int, int], bool]) -> Mapping[str, Any]:
    """The kind of each layer, where any slides and none is told: by whether layer i `slides`, given
    i and `max_window_layers`."""
    k = Keys(values, "config.json")
    if not k.flag("use_sliding_window"):
        return {**values, "sliding_window": None}
    if values.get("layer_types"):
        return values
    most = k.integer("max_window_layers", WHOLE)
    own = [slides(i, most) for i in layer_range(k.integer("num_hidden_layers"))]
    return {**values, "layer_types": [f"{'sliding' if s else 'full'}_attention" for s in own]}


def turning(c: DecoderConfig) -> DecoderConfig:
    """How many pairs turn by time, line and column, where neither file says it."""
    return replace(c, mrope_section=c.mrope_section or (16, 24, 24))


def sections_of(c: DecoderConfig) -> dict[str, Any]:
    """The same as GGUF files tell it."""
    return {"rope.dimension_sections": np.array([*c.mrope_section, 0, 0, 0, 0][:4], np.int32)}


QWEN2 = Architecture(
    "qwen2", Stack(layer), ("Qwen2ForCausalLM",), fixed=SWIGLU, translate=translate,
    hf_defaults={
        "sliding_window": 4096, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
)  # fmt: skip
QWEN2_VL = replace(
    QWEN2, name="qwen2vl", complete=turning, keys=sections_of,
    hf=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    hf_defaults={
        **QWEN2.hf_defaults, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    },
)  # fmt: skip
