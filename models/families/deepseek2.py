"""DeepSeek-V2 and V3 (also R1, Moonlight, Kimi K2) and GLM-4.7-Flash: latent attention, experts,
perhaps by groups, and one feed-forward for every row. The first's experts are chosen by their
chances, the others' by sigmoids; GGUF files of all have one name.

Sources: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437); transformers
`modeling_deepseek_v2`, `modeling_deepseek_v3`, `modeling_glm4_moe_lite`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError, Tensor, dtypes
from ggraph.formats.checkpoint import RawTensor

from .. import blocks, latent
from ..architecture import (
    SHARED_NAMES,
    SWIGLU,
    Architecture,
    Tensors,
    changed,
    pairing_neighbours,
    plain,
)
from ..config import SIGMOID, SOFT_MAX, DecoderConfig, Keys, yarn_magnitude
from ..gguf_config import rope_from_gguf
from ..hf_config import without_window
from ..latent import Latent
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    c = s.config
    mixed = latent.attention(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i, sizes_of(c))
    return blocks.fed_forward(s, s.asked(x, i) + mixed, i)


EPSILON = 1e-6  # of latent norms in folders
DENSE = "first_k_dense_replace"  # so many layers at the start
GLM_TOKENS = 154880  # of GLM-4.7-Flash, whose older files do not tell of its sigmoids
BY_GROUPS = "group_limited_greedy"
YARN_LOG = "rope.scaling.yarn_log_multiplier"  # a tenth of what config.json has as mscale_all_dim


def sizes_of(c: DecoderConfig) -> Latent:
    """The sizes of the latent attention; `head_dim` is that of a query, plain part and rotated."""
    rotated = c.rope.n_rot
    if min(c.kv_lora_rank, c.v_head_dim, c.head_dim - rotated) < 1:
        raise ModelError(
            f"{c.architecture}: latent attention of rank {c.kv_lora_rank}, heads of {c.head_dim} "
            f"({rotated} rotated), values of {c.v_head_dim}"
        )
    scale = c.attention_multiplier or c.head_dim**-0.5
    plain = c.head_dim - rotated
    return Latent(c.q_lora_rank, c.kv_lora_rank, plain, rotated, c.v_head_dim, scale)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sizes under their usual names, and the epsilon of the latent norms, which transformers' class
    takes from no key. llama.cpp gives them the other norms', as GGUF files are read."""
    k = Keys(values, "config.json")
    rotated, plain = k.integer("qk_rope_head_dim"), k.integer("qk_nope_head_dim")
    width = max(rotated + plain, 1)
    told = k.mapping("rope_parameters") or k.mapping("rope_scaling")
    rope = {**told, "partial_rotary_factor": rotated / width}
    return {
        **without_window(values), DENSE: dense_layers(k),
        "head_dim": width, "rope_parameters": rope,
        "num_key_value_heads": values.get("num_attention_heads"), "expert_gating_func": SIGMOID,
        "attention_multiplier": latent.scale_of(k, width), "latent_norm_eps": EPSILON,
        "shared_expert_intermediate_size":
            k.integer("n_shared_experts", 1) * k.integer("moe_intermediate_size"),
    }  # fmt: skip


def by_chances(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same of DeepSeek-V2, whose experts are chosen by their chances, and by groups where its
    method says so, whatever else is told of groups."""
    found, k = {**translate(values), "expert_gating_func": SOFT_MAX}, Keys(values, "config.json")
    if k.get("topk_method") != BY_GROUPS:
        return {**found, "n_group": 0, "topk_group": 0}
    return {**found, "n_group": k.integer("n_group"), "topk_group": k.integer("topk_group")}


def dense_layers(k: Keys) -> int:
    """How many layers at the start have no experts: told by the kind of each, or by their number.
    ModelError for one of them behind others."""
    kinds = k.get("mlp_layer_types")
    if kinds is None:
        return k.integer(DENSE, 1)
    if not isinstance(kinds, list) or kinds != sorted(kinds, key=lambda kind: kind != "dense"):
        raise ModelError(f"config.json: mlp_layer_types {kinds!r:.60}: dense ones stand first")
    return kinds.count("dense")


def complete(c: DecoderConfig) -> DecoderConfig:
    """What GGUF files say otherwise: every head has keys of its own, neighbours are rotated."""
    chosen = SIGMOID if c.vocab_size == GLM_TOKENS else SOFT_MAX
    return replace(
        pairing_neighbours(c),
        num_key_value_heads=c.num_attention_heads,
        expert_gating_func=c.expert_gating_func or chosen,
        shared_intermediate_size=c.shared_intermediate_size or c.moe_intermediate_size,
    )


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """What keys and values grow by as one matrix. ModelError for sigmoids without corrections."""
    found = {n: t for n, t in tensors.items() if ".attn_k_b." not in n and ".attn_v_b." not in n}
    corrected = c.expert_gating_func == SIGMOID
    for i in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        if corrected and c.has_experts(i) and f"blk.{i}.exp_probs_b.bias" not in tensors:
            raise ModelError(f"{c.architecture}: layer {i} has no exp_probs_b")
        k, v = (tensors.get(f"blk.{i}.attn_{p}_b.weight") for p in "kv")
        if k is not None and v is not None:
            both = np.concatenate([k.float32().swapaxes(1, 2), v.float32()], axis=1)
            name, whole = f"blk.{i}.attn_kv_b.weight", both.reshape(-1, both.shape[2])
            if dtypes.F32 in (k.dtype, v.dtype):
                found[name] = RawTensor(name, dtypes.F32, whole.shape, whole)
            else:
                found[name] = RawTensor(name, dtypes.F16, whole.shape, whole.astype(np.float16))
    return found


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """That matrix as GGUF files hold it: one for keys, the other way round, and one for values."""
    found: Tensors = {}
    for name, t in tensors.items():
        if not name.endswith(".attn_kv_b.weight"):
            found[name] = t
            continue
        t = plain(t)
        heads = t.data.reshape(c.num_attention_heads, -1, t.shape[1])
        still = c.head_dim - c.rope.n_rot
        parts = {"attn_k_b": heads[:, :still].swapaxes(1, 2), "attn_v_b": heads[:, still:]}
        for role, data in parts.items():
            title = name.replace("attn_kv_b", role)
            found[title] = replace(changed(t, data), name=title)
    return found


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """Values of older files, which have no sizes of llama.cpp's cache; and YaRN, whose magnitude
    stands in the scale of the scores, and does not change the rotation."""
    found: dict[str, Any] = {}
    if not k.has("attention.value_length_mla"):
        found["v_head_dim"] = k.integer("attention.value_length", 0)
    if k.get("rope.scaling.type") == "yarn":
        share = k.real(YARN_LOG, 0.0)
        if share <= 0:  # which llama.cpp takes as no model means it
            raise ModelError(f"GGUF metadata: YaRN and latent attention without {YARN_LOG}")
        factor, most = k.real("rope.scaling.factor"), k.integer("context_length", 2048)
        width = k.integer("attention.key_length_mla", k.integer("attention.key_length", 1))
        rope, once = rope_from_gguf(k, "normal", width, most), yarn_magnitude(factor, 1.0)
        grown = yarn_magnitude(factor, 10 * share)
        found["attention_multiplier"] = grown**2 / math.sqrt(max(width, 1))
        found["rope"] = replace(rope, attn_factor=1 / once)
    return found


def yarn_keys(c: DecoderConfig) -> Mapping[str, Any]:
    """The other way. ModelError where the rotation's magnitude changes, or the scale does not."""
    factor = 1 / c.rope.freq_scale
    grown = math.sqrt(c.attention_multiplier * math.sqrt(c.head_dim)) - 1
    even = math.isclose(c.rope.attn_factor * yarn_magnitude(factor, 1.0), 1, rel_tol=1e-6)
    if not even or grown <= 1e-6:
        raise ModelError(f"{c.architecture}: GGUF cannot say how YaRN changes magnitudes")
    return {YARN_LOG: grown / math.log(factor), "rope.scaling.attn_factor": None}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Sizes of llama.cpp's cache, one small head for all, and how experts are chosen."""
    return {
        **(yarn_keys(c) if c.rope.ext_factor else {}),
        "attention.head_count_kv": 1,
        "attention.key_length": c.kv_lora_rank + c.rope.n_rot,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.head_dim,
        "attention.scale": None,
        "expert_shared_feed_forward_length": None,
        "expert_shared_count": c.shared_intermediate_size // max(c.moe_intermediate_size, 1),
        "expert_weights_norm": c.norm_topk_prob,
        "leading_dense_block_count": c.leading_dense,
    }


DEEPSEEK2 = Architecture(
    "deepseek2", blocks.Stack(layer), ("Glm4MoeLiteForCausalLM",), "normal",
    layer_names={
        **latent.NAMES, **SHARED_NAMES, "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
    gguf_defaults={"expert_weights_norm": False},
    hf_defaults={
        "rms_norm_eps": 1e-5, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "max_position_embeddings": 202752,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    fixed={"hidden_act": SWIGLU["hidden_act"], "rope_interleave": (True,)},
    translate=translate, complete=complete, load=load, store=store, keys=keys, read=read,
    layer=layer,
)  # fmt: skip
SIZES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK_V2 = replace(
    DEEPSEEK2, name="deepseek_v2", written_as=DEEPSEEK2.name, hf=("DeepseekV2ForCausalLM",),
    translate=by_chances,
    fixed={
        "hidden_act": SWIGLU["hidden_act"], "topk_method": ("greedy", BY_GROUPS),
        "norm_topk_prob": (False,),
    },
    hf_defaults={
        **SIZES, DENSE: 0, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
    },
)  # fmt: skip
DEEPSEEK_V3 = replace(
    DEEPSEEK2, name="deepseek_v3", written_as=DEEPSEEK2.name, hf=("DeepseekV3ForCausalLM",),
    hf_defaults={
        **SIZES, DENSE: 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "max_position_embeddings": 4096,
    },
)  # fmt: skip
