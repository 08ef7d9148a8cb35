"""Phi-1, 1.5 and 2: attention and GPT-2's feed-forward side by side, both from one layer norm; a
part of each head turns, and all matrices have biases, those of the logits too.

Source: Gunasekar et al. 2023 (arXiv 2306.11644), Microsoft 2023, the Phi-2 release; transformers
`modeling_phi`; llama.cpp's `phi2.cpp`.
"""

from ggraph import Tensor

from .. import blocks
from ..architecture import Architecture, untied
from ..hf_config import without_window
from ..step import Step
from . import gpt2
from .cohere import epsilon


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    normed = blocks.layer_norm(s, x, f"blk.{i}.attn_norm")
    mixed = blocks.attention(s, normed, i)
    return s.asked(x, i) + mixed + gpt2.feed_forward(s, s.asked(normed, i), i)


PHI2 = Architecture(
    "phi2", blocks.Stack(layer, blocks.layer_norm), ("PhiForCausalLM",), translate=without_window,
    store=untied, keys=epsilon,
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
