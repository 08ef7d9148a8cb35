"""SmolLM3: Llama with no rotation in every fourth layer.

Source: Hugging Face 2025, the SmolLM3 release; transformers `modeling_smollm3`.
"""

from dataclasses import replace

from ggraph import ModelError

from .architecture import Architecture
from .config import DecoderConfig
from .gguf_config import every
from .llama import build

STEP = 4  # GGUF has no key for it: llama.cpp takes every fourth


def complete(c: DecoderConfig) -> DecoderConfig:
    """The layers that rotate, where the file does not say."""
    return c if c.rotated_layers else replace(c, rotated_layers=every(STEP, c.num_hidden_layers))


def keys(c: DecoderConfig) -> dict[str, object]:
    """Nothing; ModelError for a pattern that no GGUF file can tell."""
    if c.rotated_layers != every(STEP, c.num_hidden_layers):
        raise ModelError(f"smollm3: GGUF cannot say that only {c.rotated_layers} rotate")
    return {}


SMOLLM3 = Architecture(
    "smollm3", build, ("SmolLM3ForCausalLM",), "normal", complete=complete, keys=keys
)
