"""EXAONE MoE, K-EXAONE: GLM-4.5's mixture behind Qwen3's attention, of which three of four layers
slide, and those alone turn.

Source: LG AI Research 2026, the K-EXAONE release; transformers `modeling_exaone_moe`; llama.cpp's
`exaone-moe.cpp`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError

from ..architecture import SHARED_NAMES, SWIGLU, untied
from ..blocks import Stack
from ..config import DecoderConfig, Keys
from ..gguf_config import told_window
from . import exaone4, glm4_moe
from .deepseek2 import DENSE, dense_layers
from .qwen3 import layer


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names. The layer that only drafts is left out: transformers has no
    place for it."""
    k = Keys(values, "config.json")
    told = {
        **exaone4.translate(values), DENSE: dense_layers(k), "num_nextn_predict_layers": None,
        "n_shared_experts": k.integer("num_shared_experts"),
    }  # fmt: skip
    return glm4_moe.translate(told)


def complete(c: DecoderConfig) -> DecoderConfig:
    """Sigmoids choose, and layers that slide turn, where a file does not say."""
    return exaone4.complete(glm4_moe.complete(c))


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """Nothing more. ModelError without a window, which llama.cpp must have."""
    told_window(k)
    return {}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """As of GLM-4.5. ModelError where no layer slides."""
    if c.sliding_window is None:
        raise ModelError("exaone-moe: GGUF cannot say that no layer slides")
    return glm4_moe.keys(c)


EXAONE_MOE = replace(
    glm4_moe.GLM4_MOE, name="exaone-moe", build=Stack(layer), layer=None,
    hf=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), translate=translate, complete=complete,
    read=read, store=untied, keys=keys,
    layer_names={
        **SHARED_NAMES,
        **{f"mlp.{at}e_score_correction_bias": "exp_probs_b.bias" for at in ("", "gate.")},
    },
    gguf_defaults={
        "attention.sliding_window_pattern": exaone4.PERIOD, "expert_weights_norm": False,
    },
    fixed={**SWIGLU, "scoring_func": ("sigmoid",)},
    hf_defaults={
        "rms_norm_eps": 1e-5, "intermediate_size": 16384, "moe_intermediate_size": 1024,
        "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_key_value_heads": 32,
        "sliding_window": 4096, "n_group": 1, "topk_group": 1,
    },
)  # fmt: skip
