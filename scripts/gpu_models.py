"""Random models of real shapes for measuring a GPU: no large weights travel, seeds do.

Weights are tiles of seeded random blocks, repeated; values are small and finite, so no step meets
NaN, and what is decoded means nothing. Used by `gpu_check.py`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # a clone need not be installed

from stored_weights import set_scales

from ggraph import dtypes
from ggraph.dtype import DType
from ggraph.formats.checkpoint import Checkpoint, storage_shape
from models.config import DecoderConfig, Rope
from models.eagle3 import Head, HeadConfig
from models.registry import Model

TILE = 1 << 22  # bytes of random storage that are repeated
NORMS = ("norm", "rope_freqs")

LLAMA_8B = DecoderConfig(
    "llama", 4096, 14336, 32, 32, 8, 128, 1e-5, 128256, 131072, Rope("normal", 128, 500000.0)
)
QWEN3_8B = DecoderConfig(
    "qwen3", 4096, 12288, 36, 32, 8, 128, 1e-6, 151936, 40960, Rope("neox", 128, 1000000.0)
)
SMOLLM2 = DecoderConfig(
    "llama", 576, 1536, 30, 9, 3, 64, 1e-5, 49152, 8192, Rope("normal", 64, 100000.0)
)
TINY = replace(LLAMA_8B, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
               num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=128,
               rope=Rope("normal", 32))  # fmt: skip
SHAPES: dict[str, DecoderConfig] = {
    "Llama-3.1-8B": LLAMA_8B, "Qwen3-8B": QWEN3_8B, "SmolLM2-135M": SMOLLM2, "tiny": TINY,
}  # fmt: skip
DRAFT_VOCABULARY = 32000


@dataclass(frozen=True, eq=False)
class Random:
    """A stored tensor whose bytes are made when they are asked for."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.dtype.row_bytes(self.shape[-1]) * int(np.prod(self.shape[:-1]))

    @property
    def storage(self) -> np.ndarray[Any, Any]:
        """Its bytes: ones for norms, else a random tile over and over."""
        if any(n in self.name for n in NORMS):
            return np.ones(self.shape, self.dtype.np)
        stored = np.resize(tile(self.dtype), self.nbytes).view(self.dtype.np)
        return stored.reshape(storage_shape(self.shape, self.dtype))


@cache
def tile(dtype: DType) -> np.ndarray[Any, Any]:
    """About TILE bytes of whole random blocks; scales are such that values are near 0.02."""
    rng = np.random.default_rng(0)
    if not dtype.is_block:
        values = (rng.standard_normal(TILE // 4) * 0.02).astype(np.float32)
        if dtype is dtypes.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(dtype.np).view(np.uint8)
    count = TILE // dtype.block_bytes
    raw = rng.integers(0, 256, (count, dtype.block_bytes), np.uint8)
    set_scales(raw, dtype, np.full((count, 2), 5e-5, np.float16))
    return raw.reshape(-1)


def model(name: str, config: DecoderConfig, dtype: DType) -> Model:
    """A model whose matrices are of `dtype` and whose norms are float32."""
    c = config
    e, f, h, kv, d = (c.hidden_size, c.intermediate_size, c.num_attention_heads,
                      c.num_key_value_heads, c.head_dim)  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.vocab_size, e),
        "output.weight": (c.vocab_size, e),
        "output_norm.weight": (e,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= {f"blk.{i}.{n}.weight": s for n, s in {
            "attn_norm": (e,), "ffn_norm": (e,), "attn_q": (h * d, e), "attn_k": (kv * d, e),
            "attn_v": (kv * d, e), "attn_output": (e, h * d), "ffn_gate": (f, e), "ffn_up": (f, e),
            "ffn_down": (e, f),
        }.items()}  # fmt: skip
        if c.architecture == "qwen3":
            shapes |= {f"blk.{i}.attn_{n}_norm.weight": (d,) for n in "qk"}
    tensors = catalogue(shapes, dtype)
    held = Checkpoint("", "gguf", c.architecture, {}, tensors)
    return Model(f"{name} {dtype}", config, tensors, held)


def catalogue(shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> dict[str, Any]:
    """Random tensors by name; vectors are float32."""
    return {n: Random(n, dtype if len(s) > 1 else dtypes.F32, s) for n, s in shapes.items()}


def head(target: Model, dtype: DType) -> Head:
    """An EAGLE-3 head for a target: one layer over [embedding ; feature], three taps."""
    c = target.config
    e, f, h, kv, d = (c.hidden_size, c.intermediate_size, c.num_attention_heads,
                      c.num_key_value_heads, c.head_dim)  # fmt: skip
    words = min(DRAFT_VOCABULARY, c.vocab_size // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (e, 3 * e), "output.weight": (words, e), "output_norm.weight": (e,),
        **{f"blk.0.{n}.weight": s for n, s in {
            "attn_norm": (e,), "attn_norm_2": (e,), "ffn_norm": (e,), "attn_q": (h * d, 2 * e),
            "attn_k": (kv * d, 2 * e), "attn_v": (kv * d, 2 * e), "attn_output": (e, h * d),
            "ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f),
        }.items()},
    }  # fmt: skip
    layers = c.num_hidden_layers
    taps = (2, layers // 2, layers - 3) if layers > 5 else (1, layers // 2, layers - 1)
    config = HeadConfig(replace(c, num_hidden_layers=1), e, taps, words)
    borrowed = {"token_embd.weight": target.catalogue["token_embd.weight"]}
    ids = np.sort(np.random.default_rng(1).permutation(c.vocab_size)[:words])
    return Head(f"head of {target.name}", config, catalogue(shapes, dtype), borrowed, ids)


def weight_bytes(m: Model) -> int:
    """Bytes that one decoded token must read: everything but the embedding table."""
    return sum(t.nbytes for n, t in m.catalogue.items() if n != "token_embd.weight")


def products(m: Model, rows: int) -> int:
    """Multiplications of a prompt's matrices: all rows in the layers, one row in the output."""
    sizes = {n: int(np.prod(t.shape)) for n, t in m.catalogue.items() if len(t.shape) > 1}
    inner = sum(size for n, size in sizes.items() if n.startswith("blk."))
    return inner * rows + sizes["output.weight"]
