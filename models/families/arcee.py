"""Arcee: Llama with a squared ReLU in place of the gate.

Source: Arcee AI 2025, the AFM-4.5B release; transformers `modeling_arcee`.
"""

from ggraph import Tensor

from .. import blocks
from ..architecture import Architecture
from ..hf_config import without_window
from ..step import Step
from .nemotron_h import squared


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = blocks.attended(s, x, i)
    return h + squared(s, blocks.norm(s, h, f"blk.{i}.ffn_norm"), i, s.config.intermediate_size)


ARCEE = Architecture(
    "arcee", blocks.Stack(layer), ("ArceeForCausalLM",), "normal", translate=without_window,
    fixed={
        "hidden_act": ("relu2",), "partial_rotary_factor": (1.0,), "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)  # fmt: skip
