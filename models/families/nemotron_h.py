"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention that does not turn, and a
feed-forward, which may be a mixture, perhaps of experts that take and make smaller rows; units are
squares of what is above 0, without gates.

Time steps go by `time_step_limit`, as in NVIDIA's own implementation and in llama.cpp; transformers
5.24 raises them to `time_step_min`, which tells how their bias is drawn before a training.
Sources: NVIDIA 2025 (arXiv 2504.03624); transformers `modeling_nemotron_h`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor, ops

from .. import blocks, mamba2
from ..architecture import Architecture
from ..config import SIGMOID, DecoderConfig, Keys
from ..gguf_config import per_layer
from ..hf_config import FEEDING
from ..step import Step

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER = "mamba", "attention"  # names of the first two


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
    if s.config.remembers(i):
        made = mamba2.mixed(s, normed, i)
    elif s.config.only_feeds(i):
        made = feed_forward(s, s.asked(normed, i), i)
    else:
        made = blocks.attention(s, normed, i)
    return s.asked(x, i) + made


def feed_forward(s: Step, x: Tensor, i: int) -> Tensor:
    """Of layer i: [T, E] -> [T, E]. Beside experts there is one that takes every row."""
    c = s.config
    if not c.num_experts:
        return squared(s, x, i, c.intermediate_size)
    shared = squared(s, x, i, c.shared_intermediate_size, "_shexp")
    return blocks.experts(s, x, i, unit=_square, gated=False) + shared


def squared(s: Step, x: Tensor, i: int, width: int, end: str = "") -> Tensor:
    """down(relu(up x) ** 2) of layer i, whose tensors' names end in `end`: [T, E] -> [T, E]."""
    hidden = _square(blocks.linear(s, x, f"blk.{i}.ffn_up{end}", width))
    return blocks.linear(s, hidden, f"blk.{i}.ffn_down{end}", s.config.hidden_size)


def _square(x: Tensor) -> Tensor:
    above = ops.relu(x)
    return above * above


def _kinds(k: Keys) -> list[str]:
    """What each layer is. A file tells one width of feed-forwards, so that they are of one kind."""
    found, letters = k.get("layers_block_type"), k.get("hybrid_override_pattern")
    found = found or k.get("layer_types")
    if not found and isinstance(letters, str):
        found = [KINDS.get(letter, letter) for letter in letters]
    known = (*KINDS.values(), *OLDER)
    good = isinstance(found, list) and all(kind in known for kind in found)
    if not good or all(kind in found for kind in FEEDING):
        either = f"{', '.join(known)}; mlp or moe"
        raise ModelError(f"config.json: layers_block_type {found!r:.80}: expected {either}")
    return [str(kind) for kind in found]


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names. A config tells of experts whether there are any or not, and of
    layers by a list or by letters."""
    k = Keys(values, "config.json")
    kinds, heads = _kinds(k), k.integer("mamba_num_heads")
    found = {
        **values, "layer_types": kinds, "num_hidden_layers": len(kinds),
        "head_dim": k.integer("head_dim", k.integer("attention_head_dim", 128)),
        "linear_num_key_heads": k.integer("n_groups"),
        "linear_key_head_dim": k.integer("ssm_state_size"),
        "linear_conv_kernel_dim": k.integer("conv_kernel"),
        "linear_num_value_heads": heads,
        "linear_inner_size": heads * k.integer("mamba_head_dim"),
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    if "moe" in kinds:
        found["intermediate_size"] = k.integer("moe_intermediate_size")
        found["shared_expert_intermediate_size"] = k.integer("moe_shared_expert_intermediate_size")
    else:
        found |= dict.fromkeys(
            ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size")
        )
    return found


def complete(c: DecoderConfig) -> DecoderConfig:
    """Nothing turns; files of mixtures, whose experts are chosen by sigmoids, have a name of their
    own."""
    c = replace(c, architecture=NEMOTRON_H.name, rotated_layers=(False,) * c.num_hidden_layers)
    if not c.num_experts:
        return c
    return replace(c, architecture=NEMOTRON_H_MOE.name, expert_gating_func=SIGMOID)


def read(k: Keys, layers: int) -> dict[str, Any]:
    """Layers without key-value heads have a state, or a feed-forward of some width."""
    kv, wide = per_layer(k, "attention.head_count_kv"), per_layer(k, "feed_forward_length")
    if min(len(kv), len(wide)) < layers:
        raise ModelError(f"GGUF metadata: head_count_kv and feed_forward_length tell of {len(kv)} "
                         f"and {len(wide)} of {layers} layers")  # fmt: skip
    return {
        "recurrent_layers": tuple(kv[i] == wide[i] == 0 for i in range(layers)),
        "feeding_layers": tuple(kv[i] == 0 < wide[i] for i in range(layers)),
    }


def keys(c: DecoderConfig) -> dict[str, Any]:
    """The other way, and how experts are weighed; an epsilon that llama.cpp asks for, too."""
    wide = [c.intermediate_size * c.only_feeds(i) for i in range(c.num_hidden_layers)]
    return {
        "attention.head_count_kv": c.kv_heads, "feed_forward_length": wide,
        "attention.layer_norm_epsilon": float(c.rms_norm_eps),
        "expert_weights_norm": c.norm_topk_prob if c.num_experts else None,
    }  # fmt: skip


NEMOTRON_H = Architecture(
    "nemotron_h", blocks.Stack(layer), ("NemotronHForCausalLM",), translate=translate,
    complete=complete,
    sanitize=mamba2.sanitize, load=mamba2.load, store=mamba2.store, keys=keys, read=read,
    layer_prefix=r"(?:model|backbone)\.layers\.",
    layer_names={
        **mamba2.names("mixer"), "norm": "attn_norm", "mixer.gate": "ffn_gate_inp",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "mixer.o_proj": "attn_output",
        **{f"mixer.{p}_proj": f"attn_{p}" for p in "qkv"},
        **{f"mixer.{p}_proj": f"ffn_{p}" for p in ("up", "down")},
        **{f"mixer.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("up", "down")},
        "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    top_names={
        f"{top}.{name}.weight": inside for top in ("model", "backbone")
        for name, inside in (("embeddings", "token_embd.weight"), ("norm_f", "output_norm.weight"))
    },
    fixed={
        "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish"),
        "time_step_limit": mamba2.UNLIMITED, "sliding_window": (),
    },
    hf_defaults={
        "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "n_groups": 8, "conv_kernel": 4,
        "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "norm_topk_prob": True, "num_key_value_heads": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
)  # fmt: skip
NEMOTRON_H_MOE = replace(
    NEMOTRON_H, name="nemotron_h_moe", hf=(), gguf_defaults={"expert_weights_norm": False}
)
