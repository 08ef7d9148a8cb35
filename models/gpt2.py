"""GPT-2: learned positions, layer norms with biases, a plain feed-forward with GELU.

Source: Radford et al. 2019; transformers `modeling_gpt2`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Graph, Tensor, ops

from . import blocks
from .architecture import Architecture, Tensors, changed
from .blocks import Step
from .config import DecoderConfig


def build(s: Step) -> Graph:
    """The step graph of a GPT-2 checkpoint."""
    c = s.config
    table = s.w("position_embd.weight", c.max_position_embeddings, c.hidden_size)
    x = blocks.embed(s) + ops.get_rows(table, s.positions, name="position")  # [T, E]
    for i in range(c.num_hidden_layers):
        blocks.tap(s, x, i)
        mixed = blocks.attention(s, blocks.layer_norm(s, x, f"blk.{i}.attn_norm"), i)
        h = s.asked(x, i) + mixed
        x = h + _feed_forward(s, blocks.layer_norm(s, h, f"blk.{i}.ffn_norm"), i)
    return blocks.head(s, x, blocks.layer_norm)


def _feed_forward(s: Step, x: Tensor, i: int) -> Tensor:
    """down(gelu(up x)), [T, E] -> [T, E]."""
    up = blocks.linear(s, x, f"blk.{i}.ffn_up", s.config.intermediate_size)
    return blocks.linear(s, ops.gelu(up), f"blk.{i}.ffn_down", s.config.hidden_size)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """GPT-2's own keys under their usual names."""
    wide, heads = values.get("n_embd"), values.get("n_head")
    return {
        "hidden_size": wide, "intermediate_size": values.get("n_inner") or 4 * (wide or 0),
        "num_hidden_layers": values.get("n_layer"), "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": values.get("vocab_size"),
        "max_position_embeddings": values.get("n_positions"),
        "rms_norm_eps": values.get("layer_norm_epsilon", 1e-5),
    }  # fmt: skip


def complete(c: DecoderConfig) -> DecoderConfig:
    """Nothing rotates."""
    return replace(c, rotated_layers=(False,) * c.num_hidden_layers)


TURNED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Matrices are stored the other way round."""
    return {n: changed(t, t.data.T) if n.endswith(TURNED) else t for n, t in tensors.items()}


def keys(c: DecoderConfig) -> dict[str, Any]:
    """The epsilon under the name that layer norms have."""
    return {"attention.layer_norm_epsilon": float(c.rms_norm_eps)}


TOPS = {
    "wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight", "ln_f.bias": "output_norm.bias",
}  # fmt: skip
GPT2 = Architecture(
    "gpt2",
    build,
    ("GPT2LMHeadModel",),
    layer_prefix=r"(?:transformer\.)?h\.",
    layer_names={
        "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    },
    top_names={lead + a: b for a, b in TOPS.items() for lead in ("", "transformer.")},
    fused={"attn_qkv": ("attn_q", "attn_k", "attn_v")},
    translate=translate, complete=complete, sanitize=sanitize, keys=keys,
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)  # fmt: skip
