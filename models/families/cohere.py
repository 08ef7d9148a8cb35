"""Cohere's Command R: attention and feed-forward side by side, both from one layer norm without a
bias; neighbours turn in either file. Command R+ has such norms of each head of q and k, too. In
Command R7B (Cohere 2) three of four layers slide, and those alone turn.

Sources: Cohere 2024, the releases of Command R and R7B; transformers `modeling_cohere`,
`modeling_cohere2`; llama.cpp's `command-r.cpp`, `cohere2.cpp`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture, pairing_neighbours
from ..config import DecoderConfig, Keys, layer_range
from ..gguf_config import told_window, types_every
from ..hf_config import rope_kind, scaling_of, without_window
from ..step import Step

PERIOD = 4  # of Cohere 2's full layers, where a file does not say
SCALE = "logit_scale"


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed, each = blocks.layer_norm(s, x, f"blk.{i}.attn_norm"), f"blk.{i}.attn_q_norm.weight"
    mixed = blocks.attention(s, normed, i, qk_norm="each" if s.has(each) else "")
    return s.asked(x, i) + mixed + blocks.swiglu(s, s.asked(normed, i), i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names; logits are multiplied, where other families divide them."""
    k = Keys(values, "config.json")
    scale = k.real(SCALE)
    if scale <= 0:
        raise ModelError(f"config.json: {SCALE} = {scale}: expected more than 0")
    return {**values, "logits_scaling": 1 / scale}


def translate_r(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same; nothing slides. The first release tells of its context beside the 8192 positions
    of its class, and llama.cpp's converter believes it; scaled ropes count from the latter."""
    k, found = Keys(values, "config.json"), without_window(translate(values))
    if not k.has("model_max_length") or rope_kind(scaling_of(k)) != "default":
        return found
    return {**found, "max_position_embeddings": k.integer("model_max_length")}


def translate_r7b(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, and the layers that slide, as listed or by a period."""
    if values.get("layer_types"):
        return translate(values)
    k = Keys(values, "config.json")
    period = k.integer("sliding_window_pattern", PERIOD)
    return {**translate(values), "layer_types": types_every(period, k.integer("num_hidden_layers"))}


def complete_r7b(c: DecoderConfig) -> DecoderConfig:
    """Those that slide turn, which neither file tells."""
    turned = tuple(c.slides(i) for i in layer_range(c.num_hidden_layers))
    return replace(pairing_neighbours(c), rotated_layers=turned)


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """What logits are divided by. ModelError where a file does not tell their factor."""
    return {"logits_scaling": 1 / k.real(SCALE)}


def read_r7b(k: Keys, layers: int) -> Mapping[str, Any]:
    """The same. ModelError where a file tells of no window, which llama.cpp must have."""
    told_window(k)
    return read(k, layers)


def epsilon(c: DecoderConfig) -> Mapping[str, Any]:
    """The epsilon under the name that layer norms have."""
    return {
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": float(c.rms_norm_eps),
    }


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """That, and the factor of the logits."""
    return {**epsilon(c), SCALE: 1 / c.logits_scaling}


def keys_r7b(c: DecoderConfig) -> Mapping[str, Any]:
    """The same. ModelError where no layer slides."""
    if c.sliding_window is None:
        raise ModelError("cohere2: GGUF cannot say that no layer slides")
    return keys(c)


FIXED = {**SWIGLU, "attention_bias": (False,), "tie_word_embeddings": (True,)}
COMMAND_R = Architecture(
    "command-r", blocks.Stack(layer, blocks.layer_norm), ("CohereForCausalLM",), "normal",
    fixed=FIXED, translate=translate_r, complete=pairing_neighbours, read=read, keys=keys,
    hf_defaults={
        "layer_norm_eps": 1e-5, SCALE: 0.0625, "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
)  # fmt: skip
COHERE2 = Architecture(
    "cohere2", blocks.Stack(layer, blocks.layer_norm), ("Cohere2ForCausalLM",), "normal",
    fixed=FIXED, translate=translate_r7b, complete=complete_r7b, read=read_r7b, keys=keys_r7b,
    gguf_defaults={"attention.sliding_window_pattern": PERIOD},
    hf_defaults={
        "layer_norm_eps": 1e-5, SCALE: 0.0625, "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
)  # fmt: skip
