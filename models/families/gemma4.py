"""Gemma 4: Gemma 3's layers with an input of their own for each token, normed values, and layers at
the end that read the keys and values of earlier ones. Full layers have larger heads, perhaps fewer
of keys, which may serve as values, too. Experts may stand beside the feed-forward.

Legend: T rows, E width, L layers, P width of a layer's own input, K key-value heads, D head_dim,
X experts, U experts per token. Source: transformers `modeling_gemma4`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import Graph, ModelError, Tensor, ops

from .. import blocks
from ..architecture import BOTH, Architecture, Tensors, changed, together
from ..config import DecoderConfig, Keys
from ..gguf_config import types_every
from ..hf_config import rope_kind, scaling_of
from ..step import Step
from . import gemma2

KV = "num_key_value_heads"
WIDE, PERIOD = 512, 6  # numbers of a full layer's head and which layers those are, where not told
Seen = dict[int, tuple[Tensor, Tensor]]  # keys and values by the layer that made them


def build(s: Step) -> Graph:
    """The step graph of a Gemma 4 text model."""
    x, seen = blocks.embed(s), Seen()  # [T, E]
    own = layer_inputs(s, x) if s.config.hidden_size_per_layer_input else None
    for i in range(s.config.num_hidden_layers):
        blocks.tap(s, x, i)
        mixed = attention(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i, seen)
        h = s.asked(x, i) + blocks.norm(s, mixed, f"blk.{i}.post_attention_norm")
        x = second_half(s, h, i)
        x = x if own is None else x + fed_own(s, x, own, i)
        if s.has(f"blk.{i}.layer_output_scale.weight"):
            x = ops.mul(x, s.w(f"blk.{i}.layer_output_scale.weight", s.config.hidden_size))
    return blocks.head(s, x)


def second_half(s: Step, h: Tensor, i: int) -> Tensor:
    """Gemma 2's, in which experts may feed forward beside what all rows take: [T, E] -> [T, E]."""
    blk = f"blk.{i}"
    if not s.config.has_experts(i):
        return gemma2.second_half(s, h, i)
    made = blocks.geglu(s, blocks.norm(s, h, f"{blk}.ffn_norm"), i)
    mixed = experts(s, h, blocks.norm(s, h, f"{blk}.pre_ffw_norm_2"), i)
    both = blocks.norm(s, made, f"{blk}.post_ffw_norm_1")
    both += blocks.norm(s, mixed, f"{blk}.post_ffw_norm_2")
    return h + blocks.norm(s, both, f"{blk}.post_ffw_norm")


def experts(s: Step, h: Tensor, x: Tensor, i: int) -> Tensor:
    """Mixture of experts of layer i for x [T, E], chosen by a norm of the stream h with weights of
    its own; what an expert makes has a scale beside its share: [T, E]."""
    c, ffn = s.config, f"blk.{i}.ffn"
    (rows, e), n, f, u = x.shape, c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok
    seen = ops.mul(ops.rms_norm(h, eps=c.rms_norm_eps), s.w(f"{ffn}_gate_inp.scale", e)) * e**-0.5
    chances = ops.soft_max(blocks.product(s, seen, f"{ffn}_gate_inp.weight", n))  # [T, X]
    chosen = ops.top_k(chances, u)  # [T, U]
    share = ops.moe_shares(chances, chosen)
    wide = x.reshape(rows, 1, e)
    gate, up = (blocks.expert(s, wide, chosen, f"{ffn}_{p}_exps", f) for p in ("gate", "up"))
    out = blocks.expert(s, ops.geglu(gate, up), chosen, f"{ffn}_down_exps", e)  # [T, U, E]
    return ops.moe_mix(out, share)


TABLE = "per_layer_token_embd.weight"


def layer_inputs(s: Step, x: Tensor) -> Tensor:
    """What each layer gets of a token beside the stream: [T, L*P]."""
    c, rows = s.config, x.shape[0]
    p, n = c.hidden_size_per_layer_input, c.num_hidden_layers
    told = ops.get_rows(s.w(TABLE, c.vocab_size, n * p), s.tokens) * math.sqrt(p)
    made = blocks.linear(s, x, "per_layer_model_proj", n * p) * c.hidden_size**-0.5
    made = blocks.norm(s, made.reshape(rows, n, p), "per_layer_proj_norm")
    return (made.reshape(rows, n * p) + told) * math.sqrt(0.5)


def fed_own(s: Step, x: Tensor, own: Tensor, i: int) -> Tensor:
    """What layer i makes of its own input, as far as the stream lets it: [T, E]."""
    p, blk = s.config.hidden_size_per_layer_input, f"blk.{i}"
    part = s.asked(ops.columns(own, i * p, p), i)
    opened = ops.geglu(blocks.linear(s, x, f"{blk}.inp_gate", p), part)
    return blocks.norm(s, blocks.linear(s, opened, f"{blk}.proj", x.shape[1]), f"{blk}.post_norm")


def attention(s: Step, x: Tensor, i: int, seen: Seen) -> Tensor:
    """Self-attention of layer i over its own cache, or over that of an earlier layer: [T, E]."""
    c = s.config
    q = blocks.heads(s, s.asked(x, i), i, "q", c.num_attention_heads, "head")
    q = blocks.turned(s, q, i, "q")
    source = made_by(c, i)
    if source == i:
        k, v = keys_and_values(s, x, i)
        seen[i] = blocks.cached(s, k, f"cache.k.{i}"), blocks.cached(s, v, f"cache.v.{i}")
    mixed = blocks.attend(s, q, seen[source], blocks.mask_of(s, i), i)
    return blocks.linear(s, mixed, f"blk.{i}.attn_output", c.hidden_size)


def keys_and_values(s: Step, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """What layer i remembers of x [T, E]: [T, K, D] each. Keys that serve as values do so as they
    were before norm and rotation."""
    c, kv = s.config, s.config.kv_heads_of(i)
    made = blocks.heads(s, x, i, "k", kv)
    k = blocks.turned(s, blocks.norm(s, made, f"blk.{i}.attn_k_norm"), i, "k")
    values = made if keys_serve(s, i) else blocks.heads(s, x, i, "v", kv)
    return k, ops.rms_norm(values, eps=c.rms_norm_eps)


def keys_serve(s: Step, i: int) -> bool:
    """Whether layer i takes its keys for values: where that may be, if no full layer has values."""
    c = s.config
    full = [j for j in range(c.num_hidden_layers) if not c.slides(j)]
    have = any(s.has(f"blk.{j}.attn_v.weight") for j in full)
    return c.attention_k_eq_v and i in full and not have


def made_by(c: DecoderConfig, i: int) -> int:
    """The layer whose keys and values layer i reads: itself, or the last one of its kind that has
    some. ModelError where there is none."""
    own = c.num_hidden_layers - c.num_kv_shared_layers
    if i < own:
        return i
    alike = [j for j in range(own) if c.slides(j) == c.slides(i)]
    if not alike:
        raise ModelError(
            f"{c.architecture}: layer {i} shares keys and values, but none before {own} has any"
        )
    return alike[-1]


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sizes of both kinds of layers under usual names. ModelError for what is not known here."""
    k = Keys(values, "config.json")
    rope, share = scaling_of(k), "partial_rotary_factor"
    if rope_kind(rope) != "proportional" and rope.real(share, 1.0) != 1:
        raise ModelError(f"gemma4: config.json: {share} of a rope of type {rope_kind(rope):.60}")
    each = k.mapping("per_layer_config")
    told = [v for v in each.values() if isinstance(v, Mapping)]
    if any(set(v) - {"head_dim", KV} for v in told):
        raise ModelError(f"gemma4: per_layer_config {each!r:.80}: only head_dim and {KV} are known")
    small, few = values.get("head_dim"), values.get(KV)
    wide = next((v.get("head_dim", small) for v in told), small)
    if not k.has("per_layer_config"):
        wide = values.get("global_head_dim") or WIDE
    older = values.get("num_global_key_value_heads") if k.flag("attention_k_eq_v") else None
    full = next((v.get(KV) for v in told), older)
    found = {**values, "head_dim": wide, "window_head_dim": small, **mixture(k), **kinds(k)}
    return found if full in (None, few) else {**found, KV: full, "window_kv_heads": few}


def kinds(k: Keys) -> Mapping[str, Any]:
    """Which layers slide: as listed, or all but every so-manieth; the last never does."""
    listed = k.get("layer_types")
    if not listed:
        listed = types_every(PERIOD, k.integer("num_hidden_layers"))
    return {"layer_types": [*listed[:-1], "full_attention"] if isinstance(listed, list) else listed}


def mixture(k: Keys) -> Mapping[str, Any]:
    """The experts under usual names: none, whatever is told of them, where they are not enabled."""
    if not k.flag("enable_moe_block"):
        return {"num_experts": None, "moe_intermediate_size": None}
    told = {key: k.integer(key) for key in ("num_experts", "moe_intermediate_size")}
    return {**told, "num_experts_per_tok": k.integer("top_k_experts"), "norm_topk_prob": True}


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """No values of layers whose keys serve: files may have some that nobody reads."""
    served = [i for i in range(c.num_hidden_layers) if c.attention_k_eq_v and not c.slides(i)]
    unread = tuple(f"blk.{i}.attn_v." for i in served)
    return {n: t for n, t in tensors.items() if not n.startswith(unread)}


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """That keys may serve as values: a file does not say it, but lacks the latter."""
    return {"attention_k_eq_v": True}


def complete(c: DecoderConfig) -> DecoderConfig:
    """What no file says: the embedding's factor, scores as they are."""
    return replace(c, embedding_multiplier=math.sqrt(c.hidden_size), attention_multiplier=1.0)


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """A layer's factor for each number of a row; what makes keys and values only where they are
    made: files may have it for layers that read those of others."""
    ends = "layer_output_scale.weight"
    sharing = range(c.num_hidden_layers - c.num_kv_shared_layers, c.num_hidden_layers)
    unread = tuple(f"blk.{i}.attn_{role}" for i in sharing for role in ("k.", "v.", "k_norm."))
    found: Tensors = {}
    for n, t in tensors.items():
        if n.endswith(ends):
            found[n] = changed(t.widened(), np.full(c.hidden_size, t.float32()[0], np.float32))
        elif not n.startswith(unread):
            found[n] = t
    return found


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """One number again, and experts' two parts in one, as llama.cpp's files have them."""
    ends = "layer_output_scale.weight"
    found = {n: changed(t, t.data[:1]) if n.endswith(ends) else t for n, t in tensors.items()}
    for first in [n for n in found if n.endswith("_gate_exps.weight")]:
        lead = first.removesuffix("_gate_exps.weight")
        other, both = f"{lead}_up_exps.weight", f"{lead}_{BOTH}"
        gate, up = tensors[first], tensors.get(other)
        alike = up is not None and (gate.dtype, gate.shape) == (up.dtype, up.shape)
        if up is not None and alike and gate.scale is None:  # none of llama.cpp's is for both
            found[both] = together(both, (gate, up), axis=1)
            del found[first], found[other]
    return found


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Which layers slide, in any case; widths where they differ."""
    own, f = c.num_hidden_layers - c.num_kv_shared_layers, c.intermediate_size
    wide = [f if i < own else 2 * f for i in range(c.num_hidden_layers)]
    small = c.window_head_dim or c.head_dim
    return {
        **gemma2.keys(c),
        "attention.sliding_window_pattern": np.array(c.windowed_layers, np.bool_),
        "attention.key_length_swa": small,
        "attention.value_length_swa": small,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
        **({"feed_forward_length": wide} if c.use_double_wide_mlp else {}),
    }


OWN_INPUT = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
NAMES = {
    **gemma2.NAMES, **OWN_INPUT, "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
TOPS = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
GEMMA4 = Architecture(
    "gemma4", build, ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), layer_names=NAMES,
    top_names={f"model.{a}.weight": f"{b}.weight" for a, b in TOPS.items()},
    translate=translate, complete=complete, sanitize=sanitize, load=load, store=store, keys=keys,
    read=read,
    fixed={
        "hidden_activation": gemma2.FIXED["hidden_activation"],
        "use_bidirectional_attention": (False, "vision"),
    },
    hf_defaults={
        "head_dim": 256, KV: 4, "max_position_embeddings": 131072, "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
        },
    },
)  # fmt: skip
