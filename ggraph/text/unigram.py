"""Unigram, as SentencePiece has it for XLM-R: of all ways to cut a text into tokens the likeliest.

The `tokenizers` engine cuts; here it is made of a GGUF file's keys, whose kind is called t5.

Sources: Kudo 2018 (arXiv 1804.10959); the `tokenizers` engine; llama.cpp's converter.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers, pre_tokenizers

from ggraph.errors import FormatError, shown
from ggraph.text.vocab import SPACE, value_of

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
ONE_SPACE = "tokenizer.ggml.remove_extra_whitespaces"
LEADS = "tokenizer.ggml.add_space_prefix"


def hidden(scored: Iterable[Sequence[Any]], ids: frozenset[int]) -> list[tuple[str, float]]:
    """Tokens with their scores, of which those of `ids` are in no text: the engine would read a
    marker that somebody typed as the best of all tokens, or as a word. A space is none's letter."""
    return [
        (f" {text}", 0.0) if i in ids else (str(text), float(score))
        for i, (text, score) in enumerate(scored)
    ]


class UnigramEncoder:
    """Encodes plain text with the tokens of a GGUF file: word by word, each with a space before it.
    Letters that are in no token become `unknown`, one for all that stand together. FormatError
    where there is no such token, for a map of letters that is none, and for white space that is
    kept."""

    def __init__(
        self, scored: list[tuple[str, float]], unknown: int | None, metadata: Mapping[str, Any]
    ) -> None:
        if unknown is None:
            raise FormatError("tokenizer.ggml.unknown_token_id: Unigram needs such a token")
        for key in (LEADS, ONE_SPACE):
            if not value_of(metadata, key, bool, False):
                raise FormatError(f"{key}: expected true, as of XLM-R's Unigram")
        self._engine = Engine(models.Unigram(scored, unk_id=unknown))
        if CHARSMAP in metadata:
            self._engine.normalizer = _charsmap(metadata[CHARSMAP])
        words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(words)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, all of them."""
        return list(self._engine.encode(text, add_special_tokens=False).ids)


def _charsmap(told: Any) -> normalizers.Precompiled:
    """What letters are read as."""
    found = np.asarray(told)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise FormatError(f"{CHARSMAP}: expected bytes, got {shown(told)}")
    try:
        return normalizers.Precompiled(found.astype(np.uint8).tobytes())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception; a panic is none even
        raise FormatError(f"{CHARSMAP}: {error}") from None


def charsmap_of(normalizer: Any) -> str | None:
    """A tokenizer.json's map in base 64, which may be one normaliser of several."""
    own = normalizer if isinstance(normalizer, dict) else {}
    listed = own.get("normalizers") if own.get("type") == "Sequence" else [own]
    maps = [n.get("precompiled_charsmap") for n in listed or [] if isinstance(n, dict)]
    return next((m for m in maps if isinstance(m, str)), None)
