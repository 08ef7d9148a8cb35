"""Apertus: Llama with an RMS norm on each head of q and k, and xIELU in place of the gate, whose
four numbers each layer has of its own. Folders hold them as tensors, GGUF files as keys.

Sources: Swiss AI 2025 (arXiv 2509.14233); Huang 2024 (arXiv 2411.13010), for xIELU; transformers
`modeling_apertus`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError, Tensor, ops
from ggraph.errors import shown

from .. import blocks
from ..architecture import Architecture, Tensors
from ..config import LARGEST, DecoderConfig, Keys
from ..hf_config import without_window
from ..step import Step

NUMBERS = ("alpha_n", "alpha_p", "beta", "eps")
ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    c = s.config
    h = blocks.attended(s, x, i, qk_norm="head")
    normed = blocks.norm(s, h, f"blk.{i}.ffn_norm")
    up = blocks.linear(s, normed, f"blk.{i}.ffn_up", c.intermediate_size)
    hidden = xielu(up, *c.multipliers[i :: c.num_hidden_layers])
    return h + blocks.linear(s, hidden, f"blk.{i}.ffn_down", c.hidden_size)


def xielu(x: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """beta x + p x^2 where x > 0, else beta x + n (expm1(min(x, eps)) - x), of the same shape; p is
    softplus(alpha_p), n is beta + softplus(alpha_n)."""
    p, n = np.logaddexp(0.0, alpha_p), beta + np.logaddexp(0.0, alpha_n)
    bent = ops.expm1(ops.clamp(x, -LARGEST, eps)) - x
    below = bent * (1.0 - ops.step(x))
    return x * beta + ops.sqr(ops.relu(x)) * float(p) + below * float(n)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope of its class, where none is told."""
    told = values.get("rope_parameters") or values.get("rope_scaling")
    return without_window(values if told else {**values, "rope_parameters": ROPE})


def learn(tensors: Tensors, c: DecoderConfig) -> DecoderConfig:
    """The four numbers of each layer, all of one kind behind one another."""
    layers = range(c.num_hidden_layers)
    found = [tensors.get(f"blk.{i}.{number}") for number in NUMBERS for i in layers]
    told = [math.nan if t is None else float(t.float32().reshape(-1)[0]) for t in found]
    return replace(c, multipliers=finite(told))


def finite(numbers: list[float]) -> tuple[float, ...]:
    """The same. ModelError where one is missing, or no finite number."""
    if not all(map(math.isfinite, numbers)):
        raise ModelError(f"apertus: {', '.join(NUMBERS)} of xIELU: {shown(numbers)}")
    return tuple(numbers)


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The other tensors."""
    return {n: t for n, t in tensors.items() if not n.endswith(NUMBERS)}


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """The same numbers of a GGUF file, each told of every layer, or once for all."""
    found: list[float] = []
    for number in NUMBERS:
        told = [float(v) for v in np.ravel(k.get(f"xielu.{number}", math.nan))]
        if len(told) not in (1, layers):
            raise ModelError(f"GGUF metadata: xielu.{number} of {len(told)} layers: has {layers}")
        found += told * layers if len(told) == 1 else told
    return {"multipliers": finite(found)}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """The other way."""
    each = np.array(c.multipliers, np.float32).reshape(4, -1)
    return {f"xielu.{number}": row for number, row in zip(NUMBERS, each, strict=True)}


APERTUS = Architecture(
    "apertus", blocks.Stack(layer), ("ApertusForCausalLM",), translate=translate, learn=learn,
    sanitize=sanitize, read=read, keys=keys, bare=tuple(f"xielu.{number}" for number in NUMBERS),
    layer_names={
        "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm",
        **{f"mlp.act_fn.{number}": number for number in NUMBERS},
    },
    fixed={"hidden_act": ("xielu",), "attention_bias": (False,), "partial_rotary_factor": (1.0,)},
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6, "max_position_embeddings": 65536},
)  # fmt: skip
