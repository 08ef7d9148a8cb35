"""Seed-OSS: Llama with biases on q, k and v, whose second norm has another name in GGUF files.

Source: ByteDance Seed 2025, the Seed-OSS release; transformers `modeling_seed_oss`.
"""

from ggraph import Tensor

from .. import blocks
from ..architecture import SWIGLU, Architecture
from ..step import Step


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i)
    return h + blocks.swiglu(s, blocks.norm(s, h, f"blk.{i}.post_attention_norm"), i)


SEED_OSS = Architecture(
    "seed_oss", blocks.Stack(layer), ("SeedOssForCausalLM",), fixed=SWIGLU,
    hf_defaults={"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
    layer_names={"post_attention_layernorm": "post_attention_norm"},
)  # fmt: skip
