"""Nemotron's dense models (Nemotron-4, Minitron, Nemotron-Mini): layer norms, a squared ReLU in
place of the gate; half of each head turns.

Source: Parmar et al. 2024 (arXiv 2402.16819); transformers `modeling_nemotron`.
"""

from collections.abc import Mapping
from typing import Any

from ggraph import Graph, Tensor

from .. import blocks
from ..architecture import Architecture
from ..blocks import Step
from ..config import Keys
from ..hf_config import without_window
from . import gemma2
from .cohere import epsilon
from .nemotron_h import squared


def build(s: Step) -> Graph:
    """The step graph of a dense Nemotron checkpoint."""
    return blocks.stacked(s, layer, blocks.layer_norm)


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = s.asked(x, i) + blocks.attention(s, blocks.layer_norm(s, x, f"blk.{i}.attn_norm"), i)
    normed = blocks.layer_norm(s, h, f"blk.{i}.ffn_norm")
    return h + squared(s, normed, i, s.config.intermediate_size)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The epsilon under its usual name."""
    epsilon = Keys(values, "config.json").real("norm_eps")
    return {**without_window(values), "rms_norm_eps": epsilon}


NEMOTRON = Architecture(
    "nemotron", build, ("NemotronForCausalLM",), translate=translate, sanitize=gemma2.sanitize,
    keys=epsilon,
    fixed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
    hf_defaults={
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096,
        "hidden_act": "relu2",
    },
)  # fmt: skip
