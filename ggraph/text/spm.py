"""SentencePiece BPE as llama.cpp runs it: merge the best-scored neighbours first.

The `tokenizers` engine wants one rank per pair, while a SentencePiece file has one score per token
and breaks ties by position; so this file says what pairs are worth, bpe.py merges, and the ids of
words that were seen are kept. Gemma 4's files have ranked pairs instead of scores, and all else of
SentencePiece.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ggraph.formats.strings import Texts
from ggraph.text.bpe import GONE, Merges, Pairs, Remembered, merged
from ggraph.text.vocab import SPACE

_SPACE = SPACE.encode()


class _ByteFallback(ABC):
    """Encodes plain text of which spaces are letters. A character that is no token becomes its
    bytes <0xHH>, or `unk_id` where the vocabulary lacks those (None: it is dropped, and the text
    before it never merges with the text behind it)."""

    def __init__(self, tokens: Texts, unk_id: int | None) -> None:
        self._tokens = tokens
        listed = (tokens.find(f"<0x{b:02X}>") for b in range(256))
        self._bytes = [unk_id if i is None else i for i in listed]
        # Where no token holds a space after another character, no merge crosses such a place, and
        # text can be cut there without changing the result.
        self._cuttable = not _splits(tokens)
        self._known = Remembered(self._merge)

    @abstractmethod
    def _merge(self, chunk: str) -> tuple[int, ...]:
        """The ids of a text that nothing is known of."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, which holds no lone surrogate, up to the word with which they are more
        than `most`, where words can be told apart; spaces are escaped here."""
        text = text.replace(" ", SPACE)
        if not self._cuttable:
            return list(self._merge(text))
        out: list[int] = []
        for chunk in re.findall(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+", text):
            out.extend(self._known[chunk])
            if most is not None and len(out) > most:
                break
        return out

    def _ids_of(self, symbol: str) -> list[int]:
        i = self._tokens.find(symbol)
        if i is not None:
            return [i]
        return [b for b in map(self._bytes.__getitem__, symbol.encode("utf-8")) if b is not None]


class SpmEncoder(_ByteFallback):
    """By scored tokens: `scores[i]` belongs to `tokens[i]`, the best is made first."""

    def __init__(self, tokens: Texts, scores: Sequence[float], unk_id: int | None = None) -> None:
        super().__init__(tokens, unk_id)
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        self._ranks = np.unique(-np.asarray(scores), return_inverse=True)[1].tolist()

    def _merge(self, chunk: str) -> tuple[int, ...]:
        numbers = dict[
            str, int
        ]()  # of texts, which need not be tokens: two that are none may be one
        texts = list[str]()

        def number(text: str) -> int:
            if text not in numbers:
                numbers[text] = len(texts)
                texts.append(text)
            return numbers[text]

        def find(left: int, right: int) -> tuple[int, int] | None:
            both = texts[left] + texts[right]
            i = self._ids.get(both)
            return None if i is None else (self._ranks[i], number(both))

        found = merged(list(map(number, chunk)), Pairs(find))
        return tuple(i for text in map(texts.__getitem__, found) for i in self._ids_of(text))


class RankedEncoder(_ByteFallback):
    """By ranked pairs: `merges` alone say what may be joined, the best rank first.

    FormatError when a merge makes a token that does not exist.
    """

    def __init__(self, tokens: Texts, merges: Texts, unk_id: int | None = None) -> None:
        super().__init__(tokens, unk_id)
        self._merges = Merges(merges, tokens)

    def _merge(self, chunk: str) -> tuple[int, ...]:
        return tuple(self._merges.apply([i for c in chunk for i in self._ids_of(c) or (GONE,)]))


def _splits(tokens: Texts) -> bool:
    """Whether some token holds a space after another character."""
    raw = np.frombuffer(tokens.joined + bytes(len(_SPACE)), np.uint8)
    count = len(tokens.joined)
    spaces = np.all([raw[i : i + count] == b for i, b in enumerate(_SPACE)], axis=0)
    behind = spaces.copy()
    behind[len(_SPACE) :] &= ~spaces[: -len(_SPACE)]
    behind[tokens.bounds[:-1][np.diff(tokens.bounds) > 0]] = False
    return bool(behind.any())
