"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward.

Source: Qwen team 2025 (arXiv 2505.09388).
"""

from collections.abc import Mapping
from typing import Any

from . import qwen2
from .architecture import SWIGLU, Architecture
from .qwen3 import build


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers slide, if any does."""
    return {**qwen2.translate(values), "layer_types": None}


QWEN3_MOE = Architecture(
    "qwen3moe", build, ("Qwen3MoeForCausalLM",), fixed=SWIGLU, translate=translate,
    hf_defaults={
        "num_experts_per_tok": 8, "sliding_window": 4096, "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
)  # fmt: skip
