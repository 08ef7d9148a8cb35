"""EmbeddingGemma: Gemma 3 as an encoder, whose windows reach to both sides, and two products behind
the mean of its rows.

Source: Gemma team 2025 (arXiv 2509.20354); transformers `modeling_gemma3`; llama.cpp's
`gemma-embedding.cpp`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ggraph import ModelError

from .. import blocks
from ..architecture import Architecture
from ..config import DecoderConfig
from ..vectors import vectors
from . import gemma2, gemma3

BOTH = "use_bidirectional_attention"


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """As in Gemma 3. ModelError where no layer has a window: llama.cpp must have one."""
    if c.sliding_window is None:
        raise ModelError("gemma-embedding: GGUF cannot say that no layer slides")
    return gemma2.keys(c)


GEMMA_EMBEDDING = Architecture(
    "gemma-embedding", blocks.Stack(partial(gemma2.layer, qk_norm="head"), end=vectors),
    ("Gemma3TextModel",), causal=False, told_by={BOTH: True},
    fixed={**gemma3.GEMMA3.fixed, BOTH: (True,)},
    hf_defaults=gemma3.GEMMA3.hf_defaults, layer_names=gemma2.NAMES, translate=gemma3.translate,
    complete=gemma3.complete, sanitize=gemma2.sanitize, keys=keys,
    store=partial(gemma2.store, part="attn_q_norm", wide=gemma3.WIDE),
)  # fmt: skip
