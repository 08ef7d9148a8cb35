"""The tokenizer of a Hugging Face folder as the keys that a GGUF file has for it.

GGUF has no patterns, only names of pre-tokenisers, and SentencePiece scores where a folder ranks
merges. So the name is found by trying how each known kind cuts every three neighbours of a small
alphabet, and what comes out is read back and held against the folder's own engine on a text: a
tokenizer that GGUF cannot say is refused, for ids that are nearly right are worse than none.
What only the folder says has keys of ours (vocab.py), which llama.cpp passes over: a warning then
says where it reads other ids.

Source of the keys: the GGUF specification (ggml `docs/gguf.md`).
"""

import warnings
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.errors import FormatError, FormatWarning
from ggraph.text.bpe import word_cutter
from ggraph.text.hf import HfEncoder, load_hf, parsed_tokenizer
from ggraph.text.pre import PRE_TOKENIZERS
from ggraph.text.tokenizer import Tokenizer
from ggraph.text.unigram import CHARSMAP, LEADS, ONE_SPACE, charsmap_of
from ggraph.text.vocab import (
    ADD_SEP,
    BYTE,
    CONTROL,
    LSTRIP,
    NORMAL,
    NORMALIZER,
    PREFIX,
    PREPEND_SCHEME,
    RSTRIP,
    SPACE,
    SUFFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    end_ids,
    phi3_strips,
)
from ggraph.text.wordpiece import SEP, gguf_form, normalizer_keys

# Upper and lower case, title case, a modifier, letters without case, marks, numbers of three kinds,
# punctuation and symbols that a pattern names, white space of each kind, and contractions' letters.
_ALPHABET = "AaSsTeDǅʰא中かカ한\u0301\u0903１½Ⅷ37'\"_-/.,`$|^«€。🙂 \n\r\t\u00a0\u200b"
_SPACES = " a  b "
_RUNS = "1 22 333 4444 55555 666666 7777777 I'LL we'll don't HTMLParser x1y22z333 a  b   c\n\n d "
_TEXT = (
    "The sea, by night: 1234567 waves/s & 3.14 ideas (don't ask). I'LL be back!\n\n\tdef f(x):\n"
    "        return x ** 2  # naïve café — “quoted” …\r\n東京で会いましょう。Привет, мир! 안녕 🙂"
)
_SAMPLES = 4000  # tokens whose own texts are read back
_MARKERS = 500  # and markers
_NEVER = -10000.0  # the score of what is in no text, as llama.cpp's converter has it
_NO_FORM = "GGUF has no form for its tokenizer:"


def gguf_keys(folder: Path, size: int, *, ranked: bool = False) -> dict[str, Any]:
    """The `tokenizer.*` keys for the folder's tokenizer, with ids up to `size`, the model's rows.

    Texts encode with them as in the folder. `ranked` keeps the ranks of a SentencePiece's merges,
    as files of Gemma 4 do, where its texts begin as theirs. FormatError when a file is missing or
    bad, and for a tokenizer that GGUF has no form for. FormatWarning where llama.cpp will read
    other ids than ggraph.
    """
    encoder, v = load_hf(folder, size)
    parsed = parsed_tokenizer(folder)
    model = parsed["model"]
    if len(v.tokens) > size:
        raise FormatError(f"{folder}: the tokenizer has {len(v.tokens)} ids, the model {size} rows")
    if model.get("type") in ("WordPiece", "Unigram"):
        keys = (_word_piece if model["type"] == "WordPiece" else _unigram)(folder, v, parsed)
        own = Tokenizer(v, encoder, encoder.encode_special)
        _read_back(folder, keys, own)
        if own.encode(_SPACES) != Tokenizer.from_gguf(keys).encode(_SPACES):
            _warn_of_spaces(folder)
        return keys
    v = _framed(v)
    begins = v.bos_id is not None and v.prefix[:1] == (v.bos_id,)
    ranked = ranked and begins and v.space_prefix == "never"
    keys = {
        **_kind(folder, encoder, model, ranked),
        "tokenizer.ggml.tokens": [t or f"[PAD{i}]" for i, t in enumerate(v.tokens)],
        "tokenizer.ggml.token_type": np.array([*_types(v)], np.int32),
        "tokenizer.ggml.add_bos_token": begins,
        **({"tokenizer.ggml.add_eos_token": True} if _closing(v) is not None else {}),
        **_roles(v),
        **_parted(v),
        **_beyond(v),
    }
    if keys["tokenizer.ggml.model"] != "gpt2":
        # In a chat text is behind markers, where "first" puts none: llama.cpp then agrees there.
        first = v.space_prefix == "first" and v.chat_template is not None
        keys["tokenizer.ggml.add_space_prefix"] = v.space_prefix != "never" and not first
    if keys["tokenizer.ggml.model"] == "llama":
        keys["tokenizer.ggml.scores"] = _scores(_merges(model), keys["tokenizer.ggml.tokens"])
    if v.chat_template is not None:
        keys["tokenizer.chat_template"] = v.chat_template
    pre = PRE_TOKENIZERS.get(keys.get("tokenizer.ggml.pre", ""))
    if pre is not None and pre.ignore_merges != bool(model.get("ignore_merges")):
        # No difference, if merges make every token anyway: asked of the folder's own engine, which
        # reads all of them in the time in which ours reads the samples, as that engine does.
        texts = [v.pieces[i].decode("utf-8", "ignore") for i in _plain(v)]
        if (odd := encoder.told_apart(texts, ignore_merges=pre.ignore_merges)) is not None:
            raise FormatError(f"{folder}: {_NO_FORM} {odd[:40]!r} is a token that no merges make")
    _read_back(folder, keys, Tokenizer(v, encoder, encoder.encode_special))
    _warn(folder, keys, v)
    return keys


def _kind(folder: Path, encoder: HfEncoder, model: dict[str, Any], ranked: bool) -> dict[str, Any]:
    """Which of the three forms of GGUF this is, with what tells its words apart."""
    bytewise = encoder.words("é") == ["Ã©"]
    if "merges" not in model or not (bytewise or model.get("byte_fallback")):
        kind = model.get("type", "unknown")
        raise FormatError(
            f"{folder}: a tokenizer of type {kind} is not written to GGUF files, only byte-level "
            "BPE, BPE with bytes for unknown characters, WordPiece and Unigram; -m runs the folder "
            "itself"
        )
    merges = {"tokenizer.ggml.merges": [" ".join(m) for m in _merges(model)]}
    if not bytewise and ranked:
        return {"tokenizer.ggml.model": "gemma4", **merges}
    if not bytewise:
        return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    pre = pre_name(folder, encoder, bool(model.get("ignore_merges")))
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **merges}


def _word_piece(folder: Path, v: Vocabulary, parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a WordPiece vocabulary. FormatError where texts do not stand between two tokens
    as BERT's do. By eos without sep llama.cpp ends both of two texts as these do."""
    if (len(v.prefix), len(v.suffix)) != (1, 1):
        raise FormatError(f"{folder}: {_NO_FORM} texts between {v.prefix} and {v.suffix}")
    begins, closes = v.prefix[0], v.suffix[0]
    named = {"[PAD]": "padding", "[MASK]": "mask"}
    roles = {
        "bos": begins, "cls": begins, "eos": closes, "seperator": closes,
        "unknown": v.tokens.find(str(parsed["model"].get("unk_token", "[UNK]"))),
        **{role: v.tokens.find(text) for text, role in named.items()},
    }  # fmt: skip
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": False,
        "tokenizer.ggml.tokens": [
            (t if i in v.control else gguf_form(t)) if t else f"[PAD{i}]"
            for i, t in enumerate(v.tokens)
        ],
        "tokenizer.ggml.token_type": np.array([*_types(v)], np.int32),
        **normalizer_keys(parsed.get("normalizer")),
        **{f"tokenizer.ggml.{r}_token_id": i for r, i in roles.items() if i is not None},
    }


def _framed(v: Vocabulary) -> Vocabulary:
    """With names for the one token before a text and the one behind it, where a folder has none, as
    ModernBERT's: GGUF knows only of bos and eos there."""
    if (v.bos_id, v.eos_id) != (None, None) or (len(v.prefix), len(v.suffix)) != (1, 1):
        return v
    (begins,), (closes,) = v.prefix, v.suffix
    return replace(v, bos_id=begins, eos_id=closes, eos_ids=v.eos_ids | {closes})


def _unigram(folder: Path, v: Vocabulary, parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a Unigram vocabulary, where white space only tells words apart: so SentencePiece
    has it for XLM-R, and transformers whatever a folder says. FormatError where texts do not stand
    between two tokens."""
    model, charsmap = parsed["model"], charsmap_of(parsed.get("normalizer"))
    if (len(v.prefix), len(v.suffix)) != (1, 1) or model.get("byte_fallback"):
        raise FormatError(f"{folder}: {_NO_FORM} Unigram between {v.prefix} and {v.suffix}")
    v = replace(v, unk_id=model.get("unk_id"))
    scores = np.full(len(v.tokens), _NEVER, np.float32)
    scores[: len(model["vocab"])] = [score for _, score in model["vocab"]]
    found = {} if charsmap is None else {CHARSMAP: np.frombuffer(b64decode(charsmap), np.uint8)}
    roles = {
        "bos": v.prefix[0], "cls": v.prefix[0], "eos": v.suffix[0], "seperator": v.suffix[0],
        "unknown": v.unk_id, "padding": v.tokens.find("<pad>"), "mask": v.tokens.find("<mask>"),
    }  # fmt: skip
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [t or f"[PAD{i}]" for i, t in enumerate(v.tokens)],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array([*_types(v)], np.int32),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        LEADS: True,
        ONE_SPACE: True,
        **found,
        **{f"tokenizer.ggml.{r}_token_id": i for r, i in roles.items() if i is not None},
        **_parted(v),
    }


def _parted(v: Vocabulary) -> dict[str, Any]:
    """What stands between two texts."""
    if len(v.between) != 1:
        return {}
    return {ADD_SEP: True, SEP: v.between[0]}


def pre_name(folder: Path, encoder: HfEncoder, ignore_merges: bool) -> str:
    """The name by which GGUF knows how `encoder` cuts text, if it can one that means
    `ignore_merges`. FormatError where it has none."""
    probes = (_RUNS, "".join(neighbours(_ALPHABET)))  # the short one rules most kinds out
    names = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}  # the first of each
    for kind in sorted(names, key=lambda kind: kind.ignore_merges != ignore_merges):
        cut = word_cutter(kind).pre_tokenize_str
        if all([w for w, _ in cut(probe)] == encoder.words(probe) for probe in probes):
            return names[kind]
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
    named = [_closing(v), v.eos_id]
    others = sorted(v.eos_ids - end_ids(v.tokens, named))
    ends = dict.fromkeys(i for i in (*named, *others) if i is not None)
    roles = {"bos": v.bos_id, "unknown": v.unk_id, **v.fim}
    roles |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    return {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None}


def _closing(v: Vocabulary) -> int | None:
    """The one token behind complete texts, where it ends answers, too: GGUF's eos then, whatever
    the folder calls so, for llama.cpp puts no other there."""
    one = v.suffix[0] if len(v.suffix) == 1 else None
    return one if one in v.eos_ids else None


def _beyond(v: Vocabulary) -> dict[str, Any]:
    """What GGUF's own keys have no word for."""
    keys: dict[str, Any] = {}
    if v.space_prefix in ("first", "always"):
        keys[PREPEND_SCHEME] = v.space_prefix
    if v.normalizer is not None:
        keys[NORMALIZER] = v.normalizer
    ids = {
        PREFIX: v.prefix if v.prefix != (v.bos_id,) else (),
        SUFFIX: v.suffix if _closing(v) is None else (),
        LSTRIP: sorted(v.lstrip),
        RSTRIP: sorted(v.rstrip),
    }
    return keys | {k: np.array(i, np.int32) for k, i in ids.items() if i}


def _warn(folder: Path, keys: Mapping[str, Any], v: Vocabulary) -> None:
    """Says what llama.cpp passes over. It knows of Phi-3's markers by the name of the model."""
    known = phi3_strips({"general.name": folder.name}, v.tokens, v.control | v.user_defined)
    strips = sorted(v.lstrip | (v.rstrip - known))
    some = ", ".join(repr(v.tokens[i]) for i in strips[:3]) + ", .." * (len(strips) > 3)
    begins, closes = ("".join(v.tokens[i] for i in ids) for ids in (v.prefix, v.suffix))
    lost = {
        PREPEND_SCHEME: f"a space is put before text as Metaspace's {v.space_prefix!r} has it",
        NORMALIZER: f"text is brought to {v.normalizer}",
        PREFIX: f"prompts begin with {begins!r}",
        SUFFIX: f"texts to embed end with {closes!r}",
        LSTRIP if v.lstrip else RSTRIP: f"markers take white space beside them: {some}",
    }
    said = [
        text
        for key, text in lost.items()
        if key in keys and (strips or key not in (LSTRIP, RSTRIP))
    ]
    if said:
        warnings.warn(
            f"{folder}: ggraph reads of the file what llama.cpp has no key for and passes over, "
            f"which may give it other tokens: {'; '.join(said)}",
            FormatWarning,
            stacklevel=3,
        )


def _warn_of_spaces(folder: Path) -> None:
    """Says what GGUF has no key for."""
    warnings.warn(
        f"{folder}: spaces at the ends of a text, or beside other spaces, are tokens by its "
        "tokenizer.json; of the file they are none, as transformers and llama.cpp have it",
        FormatWarning,
        stacklevel=3,
    )


def _scores(merges: list[Sequence[str]], tokens: list[str]) -> Any:
    """The earlier a token is made, the higher; what no merge makes comes last."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return np.array([-float(ranks.get(t, len(merges))) for t in tokens], np.float32)


def _plain(v: Vocabulary) -> list[int]:
    """Ids of ordinary tokens."""
    return [i for i in range(len(v.tokens)) if i not in v.control]


def _read_back(folder: Path, keys: dict[str, Any], own: Tokenizer) -> None:
    """FormatError where what the keys say gives other ids or ends than the folder, of the texts of
    some ordinary tokens among others."""
    again = Tokenizer.from_gguf(keys)
    if again.eos_ids != own.eos_ids:
        raise FormatError(f"{folder}: GGUF cannot name its ends {sorted(own.eos_ids)}")
    v = own.vocabulary
    plain = _plain(v)
    some = plain[:: len(plain) // _SAMPLES + 1]
    texts = [_TEXT, *(v.pieces[i].decode("utf-8", "ignore") for i in some)]
    spaces = keys["tokenizer.ggml.model"] != "t5"
    for special, text in [*((False, t) for t in texts), *((True, t) for t in _around(v))]:
        if not spaces:  # but those between words: `_warn_of_spaces`
            text = ("" if special else " ").join(text.split())
        found, meant = (t.encode(text, special=special) for t in (again, own))
        if found != meant:
            raise FormatError(
                f"{folder}: {_NO_FORM} {text[:40]!r} would become "
                f"{found[:8]} instead of {meant[:8]}"
            )


def _around(v: Vocabulary) -> Iterator[str]:
    """Markers within words, between spaces and side by side: those that take white space, and some
    of the others, of which a file may hold thousands."""
    runs = {i for i in v.user_defined if _is_spaces(v.tokens[i], v.pieces[i])}
    every = sorted((v.control | v.user_defined) - runs)
    for i in {*v.lstrip, *v.rstrip, *every[:: len(every) // _MARKERS + 1]}:
        text = v.tokens[i]
        if text:
            yield f"a{text}a {text} a\n\n{text}\n{text}{text} "
            yield f"{text}\ta"
