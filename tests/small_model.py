"""A complete GGUF model of 320 tokens for tests: the tiny llama with a byte-level tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from models.convert import model_to_gguf
from models.registry import open_model

TINY = Path(__file__).parent / "golden" / "tiny"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def small_model(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the model; `changes` replaces metadata (None removes a key)."""
    bare = path.with_suffix(".bare")
    model_to_gguf(open_model(TINY / "llama_tied"), bare, "f16")
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
