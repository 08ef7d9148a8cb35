"""OLMoE: Llama with an RMS norm over whole rows of q and k, and experts for a feed-forward.

Source: Muennighoff et al. 2024 (arXiv 2409.02060); transformers `modeling_olmoe`.
"""

from dataclasses import replace

from ggraph import Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..config import DecoderConfig
from ..hf_config import without_window
from ..step import Step
from .qwen2_moe import keys


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    return blocks.fed_forward(s, blocks.attended(s, x, i, qk_norm="row"), i)


def complete(c: DecoderConfig) -> DecoderConfig:
    """Experts are as wide as the feed-forward, whose width files tell alone."""
    return replace(c, moe_intermediate_size=c.intermediate_size)


OLMOE = Architecture(
    "olmoe", blocks.Stack(layer), ("OlmoeForCausalLM",), fixed={**SWIGLU, "clip_qkv": ()},
    translate=without_window, complete=complete, keys=keys,
    gguf_defaults={"expert_weights_norm": False},
    hf_defaults={
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "intermediate_size": 2048,
        "max_position_embeddings": 4096,
    },
)  # fmt: skip
