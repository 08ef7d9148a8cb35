"""gpt-oss: experts with biases and a held unit, sinks in the attention, every other layer slides.

Hugging Face files hold gate and up in one tensor, column by column in turn, in MXFP4 as the model
was released. Source: OpenAI 2025 (arXiv 2508.10925); transformers `modeling_gpt_oss`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import Array, Tensor, dtypes, ops
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import SWIGLU, Architecture, Tensors
from ..config import DecoderConfig
from ..gguf_config import every
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i)
    normed = blocks.norm(s, h, f"blk.{i}.post_attention_norm")
    return h + blocks.experts(s, normed, i, unit=ops.swiglu_oai)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The experts' width under its usual name."""
    return {**values, "moe_intermediate_size": values.get("intermediate_size")}


def complete(c: DecoderConfig) -> DecoderConfig:
    """What files leave unsaid: the sliding layers, shares that sum to 1, YaRN as it was trained."""
    slides = c.windowed_layers or every(2, c.num_hidden_layers)
    rope = replace(c.rope, truncate=bool(c.rope.truncate))
    return replace(c, windowed_layers=slides, norm_topk_prob=True, rope=rope)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """YaRN is counted in whole pairs only where a file says so."""
    return {"rope.scaling.yarn_truncate": True} if c.rope.truncate else {}


EXPERTS = ("gate_up_proj", "down_proj")


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Experts' matrices with a row per result, gate and up apart, biases in float32."""
    found: Tensors = {}
    for name, t in tensors.items():
        lead, _, role = name.rpartition(".")
        if role in EXPERTS:
            _experts(found, lead, role, t.dtype, t.data.swapaxes(1, 2))
        elif role.endswith("_blocks"):
            scales = tensors[name.removesuffix("_blocks") + "_scales"]
            _experts(found, lead, role.removesuffix("_blocks"), dtypes.MXFP4, packed(t, scales))
        elif role.endswith("_proj_bias"):
            _put(found, lead, role.removesuffix("_bias"), "bias", dtypes.F32, t.float32())
        elif not role.endswith("_scales"):
            found[name] = t
    return found


def _experts(found: Tensors, lead: str, role: str, dtype: dtypes.DType, data: Array) -> None:
    _put(found, lead, role, "weight", dtype, data)


def _put(found: Tensors, lead: str, role: str, last: str, dtype: dtypes.DType, data: Array) -> None:
    """A tensor of experts under its name or, of gate and up in turn, names."""
    halves = {"ffn_gate_exps": data[:, ::2], "ffn_up_exps": data[:, 1::2]}
    for title, part in (halves if role == "gate_up_proj" else {"ffn_down_exps": data}).items():
        name, own = f"{lead}.{title}.{last}", np.ascontiguousarray(part)
        wide = own.shape[-1] // dtype.block_bytes * dtype.block if dtype.is_block else own.shape[-1]
        found[name] = RawTensor(name, dtype, (*own.shape[:-1], wide), own)


def packed(blocks: RawTensor, scales: RawTensor) -> Array:
    """MXFP4 as GGUF has it: a scale, then 16 bytes with element j low and j + 16 high.

    Hugging Face has scales apart, u8 [X, n, B], and neighbours in one byte, u8 [X, n, B, 16].
    """
    raw = blocks.data.view(np.uint8)
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], 32)
    both = codes[..., :16] | (codes[..., 16:] << 4)
    whole = np.concatenate([scales.data.view(np.uint8)[..., None], both], axis=-1)
    return whole.reshape(*raw.shape[:2], -1)


GPT_OSS = Architecture(
    "gpt-oss", blocks.Stack(layer), ("GptOssForCausalLM",), translate=translate,
    complete=complete, keys=keys,
    sanitize=sanitize,
    fixed={**SWIGLU, "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    hf_defaults={
        "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4,
        "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 150000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    layer_names={
        "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks.weight",
        **{f"mlp.experts.{r}{e}": f"{r}{e}" for r in EXPERTS
           for e in ("", "_bias", "_blocks", "_scales")},
    },
)  # fmt: skip
