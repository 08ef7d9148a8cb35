"""A complete GGUF model of 320 tokens for tests: the tiny llama with a byte-level tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import dtypes
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.registry import open_model
from models.run.convert import model_to_gguf

TINY = Path(__file__).parent / "golden" / "tiny"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def small_model(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    source: Path = TINY / "llama_tied",
    dtype: str = "f16",
) -> Path:
    """Write the model; `changes` replaces metadata (None removes a key)."""
    bare = path.with_suffix(".bare")
    model_to_gguf(open_model(source), bare, dtype)
    checkpoint = open_checkpoint(bare)
    special = ["<|im_start|>", "<|im_end|>"]
    tokens = [*byte_alphabet(), *special, *(f"<|unused{i}|>" for i in range(62))]
    metadata: dict[str, Any] = {
        **checkpoint.metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 64,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    }
    metadata["tokenizer.ggml.tokens"][319] = "ab"
    metadata["tokenizer.ggml.token_type"][319] = 1
    metadata.update(changes or {})
    kept = {k: v for k, v in metadata.items() if v is not None}
    write_gguf(path, kept, list(checkpoint.tensors.values()))
    bare.unlink()
    return path


def learnable_model(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A small model whose next token follows mostly from the last one, so that it can be learnt.

    The layers of a random model add noise that no head could foresee: theirs is turned down, and
    the output matrix is the embedding with its rows exchanged. `changes` as in `small_model`.
    """
    checkpoint = open_checkpoint(small_model(folder / "plain.gguf", changes))
    tensors = {}
    for name, t in checkpoint.tensors.items():
        quiet = name.endswith(("attn_output.weight", "ffn_down.weight"))
        data = t.float32() * np.float32(0.01 if quiet else 1.0)
        tensors[name] = RawTensor(name, dtypes.F32, t.shape, data)
    embedding = tensors["token_embd.weight"]
    rows = np.random.default_rng(1).permutation(len(embedding.data))
    tensors["output.weight"] = RawTensor(
        "output.weight", dtypes.F32, embedding.shape, embedding.data[rows]
    )
    write_gguf(folder / "small.gguf", checkpoint.metadata, list(tensors.values()))
    return folder / "small.gguf"


def padded(path: Path, count: int) -> Path:
    """The small model with `count` tokens, of which those beyond 320 are twice as likely as any."""
    c = open_checkpoint(small_model(path))
    table = c.tensors["token_embd.weight"].float32()[:count]
    more = 2 * table[np.arange(max(0, count - 320)) % 320]
    rows = np.concatenate([table, more, -more])[:count]
    tokens = [*c.metadata["tokenizer.ggml.tokens"], *(f"[PAD{i}]" for i in range(320, count))]
    tokens[:5] = [f"<{i}>" for i in range(5)]
    told = {"tokenizer.ggml.tokens": tokens[:count], "llama.vocab_size": count}
    others = [t for n, t in c.tensors.items() if n != "token_embd.weight"]
    made = RawTensor("token_embd.weight", dtypes.F32, rows.shape, rows)
    write_gguf(path, {**c.metadata, **told}, [made, *others])
    return path
