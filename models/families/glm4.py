"""GLM-4: Gemma 2's norms around SwiGLU; half of each head turns, neighbours in either file.

Source: Z.ai 2025, the GLM-4-0414 release; transformers `modeling_glm4`.
"""

from functools import partial

from .. import blocks
from ..architecture import SWIGLU, Architecture, pairing_neighbours
from . import gemma2

GLM4 = Architecture(
    "glm4", blocks.Stack(partial(gemma2.layer, unit=blocks.swiglu)), ("Glm4ForCausalLM",),
    "normal", complete=pairing_neighbours,
    layer_names={
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    fused={"ffn_up": ("ffn_gate", "ffn_up")},
    fixed={"hidden_act": SWIGLU["hidden_act"]},
    hf_defaults={
        "rms_norm_eps": 1.5625e-7, "head_dim": 128, "partial_rotary_factor": 0.5,
        "num_key_value_heads": 2, "max_position_embeddings": 131072,
    },
)  # fmt: skip
