"""The tokenizer of a Hugging Face folder as the keys that a GGUF file has for it.

GGUF has no patterns, only names of pre-tokenisers, and SentencePiece scores where a folder ranks
merges. So the name is found by trying how each known kind cuts every three neighbours of a small
alphabet, and what comes out is read back and held against the folder's own engine on a text: a
tokenizer that GGUF cannot say is refused, for ids that are nearly right are worse than none.
What llama.cpp never does either is lost: Unicode normalisation before encoding, and white space or
ends of words that an added token asks for, but for the white space behind Phi-3's markers.

Source of the keys: the GGUF specification (ggml `docs/gguf.md`).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.errors import FormatError
from ggraph.text.bpe import word_cutter
from ggraph.text.hf import HfEncoder, load_hf
from ggraph.text.pre import PRE_TOKENIZERS
from ggraph.text.tokenizer import Tokenizer
from ggraph.text.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    end_ids,
)

# Upper and lower case, title case, a modifier, letters without case, marks, numbers of three kinds,
# punctuation and symbols that a pattern names, white space of each kind, and contractions' letters.
_ALPHABET = "AaSsTeDǅʰא中かカ한\u0301\u0903１½Ⅷ37'\"_-/.,`$|^«€。🙂 \n\r\t\u00a0\u200b"
_RUNS = "1 22 333 4444 55555 666666 7777777 I'LL we'll don't HTMLParser x1y22z333 a  b   c\n\n d "
_TEXT = (
    "The sea, by night: 1234567 waves/s & 3.14 ideas (don't ask). I'LL be back!\n\n\tdef f(x):\n"
    "        return x ** 2  # naïve café — “quoted” …\r\n東京で会いましょう。Привет, мир! 안녕 🙂"
)
_SAMPLES = 4000  # tokens whose own texts are read back


def gguf_keys(folder: Path, size: int, *, ranked: bool = False) -> dict[str, Any]:
    """The `tokenizer.*` keys for the folder's tokenizer, with ids up to `size`, the model's rows.

    Texts encode with them as in the folder. `ranked` keeps the ranks of a SentencePiece's merges,
    as files of Gemma 4 do, where its texts begin as theirs. FormatError when a file is missing or
    bad, and for a tokenizer that GGUF has no form for.
    """
    encoder, v = load_hf(folder, size)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    if len(v.tokens) > size:
        raise FormatError(f"{folder}: the tokenizer has {len(v.tokens)} ids, the model {size} rows")
    ranked = ranked and v.add_bos and not v.space_prefix
    keys: dict[str, Any] = {
        **_kind(folder, encoder, model, ranked),
        "tokenizer.ggml.tokens": [t or f"[PAD{i}]" for i, t in enumerate(v.tokens)],
        "tokenizer.ggml.token_type": np.array([*_types(v)], np.int32),
        "tokenizer.ggml.add_bos_token": v.add_bos,
        **_roles(v),
    }
    if keys["tokenizer.ggml.model"] != "gpt2":
        keys["tokenizer.ggml.add_space_prefix"] = v.space_prefix
    if keys["tokenizer.ggml.model"] == "llama":
        keys["tokenizer.ggml.scores"] = _scores(_merges(model), keys["tokenizer.ggml.tokens"])
    if v.chat_template is not None:
        keys["tokenizer.chat_template"] = v.chat_template
    return _read_back(folder, keys, Tokenizer(v, encoder, encoder.encode_special))


def _kind(folder: Path, encoder: HfEncoder, model: dict[str, Any], ranked: bool) -> dict[str, Any]:
    """Which of the three forms of GGUF this is, with what tells its words apart."""
    bytewise = encoder.words("é") == ["Ã©"]
    if "merges" not in model or not (bytewise or model.get("byte_fallback")):
        kind = model.get("type", "unknown")
        raise FormatError(
            f"{folder}: a tokenizer of type {kind} is not written to GGUF files, only byte-level "
            "BPE and BPE with bytes for unknown characters; -m runs the folder itself"
        )
    merges = {"tokenizer.ggml.merges": [" ".join(m) for m in _merges(model)]}
    if not bytewise and ranked:
        return {"tokenizer.ggml.model": "gemma4", **merges}
    if not bytewise:
        return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    pre = pre_name(folder, encoder, bool(model.get("ignore_merges")))
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **merges}


def pre_name(folder: Path, encoder: HfEncoder, ignore_merges: bool) -> str:
    """The name by which GGUF knows how `encoder` cuts text. FormatError where it has none."""
    probes = (_RUNS, "".join(neighbours(_ALPHABET)))  # the short one rules most kinds out
    names = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}  # the first of each
    for kind, name in names.items():
        cut = word_cutter(kind).pre_tokenize_str
        if kind.ignore_merges == ignore_merges and all(
            [w for w, _ in cut(probe)] == encoder.words(probe) for probe in probes
        ):
            return name
    raise FormatError(f"{folder}: no pre-tokeniser that GGUF has a name for cuts text like this")


def neighbours(alphabet: str) -> Iterator[str]:
    """Letters in an order that has every three of `alphabet` side by side, each exactly once.

    The de Bruijn sequence, as Lyndon words in order. Source: Fredricksen and Maiorana 1978.
    """
    n, word = len(alphabet), [-1]
    while word:
        word[-1] += 1
        if 3 % len(word) == 0:
            yield from (alphabet[i] for i in word)
        word = (word * 3)[:3]
        while word and word[-1] == n - 1:
            word.pop()


def _merges(model: dict[str, Any]) -> list[Sequence[str]]:
    """Pairs by rank; older files write them as one text."""
    return [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]


def _types(v: Vocabulary) -> Iterator[int]:
    for i, text in enumerate(v.tokens):
        if not text:
            yield UNUSED
        elif i == v.unk_id and i in v.control:
            yield UNKNOWN
        elif i in v.control:
            yield CONTROL
        elif i in v.user_defined and not _is_spaces(text, v.pieces[i]):
            yield USER_DEFINED
        else:
            yield BYTE if text.startswith("<0x") and len(v.pieces[i]) == 1 else NORMAL


def _is_spaces(text: str, piece: bytes) -> bool:
    """Whether it is one of Gemma's runs of spaces, which merges make too: of user-defined tokens
    readers show the letters."""
    return not text.strip(SPACE) and piece == b" " * len(text)


def _roles(v: Vocabulary) -> dict[str, int]:
    """Ids by role. Of a folder's ends GGUF names up to three; others are known by their texts."""
    by_text = end_ids(v.tokens, [v.eos_id])
    ends = [v.eos_id, *sorted(v.eos_ids - by_text)]
    roles = {"bos": v.bos_id, "unknown": v.unk_id}
    roles |= dict(zip(("eos", "eot", "eom"), [i for i in ends if i is not None], strict=False))
    return {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None}


def _scores(merges: list[Sequence[str]], tokens: list[str]) -> Any:
    """The earlier a token is made, the higher; what no merge makes comes last."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return np.array([-float(ranks.get(t, len(merges))) for t in tokens], np.float32)


def _read_back(folder: Path, keys: dict[str, Any], own: Tokenizer) -> dict[str, Any]:
    """The keys, when what they say gives the ids and ends that the folder gives."""
    again = Tokenizer.from_gguf(keys)
    if again.eos_ids != own.eos_ids:
        raise FormatError(f"{folder}: GGUF cannot name its ends {sorted(own.eos_ids)}")
    v = own.vocabulary
    plain = [i for i in range(len(v.tokens)) if i not in v.control]
    some = plain[:: len(plain) // _SAMPLES + 1]
    for text in (_TEXT, *(v.pieces[i].decode("utf-8", "ignore") for i in some)):
        if again.encode(text) != own.encode(text):
            raise FormatError(
                f"{folder}: GGUF has no form for its tokenizer: {text[:40]!r} would become "
                f"{again.encode(text)[:8]} instead of {own.encode(text)[:8]}"
            )
    return keys
