"""Qwen3.5: gated delta nets in three of four layers, gated attention in the fourth; with experts
and one feed-forward for every row, or without.

Legend: T rows, H heads of values, G of keys, D numbers per head of either.
Sources: Yang et al. 2024 (arXiv 2412.06464); transformers `modeling_qwen3_5`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import Array, ModelError, Tensor, ops
from ggraph.formats.lazy_array import columns_taken, row_numbers, taken

from .. import blocks
from ..architecture import SWIGLU, Architecture, Tensors, changed, plain
from ..config import DecoderConfig, Keys
from ..gguf_config import every, types_every
from ..recurrent import convolved, delta_net
from ..step import Step
from . import gemma2, qwen2, qwen3
from .lfm2 import kernel

SECTIONS = (11, 11, 10)  # of the released models, where the config does not say
PERIOD = 4  # of layers with attention, where a file does not say


def layer(s: Step, x: Tensor, i: int, together: bool = False) -> Tensor:
    """Layer i: [T, E] -> [T, E]. `together` as in `linear_attention`."""
    normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
    if s.config.remembers(i):
        mixed = linear_attention(s, normed, i, together)
    else:
        mixed = attention(s, normed, i)
    h = s.asked(x, i) + mixed
    normed = blocks.norm(s, h, f"blk.{i}.post_attention_norm")
    return h + blocks.feed_forward(s, normed, i, opens=True)


def attention(s: Step, x: Tensor, i: int) -> Tensor:
    """Self-attention whose result passes a gate, which stands beside each head of q: [T, E]."""
    c, blk, asking = s.config, f"blk.{i}", s.asked(x, i)
    rows, h, d = asking.shape[0], c.num_attention_heads, c.head_dim
    both = blocks.linear(s, asking, f"{blk}.attn_q", h * d * 2).reshape(rows, h, 2 * d)
    q, gate = (ops.columns(both, j * d, d) for j in range(2))  # [T, H, D]
    q = blocks.turned(s, blocks.norm(s, q, f"{blk}.attn_q_norm"), i, "q")
    seen = blocks.remembered(s, x, i, qk_norm="head")
    mixed = blocks.attend(s, q, seen, blocks.mask_of(s, i), i)
    opened = mixed.reshape(rows, h, d) * ops.sigmoid(gate)
    return blocks.linear(s, opened.reshape(rows, h * d), f"{blk}.attn_output", c.hidden_size)


def linear_attention(s: Step, x: Tensor, i: int, together: bool) -> Tensor:
    """A gated delta net over convolved q, k and v: [T, E] -> [T, E].

    Heads of values have those of keys in turn, or, `together`, those of one follow one another.
    """
    c, blk, rows = s.config, f"blk.{i}", x.shape[0]
    g, h, d = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim
    width = (2 * g + h) * d
    mixed = blocks.linear(s, x, f"{blk}.attn_qkv", width)
    w = s.w(f"{blk}.ssm_conv1d.weight", c.linear_conv_kernel_dim, width)
    mixed = ops.silu(convolved(s, mixed, i, w))
    q, k = (_unit(ops.columns(mixed, j * g * d, g * d), g, d) for j in range(2))
    if together:
        q, k = (_each(t, h // g) for t in (q, k))
    v = ops.columns(mixed, 2 * g * d, h * d)
    beta = ops.sigmoid(blocks.linear(s, x, f"{blk}.ssm_beta", h))
    alpha = ops.add(blocks.linear(s, x, f"{blk}.ssm_alpha", h), s.w(f"{blk}.ssm_dt.bias", h))
    gate = ops.mul(ops.softplus(alpha), s.w(f"{blk}.ssm_a", h))  # [T, H], below 0
    row = ops.concat([k.reshape(rows, -1), v, gate, beta], axis=-1)
    found = delta_net(s, i, q * (1 / math.sqrt(d)), row, h, d)  # [T, H, D]
    z = blocks.linear(s, s.asked(x, i), f"{blk}.attn_gate", h * d)
    normed = blocks.norm(s, found, f"{blk}.ssm_norm").reshape(rows, h * d)
    normed = s.asked(normed, i)
    return blocks.linear(s, ops.swiglu(z, normed), f"{blk}.ssm_out", c.hidden_size)


def _unit(x: Tensor, g: int, d: int) -> Tensor:
    """x [T, G*D] as heads of length 1: [T, G, D]."""
    heads = x.reshape(x.shape[0], g, d)
    return ops.rms_norm(heads, eps=1e-6 / d) * (1 / math.sqrt(d))


def _each(x: Tensor, times: int) -> Tensor:
    """Every head of x [T, G, D] so many times: [T, G * times, D]."""
    rows, g, d = x.shape
    return ops.repeat(x.reshape(rows, g, 1, d), (rows, g, times, d)).reshape(rows, g * times, d)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers have attention, where the config lists none: every so-manieth. ModelError for
    values of another width than keys."""
    k, key, value = Keys(values, "config.json"), "linear_key_head_dim", "linear_value_head_dim"
    if k.has(value) and k.has(key) and k.integer(value) != k.integer(key):
        raise ModelError(
            f"config.json: {value} = {k.integer(value)}: expected {key}, {k.integer(key)}"
        )
    if values.get("layer_types"):
        return values
    period = k.integer("full_attention_interval", PERIOD)
    return {
        **values, "layer_types": types_every(period, k.integer("num_hidden_layers"), "linear"),
    }  # fmt: skip


def complete(c: DecoderConfig) -> DecoderConfig:
    """Shares of experts always sum to 1, and values are as wide as keys; lines and columns of
    images take pairs in turn."""
    inner = c.linear_num_value_heads * c.linear_key_head_dim
    c = qwen3.turning(c, SECTIONS)
    return replace(c, norm_topk_prob=True, linear_inner_size=inner)


def own_values(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Norms grown by 1, and decays as what multiplies."""
    found: Tensors = {}
    for name, t in tensors.items():
        if name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight"):
            t = gemma2.grown(t)
        decays = name.endswith(".ssm_a")
        found[name] = changed(t.widened(), -np.exp(t.float32())) if decays else t
    return found


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Heads of values in turn by their key head, where Hugging Face has those of one key head
    together."""
    d = c.linear_key_head_dim
    found = own_values(tensors, c)
    for name, t in found.items():
        role = name.rpartition(".")[0].rpartition(".")[2] if name.startswith("blk.") else ""
        role = "ssm_a" if name.endswith(".ssm_a") else role
        if role in ("attn_qkv", "ssm_conv1d"):
            at = 2 * c.linear_num_key_heads * d
            rows = row_numbers(t.storage)
            moved = np.concatenate([rows[:at], _in_turn(rows[at:], c, d)])
            t = changed(t, taken(t.storage, moved))
        elif role in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a"):
            size = d if role == "attn_gate" else 1
            t = changed(t, taken(t.storage, _in_turn(row_numbers(t.storage), c, size)))
        elif role == "ssm_out":
            t = plain(t) if d % t.dtype.block else t  # else heads are whole blocks
            wide = t.dtype.row_bytes(d) if t.dtype.is_block else d
            columns = _in_turn(np.arange(t.storage.shape[-1]), c, wide)
            t = changed(t, columns_taken(t.storage, columns))
        found[name] = t
    return found


def _in_turn(x: Array, c: DecoderConfig, size: int) -> Array:
    """Rows [G, H/G, size, ..] as [H/G, G, size, ..]."""
    g = c.linear_num_key_heads
    return x.reshape(g, -1, size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Convolutions as rows of channels, and back."""
    ends = ".ssm_conv1d.weight"
    found = {n: kernel(t) if n.endswith(ends) else t for n, t in tensors.items()}
    lone = [n for n in found if n.endswith("ffn_gate_inp_shexp.weight")]  # a vector in GGUF files
    for n in lone:
        found[n] = changed(found[n], found[n].data.reshape(1, -1))
    return found


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The other way."""
    found = load(tensors, c)
    for n in [n for n in found if n.endswith("ffn_gate_inp_shexp.weight")]:
        found[n] = changed(found[n], found[n].data.reshape(-1))
    return found


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """The layers, and how images would be rotated.

    The period of full layers is told to readers that do not know the list, where there is one.
    """
    layers = c.num_hidden_layers
    recurrent = c.recurrent_layers or (False,) * layers
    periods = (n for n in range(1, layers + 2) if every(n, layers) == recurrent)
    return {
        "attention.recurrent_layers": np.array(
            recurrent + (False,) * c.num_nextn_predict_layers, np.bool_
        ),
        "full_attention_interval": next(periods, None),
        **qwen2.sections_of(c),
    }


SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
}
NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", **SHARED_EXPERT,
}  # fmt: skip
QWEN35 = Architecture(
    "qwen35", blocks.Stack(layer), ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    layer_names=NAMES,
    complete=complete, sanitize=sanitize, load=load, store=store, keys=keys, layer=layer,
    fixed={"hidden_act": SWIGLU["hidden_act"]}, translate=translate,
    hf_defaults={
        "partial_rotary_factor": 0.25, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    },
)  # fmt: skip
QWEN35_MOE = replace(
    QWEN35, name="qwen35moe", hf=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    hf_defaults={**QWEN35.hf_defaults, "num_experts_per_tok": 8, "num_key_value_heads": 2},
)  # fmt: skip
