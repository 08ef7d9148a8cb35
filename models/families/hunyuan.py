"""Hunyuan: Llama with an RMS norm on each head of q and k behind the rotation; A13B with experts
beside a feed-forward that every row takes.

Sources: Tencent 2025, the Hunyuan-7B and A13B releases; transformers `modeling_hunyuan_v1_dense`,
`modeling_hunyuan_v1_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import MOST_TURNS, DecoderConfig, Keys
from ..hf_config import rope_kind, scaling_of
from ..step import Step

WIDTH = "moe_intermediate_size"
UNUSED = (
    "q_lora_rank", "kv_lora_rank", "v_head_dim", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    mixed = attention(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i)
    return blocks.fed_forward(s, s.asked(x, i) + mixed, i)


def attention(s: Step, x: Tensor, i: int) -> Tensor:
    """Self-attention of layer i over the cache, as `blocks.attention`: [T, E] -> [T, E]."""
    c = s.config
    q = _turned(s, s.asked(x, i), i, "q", c.num_attention_heads)
    k = _turned(s, x, i, "k", c.num_key_value_heads)
    v = blocks.heads(s, x, i, "v", c.num_key_value_heads)
    seen = blocks.cached(s, k, f"cache.k.{i}"), blocks.cached(s, v, f"cache.v.{i}")
    mixed = blocks.attend(s, q, seen, blocks.mask_of(s, i), i)
    return blocks.linear(s, mixed, f"blk.{i}.attn_output", c.hidden_size)


def _turned(s: Step, x: Tensor, i: int, role: str, count: int) -> Tensor:
    """Heads of q or k, rotated and then normalised: [T, count, D]."""
    heads = blocks.turned(s, blocks.heads(s, x, i, role, count), i, role)
    return blocks.norm(s, heads, f"blk.{i}.attn_{role}_norm")


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base that `alpha` stretches, once for all lengths, where it is told: else such a rope is
    like other families'. Released ones tell of one expert, and mean none."""
    k = Keys(values, "config.json")
    rope, dense = scaling_of(k), {**values, "num_experts": None}
    alpha = rope.real("alpha", 0.0)
    if rope_kind(rope) != "dynamic" or not alpha:
        return dense
    base = rope.real("rope_theta", k.real("rope_theta", 10000.0))
    heads = max(k.integer("num_attention_heads"), 1)
    width = k.integer("head_dim", k.integer("hidden_size") // heads)
    if not 0 < alpha <= MOST_TURNS or width < 3:
        raise ModelError(f"config.json: dynamic rope with alpha = {alpha}, heads of {width}")
    stretched = base * alpha ** (width / (width - 2))
    return {**dense, "rope_parameters": {"rope_type": "default", "rope_theta": stretched}}


HUNYUAN = Architecture(
    "hunyuan-dense", blocks.Stack(layer), ("HunYuanDenseV1ForCausalLM",), translate=translate,
    fixed=SWIGLU,
    layer_names={
        "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    },
    hf_defaults={"rms_norm_eps": 1e-5},
)  # fmt: skip


def mixed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As of the dense ones; a number told of each layer is one for all. Released configs tell of
    latents, groups and scales, too, that the class has not."""
    k = Keys(values, "config.json")
    wide = k.integer("intermediate_size")
    each = {key: _one(k, key, default) for key, default in (("moe_topk", None), (WIDTH, wide))}
    if each[WIDTH] != wide or _one(k, "num_shared_expert", 1) != 1:
        raise ModelError(f"hunyuan-moe: {WIDTH} {each[WIDTH]}: known: one shared, all of {wide}")
    return {
        **translate(values), **dict.fromkeys(UNUSED), "num_experts": k.integer("num_experts"),
        "num_experts_per_tok": each["moe_topk"], WIDTH: wide,
        "shared_expert_intermediate_size": wide,
    }  # fmt: skip


def _one(k: Keys, key: str, default: int | None) -> int:
    """A number, perhaps told of each layer. ModelError where layers differ."""
    told = k.get(key)
    if not isinstance(told, list):
        return k.integer(key, default)
    if len(set(map(repr, told))) != 1:
        raise ModelError(f"config.json: {key} {told!r:.60}: expected one number for all layers")
    return Keys({key: told[0]}, "config.json").integer(key)


def summing(c: DecoderConfig) -> DecoderConfig:
    """Shares of experts sum to 1; what every row takes is as wide, where a file does not say."""
    shared = c.shared_intermediate_size or c.intermediate_size
    return replace(c, norm_topk_prob=True, shared_intermediate_size=shared)


HUNYUAN_MOE = replace(
    HUNYUAN, name="hunyuan-moe", hf=("HunYuanMoEV1ForCausalLM",), translate=mixed,
    complete=summing,
    fixed={
        **SWIGLU, "attention_bias": (False,), "mlp_bias": (False,), "use_qk_norm": (True,),
        "use_cla": (False,), "use_mla": (False,), "use_mixed_mlp_moe": (True,),
        "moe_layer_num_skipped": (0,),
    },
    layer_names={
        **HUNYUAN.layer_names, "mlp.gate.wg": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    },
    hf_defaults={
        "rms_norm_eps": 1e-5, "moe_topk": 1, "num_experts": 1, "intermediate_size": 11008,
    },
)  # fmt: skip
