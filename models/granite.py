"""Granite 3: Llama with four fixed factors: of the embedding, of what each half layer adds, of the
scores and of the logits. `blocks` applies them.

Source: IBM's Granite 3.0 report; transformers `modeling_granite`.
"""

from .architecture import SWIGLU, Architecture
from .hf_config import without_window
from .llama import build

GRANITE = Architecture(
    "granite", build, ("GraniteForCausalLM",), "normal", fixed=SWIGLU, translate=without_window,
    hf_defaults={"attention_multiplier": 1.0},
)  # fmt: skip
