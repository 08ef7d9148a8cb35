"""NomicBERT (nomic-embed-text): BERT whose queries and keys turn, with SwiGLU and no biases but
those of the norms. Released folders have their own names of keys and tensors, transformers others.

Longer texts than those of the training turn by a base of their own length, which is not known here:
the context is that of the training, as in GGUF files.
Sources: Nussbaum et al. 2024 (arXiv 2402.01613); transformers `modeling_nomic_bert`; llama.cpp's
`bert.cpp`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .. import blocks
from ..architecture import FUSED
from ..config import Keys
from ..vectors import bare, vectors
from . import bert

TRAINED = 2048  # positions of the released models' training
OWN = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "rotary_emb_base": "rope_theta",
}  # fmt: skip


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The released models' keys under their usual names; they tell of more positions than were
    trained."""
    found = {**values, **{usual: values[own] for own, usual in OWN.items() if own in values}}
    if "n_positions" in values:
        trained = Keys(values, "config.json").integer("max_trained_positions", TRAINED)
        found["max_position_embeddings"] = trained
    return found


NOMIC_BERT = replace(
    bert.BERT, name="nomic-bert", hf=("NomicBertModel", "NomicBertForMaskedLM"), fused=FUSED,
    build=blocks.Stack(
        partial(bert.layer, feed=blocks.swiglu), bare,
        partial(bert.begin, embed=blocks.embed), vectors,
    ),
    layer_prefix=r"(?:encoder\.)?layers\.",
    layer_names={
        "post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm",
        "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm1": "attn_output_norm",
        "norm2": "layer_output_norm", "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
    },
    top_names={**bert.TOPS, **{f"emb_ln.{p}": f"token_embd_norm.{p}" for p in ("weight", "bias")}},
    fixed={
        "hidden_act": ("silu",), "activation_function": ("swiglu",), "causal": (False,),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm"), (False,)),
        "rotary_emb_fraction": (1.0,), "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (),
    },
    hf_defaults={
        **bert.BERT.hf_defaults, "vocab_size": 30528, "max_position_embeddings": TRAINED,
        "rope_theta": 1000.0,
    },
    translate=translate, complete=lambda config: config,
)  # fmt: skip
