"""Phi-1, 1.5 and 2: attention and GPT-2's feed-forward side by side, both from one layer norm; a
part of each head turns, and all matrices have biases, those of the logits too.

Source: Gunasekar et al. 2023 (arXiv 2306.11644), Microsoft 2023, the Phi-2 release; transformers
`modeling_phi`; llama.cpp's `phi2.cpp`.
"""

from collections.abc import Mapping
from typing import Any

from ggraph import Graph, Tensor

from .. import blocks
from ..architecture import Architecture, untied
from ..blocks import Step
from ..config import Keys
from ..hf_config import without_window
from . import gpt2
from .cohere import epsilon


def build(s: Step) -> Graph:
    """The step graph of a Phi checkpoint."""
    return blocks.stacked(s, layer, blocks.layer_norm)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed = blocks.layer_norm(s, x, f"blk.{i}.attn_norm")
    mixed = blocks.attention(s, normed, i)
    return s.asked(x, i) + mixed + gpt2.feed_forward(s, s.asked(normed, i), i)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The epsilon under its usual name."""
    small = Keys(values, "config.json").real("layer_norm_eps")
    return {**without_window(values), "rms_norm_eps": small}


PHI2 = Architecture(
    "phi2", build, ("PhiForCausalLM",), translate=translate, store=untied, keys=epsilon,
    layer_names={
        "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    },
    top_names={
        **{f"model.final_layernorm.{p}": f"output_norm.{p}" for p in ("weight", "bias")},
        "lm_head.bias": "output.bias",
    },
    fixed={"hidden_act": gpt2.TANH, "qk_layernorm": (False,)},
    hf_defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
)  # fmt: skip
