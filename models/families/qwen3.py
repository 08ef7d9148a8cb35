"""Qwen3: Llama's layer with an RMS norm on each head of q and k before the rotation; and what
answers in Qwen3-VL, whose rotation by three positions is a plain one of texts.

Sources: Qwen team 2025 (arXiv 2505.09388); transformers `configuration_qwen3_vl`.
"""

from dataclasses import replace

from ggraph import Tensor

from .. import blocks
from ..hf_config import without_window
from ..step import Step
from . import qwen2


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    return blocks.fed_forward(s, blocks.attended(s, x, i, qk_norm="head"), i)


QWEN3 = replace(
    qwen2.QWEN2, name="qwen3", build=blocks.Stack(layer), hf=("Qwen3ForCausalLM",),
    hf_defaults={**qwen2.QWEN2.hf_defaults, "head_dim": 128},
)  # fmt: skip
QWEN3_VL = replace(
    QWEN3, name="qwen3vl", written_as=QWEN3.name, hf=("Qwen3VLForConditionalGeneration",),
    translate=without_window, hf_defaults={
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    },
)  # fmt: skip
