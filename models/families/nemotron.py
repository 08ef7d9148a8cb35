"""Nemotron's dense models (Nemotron-4, Minitron, Nemotron-Mini): layer norms, a squared ReLU in
place of the gate; half of each head turns.

Source: Parmar et al. 2024 (arXiv 2402.16819); transformers `modeling_nemotron`.
"""

from ggraph import Tensor

from .. import blocks
from ..architecture import Architecture
from ..hf_config import without_window
from ..step import Step
from . import gemma2
from .cohere import epsilon
from .nemotron_h import squared


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = s.asked(x, i) + blocks.attention(s, blocks.layer_norm(s, x, f"blk.{i}.attn_norm"), i)
    normed = blocks.layer_norm(s, h, f"blk.{i}.ffn_norm")
    return h + squared(s, normed, i, s.config.intermediate_size)


NEMOTRON = Architecture(
    "nemotron", blocks.Stack(layer, blocks.layer_norm), ("NemotronForCausalLM",),
    translate=without_window, sanitize=gemma2.sanitize,
    keys=epsilon,
    fixed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
    hf_defaults={
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096,
        "hidden_act": "relu2",
    },
)  # fmt: skip
