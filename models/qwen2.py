"""Qwen2: Llama's layer with biases on q, k and v, which `blocks.linear` adds where they exist.

Source: Qwen team 2024 (arXiv 2407.10671).
"""

from .architecture import Architecture
from .llama import build

QWEN2 = Architecture("qwen2", build, ("Qwen2ForCausalLM",))
