"""StarCoder 2: GPT-2's layers, whose queries and keys turn, and of whose heads of keys there are
few. All layers slide, if any does.

Source: Lozhkov et al. 2024 (arXiv 2402.19173); transformers `modeling_starcoder2`.
"""

import numpy as np

from ggraph import dtypes
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import Architecture, Tensors
from ..config import DecoderConfig
from . import gpt2
from .cohere import epsilon


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """With biases of all matrices, which llama.cpp asks for: 0 where there are none."""
    found = dict(tensors)
    for name, t in tensors.items():
        bias = name.replace(".weight", ".bias")
        if name.startswith("blk.") and len(t.shape) == 2 and bias not in tensors:
            rows = t.shape[0]
            found[bias] = RawTensor(bias, dtypes.F32, (rows,), np.zeros(rows, np.float32))
    return found


STARCODER2 = Architecture(
    "starcoder2", blocks.Stack(gpt2.layer, blocks.layer_norm), ("Starcoder2ForCausalLM",),
    store=store,
    keys=epsilon,
    layer_names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    fixed={"hidden_act": gpt2.TANH, "partial_rotary_factor": (1.0,)},
    hf_defaults={
        "norm_epsilon": 1e-5, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    },
)  # fmt: skip
