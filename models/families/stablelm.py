"""StableLM 2: Llama with layer norms, of whose heads a quarter turns. The larger one has attention
and feed-forward side by side, from one norm, and norms of each head of q and k.

Sources: Bellagente et al. 2024 (arXiv 2402.17834); transformers `modeling_stablelm`.
"""

import re

import numpy as np

from ggraph import Tensor
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import SWIGLU, Architecture, Tensors, changed
from ..config import DecoderConfig
from ..hf_config import without_window
from ..step import Step
from .cohere import epsilon

MOST_HEADS = 128  # whose norms are sought


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    each = "each" if s.has(f"blk.{i}.attn_q_norm.weight") else ""
    normed = blocks.layer_norm(s, x, f"blk.{i}.attn_norm")
    h = s.asked(x, i) + blocks.attention(s, normed, i, qk_norm=each)
    beside = not s.has(f"blk.{i}.ffn_norm.weight")
    fed = s.asked(normed, i) if beside else blocks.layer_norm(s, h, f"blk.{i}.ffn_norm")
    return h + blocks.swiglu(s, fed, i)


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The norms of all heads as one tensor [H, D]."""
    found: Tensors = {}
    each: dict[str, dict[int, RawTensor]] = {}
    for name, t in tensors.items():
        match = re.fullmatch(r"(blk\.\d+\.attn_[qk]_norm)\.(\d+)\.weight", name)
        if match is None:
            found[name] = t
        else:
            each.setdefault(f"{match[1]}.weight", {})[int(match[2])] = t
    for name, heads in each.items():
        data = np.stack([heads[h].data for h in sorted(heads)])
        found[name] = changed(heads[min(heads)], data)
    return found


STABLELM = Architecture(
    "stablelm", blocks.Stack(layer, blocks.layer_norm), ("StableLmForCausalLM",),
    translate=without_window, sanitize=sanitize,
    keys=epsilon, fixed={"hidden_act": SWIGLU["hidden_act"]},
    layer_names={
        f"self_attn.{part}_layernorm.norms.{head}": f"attn_{part}_norm.{head}"
        for part in "qk" for head in range(MOST_HEADS)
    },
    hf_defaults={
        "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
)  # fmt: skip
