"""Gemma: Llama with GELU in its tanh form for the gate, and an embedding times sqrt(hidden_size).

Source: Gemma team 2024 (arXiv 2403.08295); transformers `modeling_gemma`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Tensor

from .. import blocks
from ..architecture import Architecture
from ..config import DecoderConfig
from ..hf_config import without_window
from ..step import Step
from . import gemma2


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i)
    return h + blocks.geglu(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i)


def complete(c: DecoderConfig) -> DecoderConfig:
    """The factor of the embedding, which neither file tells."""
    return replace(c, embedding_multiplier=math.sqrt(c.hidden_size))


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """None: the factor is not told."""
    return {"embedding_scale": None}


GEMMA = Architecture(
    "gemma", blocks.Stack(layer), ("GemmaForCausalLM",), translate=without_window,
    complete=complete,
    sanitize=gemma2.sanitize, keys=keys,
    fixed={
        **gemma2.FIXED, "attention_bias": (False,), "tie_word_embeddings": (True,),
        # the first releases say "gelu" and mean its tanh form, as their class does
        "hidden_act": ("gelu", *gemma2.FIXED["hidden_activation"]),
    },
    hf_defaults={"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
)  # fmt: skip
