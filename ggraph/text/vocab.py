"""What a vocabulary is, and how it is read from GGUF metadata.

A `Vocabulary` knows ids, texts, bytes and roles; it cannot split text. Encoders are in
bpe.py and spm.py, the class that users hold is in tokenizer.py.

Legend: V tokens in the vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from ggraph import Array
from ggraph.errors import FormatError, shown
from ggraph.formats.strings import Pieces, Texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types as GGUF numbers them."""

SPACE = "▁"
"""What SentencePiece vocabularies write for a space."""

SpacePrefix = Literal["never", "first", "always", "every"]
"""Where a space is put before text: see `Vocabulary`."""

NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
UNK = "tokenizer.ggml.unknown_token_id"
ADD_SEP = "tokenizer.ggml.add_sep_token"  # between two texts, beside what the first ends with
# What a folder's tokenizer.json says and no key of GGUF's own can: llama.cpp passes these over.
PREPEND_SCHEME = "tokenizer.huggingface.prepend_scheme"  # of Metaspace: first or always
PREFIX = "tokenizer.huggingface.prefix_token_ids"
SUFFIX = "tokenizer.huggingface.suffix_token_ids"
LSTRIP, RSTRIP = "tokenizer.huggingface.lstrip_token_ids", "tokenizer.huggingface.rstrip_token_ids"
NORMALIZER = "tokenizer.huggingface.normalizer"  # a NormalForm


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_END_TEXTS = _words(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
)
# Fill-in-the-middle tokens by GGUF's role, of Qwen, StarCoder, DeepSeek, Code Llama, GLM, Falcon,
# Seed-Coder, Codestral and Granite.
FIM_TEXTS = {
    "fim_pre": _words(
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>"
        " <|prefix|> <[fim-prefix]> [PREFIX]"
    ),
    "fim_suf": _words(
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>"
        " <|suffix|> <[fim-suffix]> [SUFFIX]"
    ),
    "fim_mid": _words(
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>"
        " <|middle|> <[fim-middle]> [MIDDLE]"
    ),
    "fim_pad": _words("<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    # Before a repository's name and before a file's: of their texts only those that llama.cpp
    # takes for the end of an answer.
    "fim_rep": _words("<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": _words("<|file_sep|>"),
}
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # a chat never goes on after these
# What GGUF called these roles before
_OLD_ROLES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# Of gpt-oss and Gemma 4: llama.cpp and its converter call these text, since its readers of answers
# look for them there. Here their ids are looked for (stream.py), so that nobody can type one.
_PART_TEXTS = _words(
    "<|channel|> <|message|> <|start|> <|constrain|> <|channel> <channel|> <|tool_call>"
    ' <tool_call|> <tool_response|> <|"|>'
)


@dataclass(frozen=True)
class Vocabulary:
    """Ids and what they stand for.

    `tokens[i]` is the text of id i as the file writes it, `pieces[i]` the bytes it adds to the
    output. `control` ids are markers: parsed from text only on request and left out of shown
    text. `user_defined` ids are parsed always. `prefix`: the ids that every prompt begins with,
    bos or several; `suffix`: those that a text ends with which is not to go on, as one to embed;
    `between`: what then stands before a second text that is judged with it.
    `space_prefix`: a space is put before the `first` of the parts that markers cut
    a text into, where the text begins with it, `always` before each, both unless one stands there,
    or before `every` one whatever it begins with (and is taken off again). `lstrip` and `rstrip`:
    markers that take the white space before and behind them. `normalizer`: Unicode's normal form
    that text is brought to. `fim`: ids for filling in the middle by GGUF's role (`fim_pre`), of
    roles that there are. A hole in the ids has an empty text and no bytes.
    """

    tokens: Texts
    pieces: Sequence[bytes]
    control: frozenset[int]
    user_defined: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    space_prefix: SpacePrefix = "never"
    chat_template: str | None = None
    lstrip: frozenset[int] = frozenset()
    rstrip: frozenset[int] = frozenset()
    normalizer: NormalForm | None = None
    fim: Mapping[str, int] = field(default_factory=dict)


def byte_chars() -> tuple[str, ...]:
    """The printable character that byte-level BPE writes for each byte (source: GPT-2).

    Bytes that print stand for themselves; the other 68 follow from U+0100 on, in order.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(b if b in shown else next(spare)) for b in range(256))


_BYTE_OF = {ord(c): b for b, c in enumerate(byte_chars())}
_NO_BYTE = 0x100
# By character, up to one that the alphabet does not use.
_RAW = np.array([_BYTE_OF.get(o, _NO_BYTE) for o in range(max(_BYTE_OF) + 2)], np.uint16)


def byte_level_piece(text: str) -> bytes:
    """The bytes of a byte-level token; a character outside the alphabet gives its own UTF-8."""
    each = ((ord(c), c) for c in text)
    return b"".join(
        bytes((_BYTE_OF[o],)) if o in _BYTE_OF else c.encode("utf-8", "replace") for o, c in each
    )


def byte_token_piece(text: str) -> bytes:
    """The byte of a token written <0xHH>; FormatError when it is not written so."""
    try:
        return bytes((int(text[3:5], 16),)) if len(text) == 6 and text[:3] == "<0x" else b""
    except ValueError:
        raise FormatError(f"tokenizer: byte token {text!r}, expected <0xHH>") from None


T = TypeVar("T")
_KINDS: Mapping[type, tuple[type, ...]] = {str: (str,), int: (int, np.integer), bool: (bool, int)}
_KIND_NAMES = {str: "a string", int: "a whole number", bool: "true or false"}


def value_of(metadata: Mapping[str, Any], key: str, kind: type[T], absent: T | None = None) -> Any:
    """The value under `key`, `absent` where there is none. FormatError where it is of another
    kind."""
    value = metadata.get(key)
    if value is None:
        return absent
    if not isinstance(value, _KINDS[kind]) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{key}: expected {_KIND_NAMES[kind]}, got {shown(value)}")
    return kind(value)  # type: ignore[call-arg]  # one of three


def strings(metadata: Mapping[str, Any], key: str) -> Texts:
    """The list of strings under `key`; FormatError when absent or holding anything else."""
    values = metadata.get(key)
    if isinstance(values, Texts):
        return values
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | np.ndarray):
        raise FormatError(f"{key}: expected a list of strings, got {type(values).__name__}")
    out = list(values)
    for i, v in enumerate(out):
        if not isinstance(v, str):
            raise FormatError(f"{key}[{i}]: expected a string, got {type(v).__name__}")
    try:
        return Texts(out)
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{key}: {shown(error.object)} is no UTF-8 text: {error.reason}"
        ) from None


def vocabulary_from_gguf(
    metadata: Mapping[str, Any], *, byte_level: bool, add_bos: bool
) -> Vocabulary:
    """Reads `tokenizer.*`; `add_bos` is the kind's default. FormatError on bad metadata."""
    tokens = _token_texts(metadata)
    types = token_types(metadata, len(tokens))
    named = {r: _named_id(metadata, r, len(tokens)) for r in _ROLES}
    for role, old in _OLD_ROLES.items():
        if named[role] is None:
            named[role] = _named_id(metadata, old, len(tokens))
    fim = {r: i for r in FIM_TEXTS if (i := named[r]) is not None}
    if not byte_level:
        named = {**_spm_defaults(tokens), **{r: i for r, i in named.items() if i is not None}}
    ends = end_ids(tokens, (named.get(r) for r in ("eos", "eot", "eom", *_FIM_ENDS)))
    types[[*markers(tokens, ends), *_ids(named, FIM_TEXTS)]] = CONTROL  # written as ordinary text
    control, user_defined = _having(types, CONTROL, UNKNOWN), _having(types, USER_DEFINED)
    add = value_of(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos)
    closes = value_of(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    before, behind = (_listed_ids(metadata, key, len(tokens)) for key in (PREFIX, SUFFIX))
    space = value_of(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    return Vocabulary(
        tokens=tokens,
        pieces=_pieces(tokens, types, byte_level),
        control=control,
        user_defined=user_defined,
        eos_ids=ends,
        bos_id=named["bos"],
        eos_id=named["eos"],
        unk_id=named["unknown"],
        prefix=tuple(before or (_ids(named, ["bos"]) if add else ())),
        suffix=tuple(behind or (_ids(named, ["eos"]) if closes else ())),
        between=tuple(_ids(named, ["seperator"] if value_of(metadata, ADD_SEP, bool) else ())),
        space_prefix="never"
        if byte_level
        else _one_of(metadata, PREPEND_SCHEME, ("first", "always"), "every" if space else "never"),
        chat_template=value_of(metadata, "tokenizer.chat_template", str),
        lstrip=frozenset(_listed_ids(metadata, LSTRIP, len(tokens))),
        rstrip=frozenset(_listed_ids(metadata, RSTRIP, len(tokens)))
        or phi3_strips(metadata, tokens, control | user_defined),
        normalizer=_one_of(metadata, NORMALIZER, get_args(NormalForm), None),
        fim={**fim_ids(tokens), **fim},
    )


_ROLES = ("bos", "eos", "eot", "eom", "unknown", "seperator", *FIM_TEXTS)


def _ids(named: Mapping[str, int | None], roles: Iterable[str]) -> list[int]:
    """Those of the roles that a token has."""
    return [i for i in map(named.get, roles) if i is not None]


def _one_of(metadata: Mapping[str, Any], key: str, known: Sequence[str], absent: Any) -> Any:
    """The value under `key`, `absent` where there is none. FormatError where it is not known."""
    value = value_of(metadata, key, str, absent)
    if value is not absent and value not in known:
        raise FormatError(f"{key}: expected {' or '.join(known)}, got {shown(value)}")
    return value


def _listed_ids(metadata: Mapping[str, Any], key: str, count: int) -> list[int]:
    """The ids of a list, empty where there is none. FormatError for what is no list of ids."""
    found = _array(metadata.get(key, ()))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise FormatError(f"{key}: expected ids, got {shown(metadata[key])}")
    for i in found[(found < 0) | (found >= count)]:
        raise FormatError(f"{key}: id {i}, expected 0 to {count - 1}")
    return [int(i) for i in found]


def phi3_strips(
    metadata: Mapping[str, Any], tokens: Texts, markers: frozenset[int]
) -> frozenset[int]:
    """Phi-3's markers take what is behind them. No key of llama.cpp's says so: the model's name
    does (source: llama.cpp)."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    return markers.difference(_found(tokens, ("<unk>", "<s>", "<|endoftext|>")).values())


def _token_texts(metadata: Mapping[str, Any]) -> Texts:
    key = "tokenizer.ggml.tokens"
    tokens = strings(metadata, key)
    if not tokens:
        raise FormatError(f"{key}: the vocabulary is empty")
    if not np.diff(tokens.bounds).all():
        tokens = Texts(t or f"[EMPTY_{i}]" for i, t in enumerate(tokens))
    for first, second in tokens.repeated():
        raise FormatError(f"{key}: {tokens[first]!r} stands twice, as ids {first} and {second}")
    return tokens


def token_types(metadata: Mapping[str, Any], count: int) -> Array:
    """The type of each token [V]."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return np.full(count, NORMAL)
    found = numbers(types, count, "token_type")
    for i in np.flatnonzero(np.isinf(found) | (found != np.trunc(found))):
        raise FormatError(f"tokenizer.ggml.token_type: {found[i]} at {i} is no type of a token")
    return found


def _having(types: Array, *kinds: int) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.isin(types, kinds)).tolist())


def numbers(values: Any, count: int, name: str) -> Array:
    """The first `count` numbers of a metadata array, f64; FormatError when it has fewer or
    others."""
    where = f"tokenizer.ggml.{name}"
    found = _array(values)
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise FormatError(f"{where}: expected {count} numbers, got {shown(values)}")
    out: Array = found[:count].astype(np.float64)
    if len(out) < count:
        raise FormatError(f"{where}: {len(out)} entries for {count} tokens")
    for i in np.flatnonzero(np.isnan(out)):
        raise FormatError(f"{where}: NaN at {i}")
    return out


def _array(values: Any) -> Array:
    """Any value as an array, one object where it is none."""
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.array(None)


def _named_id(metadata: Mapping[str, Any], role: str, count: int) -> int | None:
    """The id of a role; None when absent or outside the vocabulary (converters write -1)."""
    i = value_of(metadata, f"tokenizer.ggml.{role}_token_id", int, -1)
    return i if 0 <= i < count else None


def _spm_defaults(tokens: Texts) -> dict[str, int | None]:
    texts = {"unknown": "<unk>", "bos": "<s>", "eos": "</s>"}
    found = {role: tokens.find(text) for role, text in texts.items()}
    return {"eot": None, "eom": None, **found}


def end_ids(tokens: Texts, named: Iterable[int | None]) -> frozenset[int]:
    """Every id after which a model has nothing to add: the named roles and the known texts.

    Files name only one end token though models emit several; the texts are those that llama.cpp
    treats so.
    """
    by_text = _found(tokens, _END_TEXTS)
    ends = set(by_text.values()) | {i for i in named if i is not None}
    for role in _FIM_ENDS:
        ends.update(_found(tokens, FIM_TEXTS[role]).values())
    present = set(by_text)
    # In the harmony and solar formats <|end|> closes one message of several, not the answer.
    if "<|end|>" in present and (
        {"<|return|>", "<|call|>"} <= present
        or ({"<|flush|>"} <= present and present & {"<|call|>", "<|calls|>"})
    ):
        ends.discard(by_text["<|end|>"])
    if {"<|tool_response>", "</s>"} <= present:
        ends.discard(by_text["</s>"])
    return frozenset(ends)


def _found(tokens: Texts, texts: Iterable[str]) -> dict[str, int]:
    """Those of `texts` that are tokens, with their ids."""
    each = ((t, tokens.find(t)) for t in texts)
    return {t: i for t, i in each if i is not None}


def fim_ids(tokens: Texts) -> dict[str, int]:
    """The fill-in-the-middle tokens by role, one for each that there is."""
    found = {role: _found(tokens, texts) for role, texts in FIM_TEXTS.items()}
    return {role: next(iter(ids.values())) for role, ids in found.items() if ids}


def markers(tokens: Texts, ends: frozenset[int]) -> list[int]:
    """Tokens that are control tokens whatever a file says; `ends` are `end_ids`."""
    fim = (i for texts in FIM_TEXTS.values() for i in _found(tokens, texts).values())
    closing = (i for i in _found(tokens, _END_TEXTS).values() if i in ends)
    return [*_found(tokens, (*_PART_TEXTS, "<|end|>")).values(), *closing, *fim]


def _pieces(tokens: Texts, types: Array, byte_level: bool) -> Pieces:
    """The bytes of every token: of ordinary ones, which are most, together."""
    pieces = byte_level_pieces(tokens) if byte_level else spm_pieces(tokens)
    for i in np.flatnonzero(types != NORMAL).tolist():
        pieces[i] = _special_piece(tokens[i], types[i])
    return Pieces(pieces)


def byte_level_pieces(tokens: Texts) -> list[bytes]:
    """The bytes of byte-level tokens: see `byte_level_piece`."""
    letters = np.frombuffer(tokens.joined.decode().encode("utf-32-le"), np.uint32)
    raw = _RAW[np.minimum(letters, len(_RAW) - 1)]
    begins = np.frombuffer(tokens.joined, np.uint8) & 0xC0 != 0x80  # of bytes, which begin a letter
    stops = np.append(0, np.cumsum(begins))[tokens.bounds]
    joined = raw.astype(np.uint8).tobytes()
    pieces = [joined[start:stop] for start, stop in pairwise(stops.tolist())]
    for i in set(np.searchsorted(stops, np.flatnonzero(raw == _NO_BYTE), "right").tolist()):
        pieces[i - 1] = byte_level_piece(tokens[i - 1])
    return pieces


def spm_pieces(tokens: Texts) -> list[bytes]:
    """The bytes of SentencePiece tokens."""
    apart = b"\xff"  # in no UTF-8
    return apart.join(tokens.encoded()).replace(SPACE.encode(), b" ").split(apart)


def _special_piece(text: str, kind: int) -> bytes:
    if kind == BYTE:
        return byte_token_piece(text)
    return text.encode("utf-8", "replace") if kind in (CONTROL, UNKNOWN, USER_DEFINED) else b""
