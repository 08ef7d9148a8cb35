"""Llama: RMS norm, rotary attention with grouped heads, SwiGLU. Also Mistral's sliding window, and
Mixtral's experts; GGUF files of both have Llama's name.

Sources: Touvron et al. 2023 (arXiv 2302.13971), Jiang et al. 2023 and 2024 (arXiv 2310.06825,
2401.04088).
"""

from dataclasses import replace

from ggraph import Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import DecoderConfig
from ..hf_config import without_window
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    return blocks.fed_forward(s, blocks.attended(s, x, i), i)


def complete(c: DecoderConfig) -> DecoderConfig:
    """Experts are as wide as the feed-forward, whose width files tell alone; shares sum to 1."""
    if not c.num_experts:
        return c
    wide = c.moe_intermediate_size or c.intermediate_size
    return replace(c, moe_intermediate_size=wide, norm_topk_prob=True)


LLAMA = Architecture(
    "llama", blocks.Stack(layer),
    ("LlamaForCausalLM", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    "normal", fixed=SWIGLU, translate=without_window, complete=complete,
)  # fmt: skip
MISTRAL = Architecture(
    "mistral", blocks.Stack(layer), ("MistralForCausalLM",), "normal", written_as="llama",
    fixed=SWIGLU,
    hf_defaults={
        "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
)  # fmt: skip
MIXTRAL = Architecture(
    "mixtral", blocks.Stack(layer), ("MixtralForCausalLM",), "normal", written_as="llama",
    fixed=SWIGLU,
    layer_names={"block_sparse_moe.gate": "ffn_gate_inp"}, complete=complete,
    hf_defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2,
        "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
)  # fmt: skip
