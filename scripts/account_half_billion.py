"""The account of a model of half a billion parameters against the memory that it takes.

    python scripts/account_half_billion.py [--folder DIR]

Writes a GGUF file of Qwen2.5-0.5B's shape (24 layers of 896, feed-forward 4864, 14 heads of which 2
for keys and values, 151,936 tokens; Q4_0, embedding Q8_0) whose numbers are random, runs steps of 1
and of 64 rows in a process each, and prints what resident memory has grown by and what the plan
accounts for. The shape decides, not the numbers: rows repeat every 64. Needs 0.4 GB of disk and of
memory; exits with 1 where the two differ by more than 3 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from small_model import byte_alphabet

from ggraph.dtype import F32, Q4_0, Q8_0, DType
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from ggraph.formats.quants import quantize

LAYERS, WIDTH, INNER, HEADS, GROUPS, TOKENS = 24, 896, 4864, 14, 2, 151_936
PERIOD, MOST = 64, 0.03


def matrix(name: str, rows: int, columns: int, dtype: DType) -> RawTensor:
    """Random rows of which every 64th is the same."""
    rng = np.random.default_rng(len(name))
    drawn = (rng.standard_normal((PERIOD, columns)) * columns**-0.5).astype(np.float32)
    stored = quantize(drawn, dtype)
    data = np.resize(stored.reshape(PERIOD, -1), (rows, stored.size // PERIOD))
    return RawTensor(name, dtype, (rows, columns), data)


def vector(name: str, count: int) -> RawTensor:
    """Ones."""
    return RawTensor(name, F32, (count,), np.ones(count, np.float32))


def tensors() -> Iterator[RawTensor]:
    """All weights, by their GGUF names; the output matrix is the embedding."""
    held = WIDTH // HEADS * GROUPS
    yield matrix("token_embd.weight", TOKENS, WIDTH, Q8_0)
    yield vector("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        for part, rows in (("q", WIDTH), ("k", held), ("v", held)):
            yield matrix(f"blk.{i}.attn_{part}.weight", rows, WIDTH, Q4_0)
            yield vector(f"blk.{i}.attn_{part}.bias", rows)
        yield matrix(f"blk.{i}.attn_output.weight", WIDTH, WIDTH, Q4_0)
        for part, shape in (
            ("gate", (INNER, WIDTH)),
            ("up", (INNER, WIDTH)),
            ("down", (WIDTH, INNER)),
        ):
            yield matrix(f"blk.{i}.ffn_{part}.weight", *shape, Q4_0)
        yield vector(f"blk.{i}.attn_norm.weight", WIDTH)
        yield vector(f"blk.{i}.ffn_norm.weight", WIDTH)


def metadata() -> dict[str, object]:
    """What a qwen2 file says of itself, with a tokenizer of bytes."""
    tokens = [*byte_alphabet(), "ab"]
    tokens += [f"<|unused{i}|>" for i in range(len(tokens), TOKENS)]
    return {
        "general.architecture": "qwen2",
        "general.name": "random-0.5b",
        "qwen2.block_count": LAYERS,
        "qwen2.context_length": 32_768,
        "qwen2.embedding_length": WIDTH,
        "qwen2.feed_forward_length": INNER,
        "qwen2.attention.head_count": HEADS,
        "qwen2.attention.head_count_kv": GROUPS,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [5] * (TOKENS - 257),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def measured(path: Path, rows: int) -> float:
    """How far growth and account are apart, as a share of the account; both are printed."""
    program = ROOT / "tests" / "memory_growth.py"
    done = subprocess.run(
        [sys.executable, str(program), str(path), str(rows)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    (account,) = found["accounts"]
    total = sum(value for name, value in account.items() if name != "device")
    apart = found["grown"] / total - 1
    sys.stdout.write(f"{rows} rows: {account}\n")
    sys.stdout.write(f"  grown by {found['grown']}, accounted for {total}: {apart:+.2%}\n")
    return apart


def main() -> int:
    """Write, measure, compare."""
    parser = argparse.ArgumentParser(description="account of a model of 0.5B against memory")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: removed again)")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        path = Path(folder) / "random-0.5b.gguf"
        write_gguf(path, metadata(), tensors())
        sys.stdout.write(f"{path.stat().st_size} bytes written\n")
        return int(any(abs(measured(path, rows)) > MOST for rows in (1, 64)))


if __name__ == "__main__":
    sys.exit(main())
