"""Text to ids and back, for every kind of vocabulary. The page to read first.

A `Tokenizer` joins a `Vocabulary` (vocab.py) with an encoder for plain text: byte-level
BPE (bpe.py), SentencePiece (spm.py), WordPiece (wordpiece.py), Unigram (unigram.py), or the engine
of a Hugging Face folder (hf.py). Special tokens are cut out of the text here, as llama.cpp does it:
the longest first, everywhere in the text. Streaming is in stream.py.
"""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ggraph.errors import FormatError, InputError, shown
from ggraph.formats.strings import Pieces
from ggraph.text.bpe import BpeEncoder
from ggraph.text.hf import load_hf
from ggraph.text.pre import pre_tokenizer
from ggraph.text.spm import RankedEncoder, SpmEncoder
from ggraph.text.unigram import LEADS, UnigramEncoder, hidden
from ggraph.text.vocab import (
    ADD_SEP,
    BOS,
    EOS,
    NORMAL,
    PREFIX,
    SPACE,
    SUFFIX,
    UNK,
    USER_DEFINED,
    Vocabulary,
    numbers,
    strings,
    token_types,
    value_of,
    vocabulary_from_gguf,
)
from ggraph.text.wordpiece import CLS, SEP, WordPieceEncoder, bert_form, word_piece

_WHITE = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""White space as Unicode and the `tokenizers` engine have it."""


class Encoder(Protocol):
    """Splits plain text (no special tokens, no lone surrogates) into ids."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, or its first ones, but more than `most`."""
        ...


class Tokenizer:
    """Text to ids and back.

    `encode` reads special tokens in the text as plain text unless asked: text that a user typed
    must not be able to end a turn (within a chat template: prompt.py). Lone surrogates, which no
    UTF-8 text can hold, become U+FFFD.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        encode_special: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._encoder = encoder
        self._encode_special = encode_special
        self._markers = _longest_first(vocabulary, vocabulary.control | vocabulary.user_defined)
        self._always = _longest_first(vocabulary, vocabulary.user_defined)
        # An engine normalises by itself, and puts spaces before parts, but for the first of a text:
        # see `HfEncoder`.
        self._form = vocabulary.normalizer if encode_special is None else None
        scheme = vocabulary.space_prefix
        self._leads = scheme == "first" or (encode_special is None and scheme != "never")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF file (source: the GGUF specification).

        FormatError on missing or contradictory keys and on a model or pre-tokeniser that is not
        known.
        """
        model = value_of(metadata, "tokenizer.ggml.model", str)
        if model == "gpt2":
            return cls._byte_level(metadata)
        if model == "llama":
            return cls._sentence_piece(metadata)
        if model == "gemma4":
            return cls._ranked(metadata)
        if model == "bert":
            return cls._word_piece(metadata)
        if model == "t5":
            return cls._unigram(metadata)
        raise FormatError(
            "tokenizer.ggml.model: expected gpt2 (byte-level BPE), llama (SentencePiece), gemma4 "
            "(SentencePiece with ranked merges), bert (WordPiece) or t5 (Unigram), got "
            f"{shown(model)}"
        )

    @classmethod
    def from_hf(cls, folder: str | Path, size: int = 0) -> "Tokenizer":
        """From a folder with tokenizer.json, and tokenizer_config.json where there is one.

        `size`: the rows of the model, of which the last may have no text. FormatError when a file
        is missing or is not what its format demands.
        """
        encoder, vocabulary = load_hf(folder, size)
        return cls(vocabulary, encoder, encoder.encode_special)

    @classmethod
    def _byte_level(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        pre = pre_tokenizer(value_of(metadata, "tokenizer.ggml.pre", str, "default"))
        vocabulary = vocabulary_from_gguf(metadata, byte_level=True, add_bos=pre.add_bos)
        merges = strings(metadata, "tokenizer.ggml.merges")
        return cls(vocabulary, BpeEncoder(vocabulary.tokens, merges, pre))

    @classmethod
    def _sentence_piece(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        vocabulary = vocabulary_from_gguf(metadata, byte_level=False, add_bos=True)
        count = len(vocabulary.tokens)
        listed = metadata.get("tokenizer.ggml.scores")
        scores = np.zeros(count) if listed is None else numbers(listed, count, "scores")
        return cls(vocabulary, SpmEncoder(vocabulary.tokens, scores.tolist(), vocabulary.unk_id))

    @classmethod
    def _ranked(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Prompts begin with bos, and no space is put before them, whatever a file says: early
        ones say otherwise (source: llama.cpp)."""
        meant = {"tokenizer.ggml.add_bos_token": True, LEADS: False}
        vocabulary = vocabulary_from_gguf({**metadata, **meant}, byte_level=False, add_bos=True)
        merges = strings(metadata, "tokenizer.ggml.merges")
        return cls(vocabulary, RankedEncoder(vocabulary.tokens, merges, vocabulary.unk_id))

    @classmethod
    def _word_piece(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """A text stands between [CLS] and [SEP], which no key but their ids' tells of; no answer
        ends with one. Early files leave ids out: then their texts are looked for."""
        tokens = strings(metadata, "tokenizer.ggml.tokens")

        def role(text: str, *keys: str) -> list[int]:
            listed = [value_of(metadata, key, int, -1) for key in keys]
            found = next((i for i in listed if i >= 0), tokens.find(text))
            return [] if found is None else [found]

        around = {PREFIX: role("[CLS]", CLS, BOS), SUFFIX: role("[SEP]", SEP, EOS)}
        told = {k: v for k, v in metadata.items() if k not in (BOS, EOS)}
        unknown = next(iter(role("[UNK]", UNK)), -1)
        meant = {**told, **around, UNK: unknown, LEADS: True, ADD_SEP: False}
        vocabulary = vocabulary_from_gguf(meant, byte_level=False, add_bos=False)
        encoder = WordPieceEncoder(vocabulary.tokens, vocabulary.unk_id, metadata)
        pieces = [word_piece({}, bert_form(t)) for t in vocabulary.tokens]
        for i in vocabulary.control | vocabulary.user_defined:
            pieces[i] = vocabulary.pieces[i]
        return cls(replace(vocabulary, pieces=Pieces(pieces)), encoder)

    @classmethod
    def _unigram(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """A text ends with eos unless a file says otherwise (source: llama.cpp), and two have a
        separator between them, too, of which early files say nothing: so XLM-R was trained."""
        told = {"tokenizer.ggml.add_eos_token": True, ADD_SEP: True, **metadata}
        vocabulary = vocabulary_from_gguf(told, byte_level=False, add_bos=False)
        tokens = vocabulary.tokens
        types = token_types(metadata, len(tokens))
        scores = numbers(metadata.get("tokenizer.ggml.scores"), len(tokens), "scores")
        others = frozenset(np.flatnonzero(~np.isin(types, (NORMAL, USER_DEFINED))).tolist())
        scored = hidden(zip(tokens, scores, strict=True), others | vocabulary.control)
        return cls(vocabulary, UnigramEncoder(scored, vocabulary.unk_id, metadata))

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        return len(self.vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if there is one."""
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a generation (eos, eot, eom, im_end, ...)."""
        return self.vocabulary.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of markers: never part of what a user is shown."""
        return self.vocabulary.control

    @property
    def chat_template(self) -> str | None:
        """The chat template that came with the vocabulary."""
        return self.vocabulary.chat_template

    @property
    def bos_text(self) -> str:
        """Text of the bos token, as chat templates use it; empty without one."""
        return "" if self.bos_id is None else self.vocabulary.tokens[self.bos_id]

    @property
    def eos_text(self) -> str:
        """Text of the eos token, as chat templates use it; empty without one."""
        i = self.vocabulary.eos_id
        return "" if i is None else self.vocabulary.tokens[i]

    def __repr__(self) -> str:
        kind = type(self._encoder).__name__
        ends = sorted(self.eos_ids)
        return f"Tokenizer({kind}, {self.vocab_size} tokens, bos {self.bos_id}, ends {ends})"

    def id_of(self, token: str) -> int | None:
        """The id whose text, as the vocabulary writes it, is `token`; None if there is none."""
        return self.vocabulary.tokens.find(token) if token else None

    def encode(
        self,
        text: str,
        *,
        special: bool = False,
        bos: bool | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Ids of `text`.

        `special`: find special tokens in the text (for rendered chat templates). `bos`: put in
        front what every prompt begins with, or else the bos token; None leaves it to the
        vocabulary. `most`: whoever can use no more than
        so many ids is spared the rest, but gets more than that where there are. InputError when
        `text` is no string or there is no bos token.
        """
        if not isinstance(text, str):
            raise InputError(f"text to encode: expected str, got {type(text).__name__}")
        head = self._head(bos)
        if not text:
            return head
        text = _without_surrogates(text)
        if self._encode_special is not None and (special or not self._leads):
            return head + (self._encode_special if special else self._encoder.encode)(text)
        parts = self._parts(text, self._markers if special else self._always)
        return head + self._encode_parts(parts, most)

    @cached_property
    def control_texts(self) -> Sequence[str]:
        """Texts of all control tokens of two letters or more, the longest first."""
        control = self.vocabulary.control
        return [t for t, i in self._markers if i in control and len(t) > 1]

    def encode_sewn(self, text: str, seam: str, most: int | None = None) -> list[int]:
        """Ids of a rendered chat template: `seam` is in no token, and what holds it is no marker.
        `most` is as in `encode`.

        Where seams change nothing, the ids are those of the text without them.
        """
        text = _without_surrogates(text)
        bare = text.replace(seam, "")
        parts = [
            p.replace(seam, "") if isinstance(p, str) else p
            for p in self._parts(text, self._markers)
        ]
        kept = [p for p in parts if p != ""]
        if kept == self._parts(bare, self._markers):
            return self.encode(bare, special=True, bos=False, most=most)
        if self._encode_special is None:  # an engine finds the tokens that always count by itself
            always = (self._parts(p, self._always) if isinstance(p, str) else [p] for p in kept)
            kept = [part for parts in always for part in parts]
        return self._encode_parts(kept, most)

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. See `decode_bytes`."""
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, special: bool = True) -> bytes:
        """Bytes of `ids`, less the space that `encode` puts in front of SentencePiece text.

        `special`: show markers too. InputError on an id outside the vocabulary.
        """
        hidden = frozenset[int]() if special else self.special_ids
        shown = [self.token_bytes(i) for i in ids if i not in hidden]
        if shown and self.vocabulary.space_prefix != "never":
            shown[0] = shown[0].removeprefix(b" ")
        return b"".join(shown)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id adds to the output. InputError when it is out of range."""
        if not 0 <= token < self.vocab_size:
            raise InputError(f"token id {token}: expected 0 to {self.vocab_size - 1}")
        return self.vocabulary.pieces[token]

    def _head(self, bos: bool | None) -> list[int]:
        if bos is False:
            return []
        if bos is None or self.vocabulary.prefix:
            return list(self.vocabulary.prefix)
        if self.bos_id is None:
            raise InputError("bos was asked for, but the vocabulary has no bos token")
        return [self.bos_id]

    def _parts(self, text: str, markers: Sequence[tuple[str, int]]) -> list[str | int]:
        """What is between the markers and their ids, less the white space that some of them take
        with them."""
        parts, v = _cut(text, markers), self.vocabulary
        for at, part in enumerate(parts if v.lstrip or v.rstrip else ()):
            if isinstance(part, str):
                if at and parts[at - 1] in v.rstrip:
                    part = part.lstrip(_WHITE)
                if parts[at + 1 : at + 2] and parts[at + 1] in v.lstrip:
                    part = part.rstrip(_WHITE)
                parts[at] = part
        return [p for p in parts if p != ""]

    def _encode_parts(self, parts: Sequence[str | int], most: int | None) -> list[int]:
        ids: list[int] = []
        for at, part in enumerate(parts):
            left = None if most is None else most - len(ids)
            if left is not None and left < 0:
                break
            if isinstance(part, int):
                ids.append(part)
            else:
                if self._form is not None:
                    part = unicodedata.normalize(self._form, part)
                # Parts of text that follow each other, as a seam leaves them, are one.
                led = self._leads and not (at and isinstance(parts[at - 1], str))
                ids += self._encoder.encode(self._lead(part, at) + part if led else part, left)
        return ids

    def _lead(self, part: str, at: int) -> str:
        """What is put before the part of a text that is number `at`."""
        scheme = self.vocabulary.space_prefix
        if scheme == "every":
            return " "
        begins = part.startswith((" ", SPACE)) or (scheme == "first" and at)
        return "" if begins else " "


def _longest_first(vocabulary: Vocabulary, ids: frozenset[int]) -> list[tuple[str, int]]:
    texts = [(vocabulary.tokens[i], i) for i in sorted(ids) if vocabulary.tokens[i]]
    return sorted(texts, key=lambda t: -len(t[0].encode("utf-8", "replace")))


def _cut(text: str, markers: Sequence[tuple[str, int]]) -> list[str | int]:
    """Text between markers and ids of markers, in order. An earlier marker in the list wins."""
    parts: list[str | int] = [text]
    for marker, i in markers:
        if marker in text:
            parts = [p for part in parts for p in _cut_one(part, marker, i)]
    return parts


def _cut_one(part: str | int, marker: str, i: int) -> list[str | int]:
    if isinstance(part, int) or marker not in part:
        return [part]
    out: list[str | int] = []
    for n, piece in enumerate(part.split(marker)):
        out += [i] if n else []
        out += [piece] if piece else []
    return out


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
    return text
