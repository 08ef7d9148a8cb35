"""Qwen3: Llama's layer with an RMS norm on each head of q and k before the rotation; and what
answers in Qwen3-VL, whose rotation by three positions is a plain one of texts.

Sources: Qwen team 2025 (arXiv 2505.09388); transformers `configuration_qwen3_vl`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import Tensor

from .. import blocks
from ..config import DecoderConfig, Keys
from ..hf_config import without_window
from ..step import Step
from . import qwen2

DEEP = {"deepstack_visual_indexes": [8, 16, 24]}  # where `vision_config` does not say it


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    x = blocks.fed_forward(s, blocks.attended(s, x, i, qk_norm="head"), i)
    deep = s.shape.given and i < s.config.n_deepstack_layers
    return x + s.asked(s.given_part(1 + i), i) if deep else x


def turning(c: DecoderConfig, sections: tuple[int, ...] = (24, 20, 20)) -> DecoderConfig:
    """Lines and columns take pairs in turn, as many as these where neither file says it."""
    return replace(c, mrope_section=c.mrope_section or sections, mrope_interleaved=True)


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nothing slides; how many layers add to images follows from what the tower makes."""
    told = Keys(values, "config.json").mapping("vision_config")
    tower = Keys({**(DEEP if told else {}), **told}, "config.json vision_config")
    count = len(tower.integers("deepstack_visual_indexes"))
    return {**without_window(values), "n_deepstack_layers": count}


QWEN3 = replace(
    qwen2.QWEN2, name="qwen3", build=blocks.Stack(layer), hf=("Qwen3ForCausalLM",),
    hf_defaults={**qwen2.QWEN2.hf_defaults, "head_dim": 128},
)  # fmt: skip
QWEN3_VL = replace(
    QWEN3, name="qwen3vl", hf=("Qwen3VLForConditionalGeneration",), complete=turning,
    keys=qwen2.sections_of, translate=translate, hf_defaults={
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    },
)  # fmt: skip
