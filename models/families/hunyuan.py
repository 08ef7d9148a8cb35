"""Hunyuan's dense models: Llama with an RMS norm on each head of q and k behind the rotation.

Source: Tencent 2025, the Hunyuan-7B release; transformers `modeling_hunyuan_v1_dense`.
"""

from collections.abc import Mapping
from typing import Any

from ggraph import Graph, ModelError, Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..blocks import Step
from ..config import MOST_TURNS, Keys
from ..hf_config import rope_kind, scaling_of


def build(s: Step) -> Graph:
    """The step graph of a dense Hunyuan checkpoint."""
    return blocks.stacked(s, layer)


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
    "hunyuan-dense", build, ("HunYuanDenseV1ForCausalLM",), translate=translate, fixed=SWIGLU,
    layer_names={
        "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    },
    hf_defaults={"rms_norm_eps": 1e-5},
)  # fmt: skip
