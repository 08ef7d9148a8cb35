"""Granite 3: Llama with four fixed factors: of the embedding, of what each half layer adds, of the
scores and of the logits. `blocks` applies them.

Source: IBM's Granite 3.0 report; transformers `modeling_granite`.
"""

from .architecture import Architecture
from .llama import build

GRANITE = Architecture("granite", build, ("GraniteForCausalLM",), "normal")
