"""A GGUF file of a model's true shape with random weights: speed does not depend on their values.

    python scripts/random_model.py llama-3.2-1b q4_k_m llama.gguf
    python scripts/random_model.py --list

Shapes are those of the published configurations; which tensors a Q4_K_M file keeps wider is
llama.cpp's rule (`use_more_bits`). Tokens are SmolLM2's, and unused ones up to the model's count.
A weight repeats a few thousand random rows: files are made at the speed of the disk.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import Array, dtypes
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.cli.common import model_path
from models.run.convert import tensor_type

SIZE = 0.02  # of a weight, about
DISTINCT = 512  # rows of a matrix that differ


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, as the GGUF keys name them; `experts` of which `used` read a row."""

    architecture: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float
    tied: bool = True
    experts: int = 0
    used: int = 0
    keys: tuple[tuple[str, Any], ...] = ()


SHAPES = {
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 500000.0),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, 1e6),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e6),
    "gemma-3-1b": Shape(
        "gemma3", 26, 1152, 6912, 4, 1, 256, 262144, 1e6, keys=(("attention.sliding_window", 512),)
    ),
    # 3 GB as Q4_K_M: a quarter of Qwen3-30B-A3B's experts, half of what a row reads
    "moe-3gb": Shape(
        "qwen3moe", 24, 2048, 1024, 32, 4, 64, 49152, 1e6, tied=False, experts=32, used=4
    ),
}


def tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, NumPy order."""
    yield "token_embd.weight", (s.vocabulary, s.width)
    yield "output_norm.weight", (s.width,)
    if not s.tied:
        yield "output.weight", (s.vocabulary, s.width)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for i in range(s.layers):
        own = {
            "attn_norm": (s.width,), "attn_q": (q, s.width), "attn_k": (kv, s.width),
            "attn_v": (kv, s.width), "attn_output": (s.width, q), "ffn_norm": (s.width,),
        }  # fmt: skip
        if s.architecture in ("qwen3", "qwen3moe", "gemma3"):
            own |= {"attn_q_norm": (s.head_dim,), "attn_k_norm": (s.head_dim,)}
        if s.architecture == "gemma3":
            own |= {"post_attention_norm": (s.width,), "post_ffw_norm": (s.width,)}
        if s.experts:
            into, out = (s.experts, s.ffn, s.width), (s.experts, s.width, s.ffn)
            own |= {"ffn_gate_inp": (s.experts, s.width), "ffn_gate_exps": into}
            own |= {"ffn_up_exps": into, "ffn_down_exps": out}
        else:
            own |= {"ffn_gate": (s.ffn, s.width), "ffn_up": (s.ffn, s.width)}
            own |= {"ffn_down": (s.width, s.ffn)}
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in own.items())
        if s.architecture == "qwen2":
            sizes = (("attn_q", q), ("attn_k", kv), ("attn_v", kv))
            yield from ((f"blk.{i}.{name}.bias", (n,)) for name, n in sizes)


def more_bits(layer: int, layers: int) -> bool:
    """Whether a Q4_K_M file has this layer's values and down projection in Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def type_of(name: str, shape: tuple[int, ...], type_name: str, layers: int) -> dtypes.DType:
    """The type of a tensor in a file of `type_name`."""
    if type_name == "iq4_xs":
        plain = tensor_type(name, shape, "iq4_nl")
        table = name in ("token_embd.weight", "output.weight")
        if plain is dtypes.IQ4_NL and table:
            return tensor_type(name, shape, "q6_k")
        return dtypes.IQ4_XS if plain is dtypes.IQ4_NL and shape[-1] % 256 == 0 else plain
    found = tensor_type(name, shape, type_name)
    if type_name != "q4_k_m":
        return found
    kinds = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")
    if name.startswith("blk.") and name.endswith(kinds):
        wide = more_bits(int(name.split(".")[1]), layers)
        return tensor_type(name, shape, "q6_k" if wide else "q4_k")
    return found


def rows_of(dtype: dtypes.DType, n: int, k: int, rng: np.random.Generator) -> Array:
    """Storage of [n, k]: any codes, and scales that make weights of about SIZE with mean zero."""
    if not dtype.is_block:
        values = (rng.standard_normal((n, k)) * SIZE).astype(np.float32)
        if dtype is dtypes.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype.np)
    raw = rng.integers(0, 256, (n, dtype.row_bytes(k)), dtype=np.uint8)
    blocks = raw.reshape(-1, dtype.block_bytes)
    # where the scale lies, how large codes (times integer scales) are, the minimum in scales
    at, size, minimum = {
        "q4_0": (0, 4.6, 0.0), "q4_1": (0, 4.6, -7.5), "q5_0": (0, 9.2, 0.0),
        "q5_1": (0, 9.2, -15.5), "q8_0": (0, 74.0, 0.0), "q4_k": (0, 145.0, 7.5),
        "q5_k": (0, 290.0, 15.5), "q6_k": (208, 1360.0, 0.0), "q3_k": (108, 42.0, 0.0),
        "iq4_nl": (0, 70.0, 0.0), "iq4_xs": (0, 1300.0, 0.0), "mxfp4": (-1, 0.0, 0.0),
    }[dtype.name]  # fmt: skip
    if at < 0:
        blocks[:, 0] = 120  # the exponent of 2^-8
        return raw
    scale = SIZE / size
    blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    if minimum:
        blocks[:, 2:4] = np.array([scale * minimum], np.float16).view(np.uint8)
    return raw


def tensor(name: str, shape: tuple[int, ...], dtype: dtypes.DType) -> RawTensor:
    """A weight whose rows repeat; norms are ones."""
    if len(shape) == 1:
        return RawTensor(name, dtypes.F32, shape, np.ones(shape, np.float32))
    count = prod(shape[:-1])
    rows = rows_of(dtype, gcd(count, DISTINCT), shape[-1], np.random.default_rng(0))
    # a view: nothing is copied before it is written
    return RawTensor(name, dtype, shape, np.broadcast_to(rows, (count // len(rows), *rows.shape)))


def metadata(s: Shape, name: str) -> dict[str, Any]:
    """The keys of the architecture, and the tokenizer's."""
    a = s.architecture
    own: dict[str, Any] = {
        "general.architecture": a, "general.name": f"{name} (random weights)",
        "general.quantization_version": 2, f"{a}.block_count": s.layers,
        f"{a}.context_length": 32768, f"{a}.embedding_length": s.width,
        f"{a}.feed_forward_length": s.ffn, f"{a}.attention.head_count": s.heads,
        f"{a}.attention.head_count_kv": s.kv_heads, f"{a}.attention.key_length": s.head_dim,
        f"{a}.attention.value_length": s.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.rope.freq_base": s.rope_base,
        f"{a}.rope.dimension_count": s.head_dim, f"{a}.vocab_size": s.vocabulary,
        **{f"{a}.{key}": value for key, value in s.keys},
    }  # fmt: skip
    if s.experts:
        own |= {f"{a}.expert_count": s.experts, f"{a}.expert_used_count": s.used}
        own[f"{a}.expert_feed_forward_length"] = s.ffn
    given = open_checkpoint(model_path(None)).metadata
    own |= {k: v for k, v in given.items() if k.startswith("tokenizer.")}
    tokens, kinds = (list(own[f"tokenizer.ggml.{k}"]) for k in ("tokens", "token_type"))
    spare = s.vocabulary - len(tokens)
    own["tokenizer.ggml.tokens"] = tokens + [f"<|spare_{i}|>" for i in range(spare)]
    own["tokenizer.ggml.token_type"] = np.array(kinds + [5] * spare, np.int32)
    return own


def write(name: str, type_name: str, out: Path) -> None:
    """The file of a shape and a type."""
    s = SHAPES[name]
    made = [tensor(n, d, type_of(n, d, type_name, s.layers)) for n, d in tensors(s)]
    write_gguf(out, metadata(s, name), made)


def main() -> int:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("shape", nargs="?", choices=list(SHAPES))
    parser.add_argument("type", nargs="?", help="such as q4_k_m, q4_0, q6_k, q8_0, iq4_xs, f16")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true", help="print the shapes")
    asked = parser.parse_args()
    if asked.list or asked.out is None:
        for name, s in SHAPES.items():
            count = sum(prod(shape) for _, shape in tensors(s))
            print(f"{name:14} {s.architecture:10} {count / 1e9:.2f} billion weights")
        return 0 if asked.list else 2
    write(asked.shape, asked.type, asked.out)
    print(f"{asked.out}: {asked.out.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
