"""dots.llm1: GLM-4.5's mixture behind Qwen3's attention.

Source: Huo et al. 2025 (arXiv 2506.05767); transformers `modeling_dots1`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError

from ..architecture import SHARED_NAMES, SWIGLU
from ..blocks import Stack
from ..config import DecoderConfig
from . import glm4_moe
from .qwen2 import sliding
from .qwen3 import layer


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of what every row takes, and which layers slide, if any: those behind the first
    `max_window_layers`."""
    slides = values.get("sliding_window") is not None
    told = sliding({**values, "use_sliding_window": slides}, lambda i, whole: i >= whole)
    return glm4_moe.translate(told)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """As of GLM-4.5. ModelError where some layer slides."""
    if c.sliding_window is not None:
        raise ModelError("dots1: GGUF cannot say that layers slide")
    return glm4_moe.keys(c)


DOTS1 = replace(
    glm4_moe.GLM4_MOE, name="dots1", build=Stack(layer), hf=("Dots1ForCausalLM",),
    translate=translate,
    keys=keys, layer=None,
    layer_names={**SHARED_NAMES, "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
    fixed={**SWIGLU, "attention_bias": (False,)},
    hf_defaults={
        "moe_intermediate_size": 1408, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_window_layers": 62,
    },
)  # fmt: skip
