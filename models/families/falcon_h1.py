"""Falcon-H1: attention and Mamba-2 side by side in each layer, from one norm into one sum.

What products give is multiplied by numbers of the config: folders tell them, and get a vector
beside each matrix; GGUF files have them in their matrices.
Sources: TII 2025 (arXiv 2507.22448); transformers `modeling_falcon_h1`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ggraph import Array, ModelError, Tensor, dtypes
from ggraph.formats.checkpoint import RawTensor

from .. import blocks, mamba2
from ..architecture import SWIGLU, Architecture, Tensors
from ..config import DecoderConfig, Keys, layer_range
from ..step import Step

SINGLE = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
SEVERAL = {  # gate and down; z, x, B, C and dt
    "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5,
}  # fmt: skip
FACTOR = ".factor"  # the end of a vector's name
BIASES = tuple(f".{n}.bias" for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                      "ffn_down", "ssm_in", "ssm_out"))  # fmt: skip
BARE = "ffn_norm"  # whose tensors have no ending in GGUF files


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
    bare = not s.has(f"blk.{i}.ssm_norm.weight")
    made = mamba2.mixed(s, normed, i, bare=bare) + blocks.attention(s, normed, i)
    return blocks.fed_forward(s, s.asked(x, i) + made, i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names."""
    told = {name: value for name, value in values.items() if value is not None}
    k = Keys({**SEVERAL, **told}, "config.json")
    layers = layer_range(k.integer("num_hidden_layers"))
    heads, head = k.integer("mamba_n_heads"), k.real("lm_head_multiplier")
    inner = k.integer("mamba_expand", 2) * k.integer("hidden_size")
    inner = k.integer("mamba_d_ssm", inner)
    known = k.get("mamba_d_head", "auto") != "auto"
    p = k.integer("mamba_d_head") if known else inner // max(heads, 1)
    if k.flag("mamba_rms_norm") and k.flag("mamba_norm_before_gate", True):
        raise ModelError("config.json: mamba_norm_before_gate with mamba_rms_norm is not known")
    if not head:
        raise ModelError(f"config.json: lm_head_multiplier = {head}")
    return {
        **values, "layer_types": ["linear_attention" for _ in layers],
        "linear_num_key_heads": k.integer("mamba_n_groups"),
        "linear_key_head_dim": k.integer("mamba_d_state"),
        "linear_conv_kernel_dim": k.integer("mamba_d_conv"),
        "linear_num_value_heads": heads, "linear_inner_size": heads * p,
        "logits_scaling": 1 / head,
        "multipliers": [
            *(k.real(f"{name}_multiplier", 1.0) for name in SINGLE),
            *(factor for name, ones in SEVERAL.items() for factor in k.reals(name, len(ones))),
        ],
    }  # fmt: skip


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Decays as what multiplies; a vector of factors beside each matrix that has one. Biases are
    multiplied by those behind a product alone."""
    found = mamba2.sanitize(tensors, c)
    attn_in, attn_out, key, ssm_in, ssm_out, gate, down, *parts = c.multipliers
    width = c.linear_num_key_heads * c.linear_key_head_dim
    sizes = (c.linear_inner_size, c.linear_inner_size, width, width, c.linear_num_value_heads)
    before = {"attn_q": attn_in, "attn_k": attn_in, "attn_v": attn_in, "ssm_in": ssm_in}
    behind: dict[str, Any] = {
        "attn_q": 1.0, "attn_k": key, "attn_v": 1.0, "attn_output": attn_out,
        "ssm_in": np.repeat(np.array(parts), sizes), "ssm_out": ssm_out,
        "ffn_gate": gate, "ffn_down": down,
    }  # fmt: skip
    for name, t in tensors.items():
        stem, _, kind = name.rpartition(".")
        role = stem.rpartition(".")[2]
        if role in behind and kind == "bias":
            found[name] = _plain(name, t.float32() * behind[role])
        elif role in behind:
            factor = before.get(role, 1.0) * behind[role]
            found[stem + FACTOR] = _plain(stem + FACTOR, np.broadcast_to(factor, t.shape[:1]))
    return found


def _plain(name: str, values: Array) -> RawTensor:
    return RawTensor(name, dtypes.F32, values.shape, np.ascontiguousarray(values, np.float32))


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """As other layers of Mamba-2; a norm's name ends as others' do. ModelError for biases of
    matrices without their factors: a GGUF file does not tell those, and a bias may need one."""
    for name in tensors:
        if name.endswith(BIASES) and name.removesuffix(".bias") + FACTOR not in tensors:
            raise ModelError(f"{c.architecture}: a bias without its factor: {name!r}")
    found = mamba2.load(tensors, c)
    return {f"{n}.weight" if n.endswith(f".{BARE}") else n: t for n, t in found.items()}


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The other way, with all factors in the matrices. ModelError for biases of theirs, of which
    llama.cpp reads some, and passes over others."""
    if any(n.endswith(BIASES) for n in tensors):
        raise ModelError(f"{c.architecture}: GGUF cannot say that matrices have biases")
    found = mamba2.store({n: t for n, t in tensors.items() if not n.endswith(FACTOR)}, c)
    for name, t in tensors.items():
        if name.endswith(FACTOR):
            weight = name.removesuffix(FACTOR) + ".weight"
            found[weight] = _plain(weight, found[weight].float32() * t.data[:, None])
    table, out = "token_embd.weight", "output.weight"
    shares = out not in found and c.embedding_multiplier != 1.0
    if c.logits_scaling != 1.0 or shares:  # not the embedding's factor
        found[out] = _plain(out, found.get(out, found[table]).float32() / c.logits_scaling)
    if c.embedding_multiplier != 1.0:
        found[table] = _plain(table, found[table].float32() * c.embedding_multiplier)
    return {n.removesuffix(".weight") if n.endswith(f".{BARE}.weight") else n: t
            for n, t in found.items()}  # fmt: skip


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """None; factors are in the matrices."""
    return {"embedding_scale": None, "logit_scale": None}


def read(k: Keys, layers: int) -> dict[str, Any]:
    """All layers have a state, beside attention."""
    return {"recurrent_layers": (True,) * layers}


FALCON_H1 = Architecture(
    "falcon-h1", blocks.Stack(layer), ("FalconH1ForCausalLM",), translate=translate,
    sanitize=sanitize,
    load=load, store=store, keys=keys, read=read,
    fixed={**SWIGLU, "time_step_limit": mamba2.UNLIMITED},
    layer_names={
        **mamba2.names("mamba"), "pre_ff_layernorm": "ffn_norm",
        **{f"feed_forward.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
    },
    top_names={"model.final_layernorm.weight": "output_norm.weight"},
    hf_defaults={
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "lm_head_multiplier": 1.0,
    },
)  # fmt: skip
