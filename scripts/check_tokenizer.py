"""Compares ggraph's tokenizer with llama.cpp's on generated strings, id for id.

    python scripts/check_tokenizer.py MODEL.gguf [--count 2000] [--pre smollm,llama-bpe,...]
        [--spm] [--small TOKENS] [--record FILE.jsonl]

llama.cpp comes from the package `xllamacpp`; its server runs on this machine's loopback address.
`--pre` gives the model's vocabulary another pre-tokeniser and compares that; `--spm` makes a
SentencePiece vocabulary out of it. Both write a one-layer model with random weights into a
temporary folder; `--small` first cuts the vocabulary to so many tokens. `--record` keeps what
llama.cpp said, for tests/golden (with the cut vocabularies beside it). Exit status 1 on any
difference.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph.text.tokenizer import Tokenizer
from ggraph.text.vocab import byte_level_piece

WORDS = ["Hello", " world", "don't", "I'LL", "_x1", "3.14", "\n", "\r\n", "\t", "  ", "é", "日本語"]
WORDS += [
    "ñandú",
    "🙂",
    "👩‍👩‍👧",
    "١٢٣",
    "Ⅷ",
    "…",
    "。",
    "\u00a0",
    "\u200b",
    "\u2028",
    "ǅ",
    "­",
    "a\u0301",
]


def texts(markers: list[str]) -> st.SearchStrategy[str]:
    """Any Unicode but surrogates, mixed with words, numbers, white space and markers as text."""
    anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
    bmp = st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=24)
    ascii_text = st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=24)
    part = st.one_of(anything, bmp, ascii_text, st.sampled_from(WORDS), st.sampled_from(markers))
    number = st.integers(0, 10**9).map(str)
    return st.lists(st.one_of(part, number), max_size=8).map("".join)


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file as plain values."""
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items()}


class Peer:
    """llama.cpp's tokenizer of one GGUF file, over its own server on the loopback address."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), 64, 1
        params.warmup = False
        self._server = xllamacpp.Server(params)

    def ids(self, text: str, special: bool) -> list[int]:
        """The ids that llama.cpp gives `text`, with its own rule for the bos token."""
        body = {"content": text, "add_special": True, "parse_special": special}
        request = urllib.request.Request(
            self._server.listening_address + "/tokenize",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            return list(json.load(reply)["tokens"])


def small_model(path: Path, metadata: dict[str, Any]) -> None:
    """Writes a one-layer llama model with random weights around the given `tokenizer.*` keys."""
    width, vocab = 32, len(metadata["tokenizer.ggml.tokens"])
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(64)
    w.add_embedding_length(width)
    w.add_feed_forward_length(width)
    w.add_head_count(1)
    w.add_head_count_kv(1)
    w.add_rope_dimension_count(width)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(vocab)
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml."):
            _add(w, key, value)
    rng = np.random.default_rng(0)
    w.add_tensor("token_embd.weight", rng.standard_normal((vocab, width)).astype(np.float32))
    w.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.0.{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        w.add_tensor(f"blk.0.{name}.weight", np.eye(width, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add(w: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        w.add_bool(key, value)
    elif isinstance(value, int):
        w.add_uint32(key, value)
    elif isinstance(value, str):
        w.add_string(key, value)
    else:
        w.add_array(key, value)


def spm_metadata(metadata: dict[str, Any], words: int = 4000) -> dict[str, Any]:
    """A SentencePiece vocabulary made of the first `words` mergeable tokens of a byte-level one."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<|im_end|>"]
    types = [2, 3, 3] + [6] * 256 + [4]
    scores = [0.0] * len(texts)
    for i, token in enumerate(metadata["tokenizer.ggml.tokens"][17 : 17 + words]):
        try:
            text = byte_level_piece(token).decode().replace(" ", "▁")
        except UnicodeDecodeError:
            continue
        if text not in texts and "\0" not in text:  # llama.cpp reads texts as C strings
            texts.append(text)
            types.append(1)
            scores.append(float(-(i // 3)))  # some ties, as real files have
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def cut_metadata(metadata: dict[str, Any], count: int) -> dict[str, Any]:
    """The first `count` tokens of a byte-level vocabulary, with the merges among them."""
    tokens = list(metadata["tokenizer.ggml.tokens"][:count])
    known = set(tokens)
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        if {left, right, left + right} <= known:
            merges.append(merge)
    cut = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": list(metadata["tokenizer.ggml.token_type"][:count]),
        "tokenizer.ggml.merges": merges,
    }
    return {k: v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")} | cut


def compare(name: str, path: Path, metadata: dict[str, Any], count: int, out: Any) -> int:
    """Number of strings on which the two differ; the first few are printed."""
    ours, peer = Tokenizer.from_gguf(metadata), Peer(path)
    markers = [ours.vocabulary.tokens[i] for i in sorted(ours.special_ids)[:8]]
    seen: dict[tuple[str, bool], list[int]] = {}
    bad: list[tuple[str, bool]] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(texts(markers), st.booleans())
    def one(text: str, special: bool) -> None:
        theirs = seen[text, special] = peer.ids(text, special)
        if theirs != ours.encode(text, special=special):
            bad.append((text, special))

    one()
    print(f"{name}: {len(seen)} different strings, {len(bad)} differences")
    for text, special in sorted(bad, key=lambda b: len(b[0]))[:4]:
        print(f"  {text!r} special={special}")
        print(f"    ggraph    {ours.encode(text, special=special)}")
        print(f"    llama.cpp {seen[text, special]}")
    if out is not None:
        for (text, special), ids in seen.items():
            line = {"kind": name, "text": text, "special": special, "ids": ids}
            print(json.dumps(line), file=out)
    return len(bad)


def variants(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Name, file and metadata of every vocabulary that the options ask for."""
    metadata = metadata_of(args.model)
    if args.small:
        metadata = cut_metadata(metadata, args.small)
    if not args.pre and not args.spm:
        yield args.model.stem, args.model, metadata
    for pre in args.pre.split(",") if args.pre else []:
        other = metadata | {"tokenizer.ggml.pre": pre}
        small_model(folder / f"{pre}.gguf", other)
        yield pre, folder / f"{pre}.gguf", other
    if args.spm:
        other = spm_metadata(metadata)
        small_model(folder / "spm.gguf", other)
        yield "spm", folder / "spm.gguf", other


def main() -> int:
    """Runs the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--pre", default="")
    parser.add_argument("--spm", action="store_true")
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    bad = 0
    out = args.record.open("w") if args.record else None
    with tempfile.TemporaryDirectory() as folder:
        for name, path, metadata in variants(args, Path(folder)):
            bad += compare(name, path, metadata, args.count, out)
            if args.record and args.small:
                args.record.with_suffix(f".{name}.json").write_text(json.dumps(metadata))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
