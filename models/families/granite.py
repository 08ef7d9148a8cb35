"""Granite 3: Llama, or Mixtral, with four fixed factors: of the embedding, of what each half layer
adds, of the scores and of the logits. `blocks` applies them. Granite 4: Mamba-2 in most layers,
attention that mostly does not turn in the others; with experts and one feed-forward for every row,
or that alone.

Sources: IBM's Granite 3.0 report; transformers `modeling_granite`, `modeling_granitemoe`,
`modeling_granitemoeshared`, `modeling_granitemoehybrid`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import Tensor
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import row_numbers, taken

from .. import blocks, mamba2
from ..architecture import SWIGLU, Architecture, Tensors, changed
from ..config import DecoderConfig, Keys, layer_range
from ..hf_config import without_window
from ..step import Step
from . import llama


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    if s.config.remembers(i):
        mixed = mamba2.mixed(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i)
        h = s.asked(x, i) + blocks.scaled(mixed, s.config.residual_multiplier)
    else:
        h = blocks.attended(s, x, i)
    return blocks.fed_forward(s, h, i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names. Without experts the shared feed-forward is the only one."""
    k = Keys(values, "config.json")
    layers, heads = layer_range(k.integer("num_hidden_layers")), k.integer("mamba_n_heads")
    expand, wide = k.integer("mamba_expand"), k.integer("shared_intermediate_size")
    told, whole = k.get("mamba_d_head"), expand * k.integer("hidden_size")
    p = whole // max(heads, 1) if told in (None, "auto") else k.integer("mamba_d_head")
    kinds = k.get("layer_types") or k.get("layers_block_type")
    found = {
        **values, "layer_types": kinds or ["linear_attention" for _ in layers],
        "rotated_layers": [k.get("position_embedding_type") == "rope" for _ in layers],
        "shared_expert_intermediate_size": wide,
        "linear_num_key_heads": k.integer("mamba_n_groups"),
        "linear_key_head_dim": k.integer("mamba_d_state"),
        "linear_conv_kernel_dim": k.integer("mamba_d_conv"),
        "linear_num_value_heads": heads, "linear_inner_size": heads * p,
    }  # fmt: skip
    if not k.integer("num_local_experts"):
        found["intermediate_size"] = wide
    return found


def complete(c: DecoderConfig) -> DecoderConfig:
    """Experts as in Mixtral. A checkpoint of attention alone is one of Granite 3."""
    c = llama.complete(c)
    if any(c.recurrent_layers):
        return c
    return replace(c, architecture=(GRANITE_MOE if c.num_experts else GRANITE).name)


def translate_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of what every row takes beside its experts, where something does."""
    wide = values.get("shared_intermediate_size", 0)
    return {**without_window(values), "shared_expert_intermediate_size": wide}


def read(k: Keys, layers: int) -> dict[str, Any]:
    """Whether anything turns."""
    return {} if k.flag(TURNS, True) else {"rotated_layers": (False,) * layers}


def keys(c: DecoderConfig) -> dict[str, Any]:
    """The other way."""
    return {TURNS: False} if c.rotated_layers and not any(c.rotated_layers) else {}


def hybrid_keys(c: DecoderConfig) -> dict[str, Any]:
    """Layers without attention have no key-value heads."""
    return {**keys(c), "attention.head_count_kv": c.kv_heads}


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Both halves of the shared feed-forward apart."""
    end, found = "_shexp" if c.num_experts else "", dict[str, RawTensor]()
    for name, t in mamba2.sanitize(tensors, c).items():
        lead, both, _ = name.partition("shared_in.weight")
        if both:
            parts = np.split(row_numbers(t.storage), 2)
            found |= {
                f"{lead}ffn_{part}{end}.weight": changed(t, taken(t.storage, rows))
                for part, rows in zip(("gate", "up"), parts, strict=True)
            }
        else:
            found[name.replace("shared_out.", f"ffn_down{end}.")] = t
    return found


TURNS = "rope.scaling.finetuned"  # so llama.cpp reads it for Granite
MIXTURE = {
    "block_sparse_moe.router": "ffn_gate_inp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "shared_mlp.input_linear": "shared_in", "shared_mlp.output_linear": "shared_out",
}  # fmt: skip
GRANITE = Architecture(
    "granite", blocks.Stack(llama.layer), ("GraniteForCausalLM",), "normal", fixed=SWIGLU,
    translate=without_window, hf_defaults={"attention_multiplier": 1.0}, keys=keys, read=read,
)  # fmt: skip
GRANITE_MOE = replace(
    GRANITE, name="granitemoe", hf=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    translate=translate_moe, complete=llama.complete, sanitize=sanitize, layer_names=MIXTURE,
    hf_defaults={"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
)  # fmt: skip
GRANITE_HYBRID = Architecture(
    "granitehybrid", blocks.Stack(layer), ("GraniteMoeHybridForCausalLM",), "normal",
    fixed={**SWIGLU, "time_step_limit": mamba2.UNLIMITED}, translate=translate, complete=complete,
    sanitize=sanitize, load=mamba2.load, store=mamba2.store, keys=hybrid_keys, read=read,
    layer_names={**mamba2.names("mamba"), **MIXTURE},
    hf_defaults={
        "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
)  # fmt: skip
