"""Qwen2: Llama's layer with biases on q, k and v, which `blocks.linear` adds where they exist.

Source: Qwen team 2024 (arXiv 2407.10671).
"""

from .llama import build

__all__ = ["build"]
