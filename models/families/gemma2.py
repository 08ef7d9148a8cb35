"""Gemma 2: norms before and behind each half layer, GELU, soft caps, every other layer slides.

Source: Gemma team 2024 (arXiv 2408.00118); transformers `modeling_gemma2`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor, dtypes
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import Architecture, Tensors, changed
from ..config import DecoderConfig, Keys
from ..gguf_config import every
from ..step import Step

WIDE = 46  # layers of the 27B model, whose scores have a scale that GGUF files do not tell
FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "partial_rotary_factor": (1.0,), "use_bidirectional_attention": (False,),
}  # fmt: skip
NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


Half = Callable[[Step, Tensor, int], Tensor]


def layer(s: Step, x: Tensor, i: int, qk_norm: str = "", unit: Half = blocks.geglu) -> Tensor:
    """Layer i: [T, E] -> [T, E]; `qk_norm` as in `blocks.attention`."""
    normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
    mixed = blocks.attention(s, normed, i, qk_norm=qk_norm)
    normed = blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
    return second_half(s, s.asked(x, i) + normed, i, unit)


def second_half(s: Step, h: Tensor, i: int, unit: Half = blocks.geglu) -> Tensor:
    """Layer i's feed-forward between two norms, added to what came in: [T, E] -> [T, E]."""
    made = unit(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i)
    return h + blocks.norm(s, made, f"blk.{i}.post_ffw_norm")


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scale of the scores under its usual name."""
    k = Keys(values, "config.json")
    if not k.has("query_pre_attn_scalar"):
        return values
    scalar = k.real("query_pre_attn_scalar")
    if scalar <= 0:
        raise ModelError(f"config.json: query_pre_attn_scalar = {scalar}: expected more than 0")
    return {**values, "attention_multiplier": scalar**-0.5}


def complete(c: DecoderConfig, wide: int = WIDE, period: int = 2) -> DecoderConfig:
    """What GGUF files leave unsaid: factor of the embedding, scale, sliding layers."""
    slides = c.windowed_layers or every(period, c.num_hidden_layers)
    return replace(
        c,
        embedding_multiplier=math.sqrt(c.hidden_size),
        attention_multiplier=c.attention_multiplier or told_scale(c, wide),
        windowed_layers=slides if c.sliding_window else (),
    )


def told_scale(c: DecoderConfig, wide: int) -> float:
    """The scale of the scores as readers of GGUF files take it."""
    large = c.num_hidden_layers == wide
    return 1 / math.sqrt(c.hidden_size / c.num_attention_heads if large else c.head_dim)


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Norms multiply by 1 + weight; GGUF holds the sum."""
    return {n: grown(t) if n.endswith("norm.weight") else t for n, t in tensors.items()}


def grown(t: RawTensor) -> RawTensor:
    """The norm's weight and 1."""
    wide = t.widened()
    return changed(wide, wide.data + 1)


def store(tensors: Tensors, c: DecoderConfig, part: str = "attn_q", wide: int = WIDE) -> Tensors:
    """Another scale than readers take goes into what makes the queries."""
    factor = c.attention_multiplier / told_scale(c, wide)
    if factor == 1.0:
        return tensors

    def scaled(t: RawTensor) -> RawTensor:
        values = t.float32() * factor
        return RawTensor(t.name, dtypes.F32, values.shape, values)

    ends = f".{part}.weight", f".{part}.bias"
    return {n: scaled(t) if n.endswith(ends) else t for n, t in tensors.items()}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """None; factor and scale are not told."""
    return {"embedding_scale": None, "attention.scale": None}


DEFAULTS = {
    "attention.sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def own_keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Window and caps in any case: left out, others would be meant."""
    told = c.sliding_window or 0, c.attn_logit_softcapping, c.final_logit_softcapping
    return {**keys(c), **dict(zip(DEFAULTS, told, strict=True))}


GEMMA2 = Architecture(
    "gemma2", blocks.Stack(layer), ("Gemma2ForCausalLM",), layer_names=NAMES,
    gguf_defaults=DEFAULTS, fixed=FIXED,
    hf_defaults={
        "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    translate=translate, complete=complete, sanitize=sanitize, store=store, keys=own_keys,
)  # fmt: skip
