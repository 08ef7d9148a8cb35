"""Multi-head latent attention: keys and values grow from one small vector per token.

Legend: T token rows, C visible cache rows, H heads, Q rank of the queries, L rank of the latent
vector, N and R the plain and the rotated features of a query or key head, V those of a value head.

    q = q_b(norm(q_a(x))) or q(x)            [T, H, N+R], of which the last R are rotated
    latent, k_rot = kv_a(x)                  [T, L] and [T, R]; k_rot is rotated, all heads share it
    k_plain, v = kv_b(norm(latent))          [T, H, N] and [T, H, V]
    out = o(attention([q_plain; q_rot], [k_plain; k_rot], v))

The cache holds the grown keys and values, [C, H, N+R] and [C, H, V]: a draft head is one layer, so
that the latent form would save little and cost a product per visible row.
Sources: DeepSeek-V2 (arXiv 2405.04434); transformers `modeling_deepseek_v3`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ggraph import ModelError, Tensor, ops
from ggraph.formats.checkpoint import RawTensor

from . import blocks
from .config import Keys, yarn_magnitude
from .hf_config import scaling_of
from .rotation import rotate
from .step import Step

NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
"""Hugging Face names of the tensors, and those of GGUF."""


@dataclass(frozen=True)
class Latent:
    """Sizes of a latent attention, and the factor of its scores. `q_rank` 0: q comes from x."""

    q_rank: int
    rank: int
    plain: int
    rotated: int
    value: int
    scale: float

    @property
    def key(self) -> int:
        """N + R, the size of a query or key head."""
        return self.plain + self.rotated


def attention(s: Step, x: Tensor, i: int, c: Latent) -> Tensor:
    """Latent self-attention of layer i over the cache: x [T, n] -> [T, E], of the last layer
    [M, E] as `Step.asked` says."""
    h, blk = s.config.num_attention_heads, f"blk.{i}"
    q = _queries(s, s.asked(x, i), i, c)
    seen_k, seen_v = remembered(s, x, i, c)
    mixed = ops.flash_attn(
        q, seen_k, seen_v, blocks.mask_of(s, i), s.length, scale=c.scale, name=f"{blk}.attn"
    )  # [T, H, V]
    flat = mixed.reshape(q.shape[0], h * c.value)
    return blocks.linear(s, flat, f"{blk}.attn_output", s.config.hidden_size)


def remembered(s: Step, x: Tensor, i: int, c: Latent) -> tuple[Tensor, Tensor]:
    """Keys and values of layer i for x [T, n], written to the cache: what is seen."""
    k, v = _keys_and_values(s, x, f"blk.{i}", c)
    return blocks.cached(s, k, f"cache.k.{i}"), blocks.cached(s, v, f"cache.v.{i}")


def _queries(s: Step, x: Tensor, i: int, c: Latent) -> Tensor:
    """[T, H, N+R] of the rows that layer i is asked for, each head's last R features rotated."""
    rows, h, blk = x.shape[0], s.config.num_attention_heads, f"blk.{i}"
    if c.q_rank:
        small = blocks.linear(s, x, f"{blk}.attn_q_a", c.q_rank)
        small = blocks.norm(s, small, f"{blk}.attn_q_a_norm", s.config.latent_norm_eps)
        wide = blocks.linear(s, small, f"{blk}.attn_q_b", h * c.key)
    else:
        wide = blocks.linear(s, x, f"{blk}.attn_q", h * c.key)
    q = wide.reshape(rows, h, c.key)
    plain, turned = ops.columns(q, 0, c.plain), ops.columns(q, c.plain, c.rotated)
    turned = rotate(s, turned, s.config.rope, f"{blk}.q_rope", [s.asked(s.positions, i)])
    return ops.concat([plain, turned], axis=-1)


def _keys_and_values(s: Step, x: Tensor, blk: str, c: Latent) -> tuple[Tensor, Tensor]:
    """[T, H, N+R] and [T, H, V], grown from one latent vector per row."""
    rows, h = x.shape[0], s.config.num_attention_heads
    small = blocks.linear(s, x, f"{blk}.attn_kv_a_mqa", c.rank + c.rotated)
    latent = ops.columns(small, 0, c.rank)
    latent = blocks.norm(s, latent, f"{blk}.attn_kv_a_norm", s.config.latent_norm_eps)
    shared = ops.columns(small, c.rank, c.rotated).reshape(rows, 1, c.rotated)
    shared = rotate(s, shared, s.config.rope, f"{blk}.k_rope")
    grown = blocks.linear(s, latent, f"{blk}.attn_kv_b", h * (c.plain + c.value))
    grown = grown.reshape(rows, h, c.plain + c.value)
    plain, v = ops.columns(grown, 0, c.plain), ops.columns(grown, c.plain, c.value)
    return ops.concat([plain, ops.repeat(shared, (rows, h, c.rotated))], axis=-1), v


def sizes(tensors: Mapping[str, RawTensor], k: Keys, heads: int, where: object) -> Latent | None:
    """The sizes that the tensors of layer 0 tell, None where its attention is not latent.

    ModelError when a tensor is missing, or the config says otherwise.
    """
    if "blk.0.attn_kv_a_mqa.weight" not in tensors:
        return None
    if heads < 1:
        raise ModelError(f"{where}: latent attention with {heads} heads")

    def shape(name: str) -> tuple[int, ...]:
        title = f"blk.0.{name}.weight"
        if title not in tensors:
            raise ModelError(f"{where}: latent attention without {title!r}")
        return tensors[title].shape

    rank = shape("attn_kv_a_norm")[0]
    value = shape("attn_output")[-1] // heads
    found = {
        "q_lora_rank": shape("attn_q_a")[0] if "blk.0.attn_q_a.weight" in tensors else 0,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": shape("attn_kv_b")[0] // heads - value,
        "qk_rope_head_dim": shape("attn_kv_a_mqa")[0] - rank,
        "v_head_dim": value,
    }
    for key, size in found.items():
        if k.has(key) and k.integer(key) != size:
            raise ModelError(f"{where}: {key} = {k.integer(key)}, but the tensors give {size}")
    if min(rank, value, found["qk_nope_head_dim"], found["qk_rope_head_dim"]) < 1:
        raise ModelError(f"{where}: latent attention of sizes {found}")
    scale = scale_of(k, found["qk_nope_head_dim"] + found["qk_rope_head_dim"])
    q_rank, rank, plain, rotated, value = found.values()
    return Latent(q_rank, rank, plain, rotated, value, scale)


def scale_of(k: Keys, width: int) -> float:
    """1 / sqrt(N+R), times YaRN's squared magnitude where `mscale_all_dim` asks for it."""
    scaling = scaling_of(k)
    if not scaling.has("mscale_all_dim"):
        return 1 / math.sqrt(width)
    magnitude = yarn_magnitude(scaling.real("factor"), scaling.real("mscale_all_dim"))
    return magnitude**2 / math.sqrt(width)
