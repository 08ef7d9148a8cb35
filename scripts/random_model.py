"""A GGUF file of a model's true shape with random weights: speed does not depend on their values.

    python scripts/random_model.py qwen3.5-0.8b q4_k_m qwen.gguf
    python scripts/random_model.py config.json q4_k_m any.gguf
    python scripts/random_model.py --list

Shapes are the published config.json, and the tensors are those that the architecture's own graph
asks for, in the types that `ggraph quantize` gives them. Tokens are SmolLM2's, and unused ones up
to the model's count. A weight repeats some hundred random rows: files are made at the speed of the
disk.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # a clone need not be installed

from stored_weights import HALVES_AT, set_scales

from ggraph import Array, InputError, Tensor, dtypes, weight
from ggraph.decode.model import StepShape
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from ggraph.formats.quants import dequantize
from models.architecture import Architecture
from models.cli.common import model_path
from models.config import DecoderConfig
from models.heads.mtp import drafted
from models.registry import ARCHITECTURES, completed, config_from_hf
from models.rotation import MADE
from models.run.convert import FILE_TYPES, tensor_type, tensor_types, told
from models.step import Step

SIZE = 0.02  # of a weight, about
DISTINCT = 512  # rows of a matrix that differ
NUMBERS = {
    "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq3_s": 26, "iq2_s": 28,
    "iq4_xs": 30, "iq1_m": 31, "nvfp4": 39, "q1_0": 40,
}  # fmt: skip  # of files of types that `convert` does not write

LLAMA = {"vocab_size": 128256, "rope_theta": 500000.0, "num_key_value_heads": 8, "head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, **LLAMA,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, **LLAMA, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "rope_theta": 1e6,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 248320, "mtp_num_hidden_layers": 1,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1e6,
    },
    "granite-4.0-h-1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 1536,
        "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_local_experts": 0,
        "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 100352, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "logits_scaling": 6, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
        "layer_types": [
            "attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)
        ],
    },
    # 3 GB as Q4_K_M: a quarter of Qwen3-30B-A3B's experts, half of what a row reads
    "moe-3gb": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 49152, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1024, "norm_topk_prob": True, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    # 3 GB as Q4_K_M: 7 of the 48 layers of Qwen3-30B-A3B, each of them whole
    "qwen3-moe-3gb": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 7, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
TYPED = {"max_position_embeddings": 32768, "tie_word_embeddings": True}
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
CHOICE = ("exp_probs_b.bias",)
HELD = {  # what a graph takes where it is
    "qwen2": BIASES, "qwen2vl": BIASES, "qwen2moe": BIASES, "glm4": BIASES, "seed_oss": BIASES,
    "lfm2moe": CHOICE, "ernie4_5-moe": CHOICE, "deepseek2": CHOICE, "deepseek_v3": CHOICE,
    "glm4moe": (*BIASES, *CHOICE), "granitehybrid": ("ssm_conv1d.bias",),
}  # fmt: skip


@dataclass
class Listing(Step):
    """A step that takes every weight it asks for, and writes down which; `held` are the optional
    ones that there are."""

    held: tuple[str, ...] = ()
    wrote: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def w(self, name: str, *shape: int) -> Tensor:
        """A weight of any shape."""
        self.wrote[name] = shape
        return weight(name, shape, dtypes.F32)

    def has(self, name: str) -> bool:
        """Whether it is among those that are held."""
        return name.endswith(("token_embd.weight", *self.held))


def opened(values: Mapping[str, Any]) -> tuple[Architecture, DecoderConfig, dict[str, RawTensor]]:
    """The family of a config.json, its config, and empty tensors as its GGUF file holds them."""
    known = {n: a for a in ARCHITECTURES.values() for n in a.hf}
    named = [n for n in values.get("architectures", ()) if n in known]
    if not named:
        raise InputError(f"architectures {values.get('architectures')}: none is known here")
    a = known[named[0]]
    c = config_from_hf(a, {**TYPED, **values})
    held: tuple[str, ...] = HELD.get(a.name, ())
    if not {**TYPED, **values}["tie_word_embeddings"]:
        held += ("output.weight",)
    s = Listing(c, {}, StepShape(1, 1, 1, 1, ()), held=held)
    a.build(s)
    if c.num_nextn_predict_layers:
        s.held += ("nextn.shared_head_norm.weight",)
        drafted(s, weight("feature", (1, c.hidden_size), dtypes.F32))
    found = {n: RawTensor(n, dtypes.F32, d, empty(d)) for n, d in s.wrote.items()}
    stored = a.stored(completed(found, c), c)
    return a, c, {n: t for n, t in stored.items() if n not in MADE}


def empty(shape: tuple[int, ...]) -> Array:
    """Zeros that take no memory."""
    return np.broadcast_to(np.zeros(1, np.float32), shape)


def kinds(shapes: Mapping[str, tuple[int, ...]], type_name: str) -> dict[str, dtypes.DType]:
    """The types of the tensors of a file, those that ggraph does not write included."""
    if type_name not in NUMBERS:
        return tensor_types(shapes, type_name)
    own, found = dtypes.dtype(type_name), tensor_types(shapes, "iq4_nl")
    for name, shape in shapes.items():
        if found[name] is dtypes.IQ4_NL:
            if name in ("token_embd.weight", "output.weight"):
                found[name] = tensor_type(name, shape, "q6_k")
            elif shape[-1] % own.block == 0:
                found[name] = own
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
    scale = SIZE / dequantize(_scaled(blocks[:DISTINCT], dtype, 1, 0), dtype).std()
    floor = 0.0
    if len(HALVES_AT.get(dtype, ())) == 2:  # of minimums, too
        codes, floors = (
            dequantize(_scaled(blocks[:DISTINCT], dtype, *units), dtype).mean()
            for units in ((1, 0), (0, 1))
        )
        floor = -scale * codes / floors
    blocks[:] = _scaled(blocks, dtype, scale, floor)
    return raw


def _scaled(blocks: Array, dtype: dtypes.DType, scale: float, floor: float) -> Array:
    """Blocks with this scale, and what their minimums count in."""
    made = blocks.copy()
    set_scales(made, dtype, np.array([[scale, floor]], np.float16))
    return made


COLUMNS = (".ssm_a", ".ssm_d", "norm.weight")  # vectors that files may hold as columns or in rows


def tensor(t: RawTensor, dtype: dtypes.DType) -> RawTensor:
    """A weight whose rows repeat; norms are ones, biases zeros, decays negative."""
    if len(t.shape) == 1 or t.name.endswith(COLUMNS):
        value = 0.0 if t.name.endswith(".bias") else -1.0 if t.name.endswith(".ssm_a") else 1.0
        made = t.data if np.any(t.data) else np.full(t.shape, value, np.float32)
        return RawTensor(t.name, dtypes.F32, t.shape, made)
    count = prod(t.shape[:-1])
    rows = rows_of(dtype, gcd(count, DISTINCT), t.shape[-1], np.random.default_rng(0))
    # a view: nothing is copied before it is written
    data = np.broadcast_to(rows, (count // len(rows), *rows.shape))
    return replace(t, dtype=dtype, storage=data)


def tokenizer(count: int, file: Path | None = None) -> dict[str, Any]:
    """A file's, else the shipped model's, with unused tokens up to `count`."""
    given = open_checkpoint(file or model_path(None)).metadata
    own = {k: v for k, v in given.items() if k.startswith("tokenizer.")}
    tokens, kinds = (list(own[f"tokenizer.ggml.{k}"]) for k in ("tokens", "token_type"))
    spare = count - len(tokens)
    own["tokenizer.ggml.tokens"] = tokens + [f"<|spare_{i}|>" for i in range(spare)]
    own["tokenizer.ggml.token_type"] = np.array(kinds + [5] * spare, np.int32)
    return own


def write(shape: str, type_name: str, out: Path, tokens: Path | None = None) -> None:
    """One file of a shape of `SHAPES`, or of that which a config.json tells; `tokens`: a file whose
    tokenizer it has."""
    values = SHAPES.get(shape) or json.loads(Path(shape).read_text())
    a, c, found = opened(values)
    types = kinds({n: t.shape for n, t in found.items()}, type_name)
    made = [tensor(replace(t, name=n), types[n]) for n, t in found.items()]
    said = {
        "general.name": f"{shape} (random weights)", "general.quantization_version": 2,
        "general.file_type": (FILE_TYPES | NUMBERS)[type_name],
    }  # fmt: skip
    write_gguf(out, told(a, c) | said | tokenizer(c.vocab_size, tokens), made)


def main() -> int:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("shape", nargs="?", help="a name of --list, or a config.json")
    parser.add_argument("type", nargs="?", help="such as q4_k_m, q8_0, iq2_xs, f16")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true", help="print the shapes")
    asked = parser.parse_args()
    if asked.list or asked.out is None:
        for name, values in SHAPES.items():
            a, _, found = opened(values)
            count = sum(prod(t.shape) for t in found.values())
            print(f"{name:14} {a.gguf:10} {count / 1e9:.2f} billion weights")
        return 0 if asked.list else 2
    write(asked.shape, asked.type, asked.out)
    print(f"{asked.out}: {asked.out.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
