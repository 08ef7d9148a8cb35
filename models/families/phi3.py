"""Phi-3: Llama whose files hold q, k and v in one matrix, and gate and up in another.

Source: Abdin et al. 2024 (arXiv 2404.14219); transformers `modeling_phi3`.
"""

from ..architecture import FUSED, SWIGLU, Architecture
from ..blocks import Stack
from .llama import layer

PHI3 = Architecture(
    "phi3",
    Stack(layer),
    ("Phi3ForCausalLM",),
    layer_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    fixed={"hidden_act": SWIGLU["hidden_act"]},
    fused={**FUSED, "ffn_up": ("ffn_gate", "ffn_up")},
)
