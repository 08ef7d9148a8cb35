"""GPT-2: learned positions, layer norms with biases, a plain feed-forward with GELU, in its tanh
form or as defined.

Source: Radford et al. 2019; transformers `modeling_gpt2`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError, Tensor, dtypes, ops
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import FUSED, Architecture, Tensors, changed
from ..config import DecoderConfig, Keys, layer_range
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    mixed = blocks.attention(s, blocks.layer_norm(s, x, f"blk.{i}.attn_norm"), i)
    h = s.asked(x, i) + mixed
    return h + feed_forward(s, blocks.layer_norm(s, h, f"blk.{i}.ffn_norm"), i)


def feed_forward(s: Step, x: Tensor, i: int) -> Tensor:
    """down(gelu(up x)), [T, E] -> [T, E]."""
    up = blocks.linear(s, x, f"blk.{i}.ffn_up", s.config.intermediate_size)
    hidden = ops.gelu_erf(up) if s.config.exact_gelu else ops.gelu(up)
    return blocks.linear(s, hidden, f"blk.{i}.ffn_down", s.config.hidden_size)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """GPT-2's own keys under their usual names."""
    wide, heads = values.get("n_embd"), values.get("n_head")
    return {
        "hidden_size": wide, "intermediate_size": values.get("n_inner") or 4 * (wide or 0),
        "num_hidden_layers": values.get("n_layer"), "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": values.get("vocab_size"),
        "max_position_embeddings": values.get("n_positions"),
        "layer_norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "exact_gelu": values.get("activation_function") in EXACT,
        "multipliers": query_factors(Keys(values, "config.json")),
    }  # fmt: skip


def query_factors(k: Keys) -> list[float]:
    """What multiplies the queries of each layer, whose scores are always divided by sqrt(head_dim):
    none, or its inverse where they should not be, or the inverse of the layer's number from 1."""
    whole, by_layer = k.flag("scale_attn_weights", True), k.flag("scale_attn_by_inverse_layer_idx")
    if whole and not by_layer:
        return []
    width = max(k.integer("n_embd") // max(k.integer("n_head"), 1), 1)
    layers, grown = layer_range(k.integer("n_layer")), 1.0 if whole else math.sqrt(width)
    return [grown / (i + 1 if by_layer else 1) for i in layers]


def complete(c: DecoderConfig) -> DecoderConfig:
    """Nothing rotates."""
    return replace(c, rotated_layers=(False,) * c.num_hidden_layers)


EXACT = "gelu", "gelu_python"
TANH = "gelu_new", "gelu_pytorch_tanh", "gelu_fast"
QKV = re.compile(r"blk\.(\d+)\.attn_qkv\.(?:weight|bias)")
TURNED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Matrices are stored the other way round; queries with what their layer multiplies them by."""
    found = {n: changed(t, t.data.T) if n.endswith(TURNED) else t for n, t in tensors.items()}
    for name, t in found.items():
        match = QKV.fullmatch(name)
        factor = c.multipliers[int(match[1])] if match and int(match[1]) < len(c.multipliers) else 1
        if factor != 1:
            found[name] = _queries_by(factor, t, c.hidden_size)
    return found


def _queries_by(factor: float, t: RawTensor, rows: int) -> RawTensor:
    """The first rows times the factor, in float32: halves would be rounded."""
    values = t.float32()
    values[:rows] *= np.float32(factor)
    return RawTensor(t.name, dtypes.F32, t.shape, values)


def keys(c: DecoderConfig) -> dict[str, Any]:
    """The epsilon under the name that layer norms have. ModelError for a unit that no GGUF file can
    tell: llama.cpp takes the tanh form."""
    if c.exact_gelu:
        raise ModelError("gpt2: GGUF cannot say that GELU is exact")
    return {"attention.layer_norm_epsilon": float(c.rms_norm_eps)}


TOPS = {
    "wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight", "ln_f.bias": "output_norm.bias",
}  # fmt: skip
GPT2 = Architecture(
    "gpt2",
    blocks.Stack(layer, blocks.layer_norm, blocks.placed_by_table),
    ("GPT2LMHeadModel",),
    layer_prefix=r"(?:transformer\.)?h\.",
    layer_names={
        "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    },
    top_names={lead + a: b for a, b in TOPS.items() for lead in ("", "transformer.")},
    fused=FUSED,
    translate=translate, complete=complete, sanitize=sanitize, keys=keys,
    fixed={
        "activation_function": (*TANH, *EXACT), "add_cross_attention": (False,),
    },
    hf_defaults={
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    },
)  # fmt: skip
