"""LFM2: short convolutions between two gates in most layers, attention in the others; with experts
chosen by sigmoids behind a few dense layers, or without.

Source: Liquid AI 2025 (arXiv 2511.23404); transformers `modeling_lfm2`, `modeling_lfm2_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor, dtypes, ops

from .. import blocks
from ..architecture import SWIGLU, Architecture, Tensors, changed
from ..config import SIGMOID, DecoderConfig, Keys
from ..recurrent import convolved
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    if s.config.remembers(i):
        mixed = _convolution(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i)
        h = s.asked(x, i) + mixed
    else:
        h = blocks.attended(s, x, i, qk_norm="head")
    return blocks.fed_forward(s, h, i)


def _convolution(s: Step, x: Tensor, i: int) -> Tensor:
    """out(c * conv(b * v)), where b, c, v = in(x): [T, E] -> [T, E]. A bias of the convolution's
    channels is added behind it."""
    e, name = s.config.hidden_size, f"blk.{i}.shortconv"
    three = blocks.linear(s, x, f"{name}.in_proj", 3 * e)  # [T, 3E]
    b, c, v = (ops.columns(three, j * e, e) for j in range(3))
    w = s.w(f"{name}.conv.weight", s.config.conv_l_cache, e)
    held = convolved(s, b * v, i, w)
    if s.has(f"{name}.conv.bias"):
        held = held + s.w(f"{name}.conv.bias", e)
    mixed = s.asked(c * held, i)
    return blocks.linear(s, mixed, f"{name}.out_proj", e)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names; older configs tell the feed-forward's width before it is cut
    by a third and, where a factor stands beside it, rounded up."""
    wide = values.get("block_ff_dim") or values.get("intermediate_size")
    if values.get("block_auto_adjust_ff_dim") and isinstance(wide, int):
        k = Keys(values, "config.json")
        unit, factor = max(k.integer("block_multiple_of", 256), 1), "block_ffn_dim_multiplier"
        wide = int(2 * wide / 3)
        if values.get(factor, 1.0) is not None:
            wide = -(-int(k.real(factor, 1.0) * wide) // unit) * unit
    kinds = values.get("layer_types")
    attending, layers = values.get("full_attn_idxs"), values.get("num_hidden_layers")
    if not kinds and isinstance(attending, list) and isinstance(layers, int):
        kinds = ["full_attention" if i in attending else "conv" for i in range(layers)]
    epsilon = values.get("norm_eps", values.get("block_norm_eps", 1e-5))
    return {**values, "intermediate_size": wide, "rms_norm_eps": epsilon, "layer_types": kinds}


FINAL = "output_norm.weight", "token_embd_norm.weight"  # the last norm's name, and in its files


def load(tensors: Tensors, c: DecoderConfig, names: tuple[str, str] = FINAL) -> Tensors:
    """Convolutions with a row per channel as rows of channels, in float32."""
    inside, outside = names
    found = {inside if n == outside else n: t for n, t in tensors.items()}
    return {n: kernel(t) if n.endswith(".conv.weight") else t for n, t in found.items()}


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The other way. ModelError for biases, which llama.cpp's files of this family have not."""
    if any(".shortconv." in n and n.endswith(".bias") for n in tensors):
        raise ModelError(f"{c.architecture}: GGUF cannot say that convolutions have biases")
    return load(tensors, c, FINAL[::-1])


def kernel(t: Any) -> Any:
    """A convolution's weights [C, K], of Hugging Face [C, 1, K], the other way round."""
    flat = t.float32().reshape(t.shape[0], t.shape[-1])
    return changed(type(t)(t.name, dtypes.F32, flat.shape, flat), flat.T)


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """Layers without attention have no key-value heads."""
    return {"attention.head_count_kv": c.kv_heads}


def complete_moe(c: DecoderConfig) -> DecoderConfig:
    """How experts are chosen."""
    return replace(c, expert_gating_func=SIGMOID)


def keys_moe(c: DecoderConfig) -> Mapping[str, Any]:
    """Which layers are dense. ModelError for shares that no GGUF file can tell: llama.cpp lets them
    sum to 1."""
    if not c.norm_topk_prob or c.routed_scaling_factor != 1:
        raise ModelError("lfm2moe: GGUF cannot say what experts' shares sum to, if not to 1")
    return {**keys(c), "leading_dense_block_count": c.leading_dense}


UNSAID = {
    "rope_theta": 1e6, "conv_L_cache": 3, "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
}  # fmt: skip
LFM2 = Architecture(
    "lfm2", blocks.Stack(layer), ("Lfm2ForCausalLM",), translate=translate, load=load,
    store=store, keys=keys,
    fixed=SWIGLU, hf_defaults={**UNSAID, "block_auto_adjust_ff_dim": True},
    layer_names={
        "operator_norm": "attn_norm", "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
        "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj", "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    },
    top_names={"model.embedding_norm.weight": "output_norm.weight"},
)  # fmt: skip
LFM2_MOE = replace(
    LFM2, name="lfm2moe", hf=("Lfm2MoeForCausalLM",), complete=complete_moe, keys=keys_moe,
    fixed={**SWIGLU, "use_expert_bias": (True,)},
    hf_defaults={
        **UNSAID, "num_dense_layers": 2, "num_experts_per_tok": 4, "norm_topk_prob": True,
    },
    layer_names={
        **LFM2.layer_names, "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias",
    },
)  # fmt: skip
