"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward, in all or
some layers; and what answers in Qwen3-VL's mixtures.

Sources: Qwen team 2025 (arXiv 2505.09388); transformers `modeling_qwen3_moe`,
`modeling_qwen3_vl_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError
from ggraph.formats.checkpoint import RawTensor

from ..architecture import SWIGLU, Architecture, Tensors, changed
from ..blocks import Stack
from ..config import DecoderConfig
from . import qwen2, qwen3
from .qwen3 import layer


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers slide, if any does."""
    return {**qwen2.translate(values), "layer_types": None}


def summing(c: DecoderConfig) -> DecoderConfig:
    """Shares of experts always sum to 1; rows of images are turned as in Qwen3-VL."""
    return replace(qwen3.turning(c), norm_topk_prob=True)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """None. ModelError for shares that do not sum to 1: in GGUF files they always do."""
    if not c.norm_topk_prob:
        raise ModelError("qwen3moe: GGUF cannot say what experts' shares sum to, if not to 1")
    return {}


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Experts with a row for each feature that they make; released files have those as columns."""
    e, f = c.hidden_size, c.moe_intermediate_size
    columns = {"ffn_gate_up_exps.weight": (e, 2 * f), "ffn_down_exps.weight": (f, e)}

    def turned(t: RawTensor) -> RawTensor:
        shape = columns.get(".".join(t.name.split(".")[2:]))
        own = shape is not None and t.shape[1:] == shape != shape[::-1]
        return changed(t, t.data.swapaxes(1, 2)) if own else t

    return {name: turned(t) for name, t in tensors.items()}


QWEN3_MOE = Architecture(
    "qwen3moe", Stack(layer), ("Qwen3MoeForCausalLM",), fixed=SWIGLU, translate=translate,
    keys=keys,
    hf_defaults={
        "num_experts_per_tok": 8, "sliding_window": 4096, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "intermediate_size": 6144, "moe_intermediate_size": 768,
    },
)  # fmt: skip
QWEN3_VL_MOE = replace(
    QWEN3_MOE, name="qwen3vlmoe", translate=qwen3.translate, keys=qwen2.sections_of,
    hf=("Qwen3VLMoeForConditionalGeneration",), complete=summing, sanitize=sanitize,
    layer_names={
        f"mlp.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("gate_up", "down")
    },
    hf_defaults={
        "num_experts_per_tok": 4, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "num_key_value_heads": 16, "max_position_embeddings": 128000,
    },
)  # fmt: skip
