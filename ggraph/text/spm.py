"""SentencePiece BPE as llama.cpp runs it: merge the best-scored neighbours first.

The `tokenizers` engine wants one rank per pair, while a SentencePiece file has one score per token
and breaks ties by position; so this file merges by itself, and keeps the ids of words that it has
seen. Gemma 4's files have ranked pairs instead of scores, and all else of SentencePiece.

Legend: n characters of a chunk; L, R the left and right symbol of a candidate pair.
"""

import heapq
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ggraph.formats.strings import Texts
from ggraph.text.bpe import GONE, Merges, Remembered
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
        self._scores = tuple(scores)

    def _merge(self, chunk: str) -> tuple[int, ...]:
        symbols = list(chunk)  # "" marks a symbol that was merged into the one before it
        before, after = list(range(-1, len(chunk) - 1)), list(range(1, len(chunk) + 1))
        queue: list[tuple[float, int, int, int]] = []  # (-score, L, R, length)

        def offer(left: int, right: int) -> None:
            if left < 0 or right >= len(symbols):
                return
            both = symbols[left] + symbols[right]
            i = self._ids.get(both)
            if i is not None:
                heapq.heappush(queue, (-self._scores[i], left, right, len(both)))

        for i in range(1, len(symbols)):
            offer(i - 1, i)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            stale = not symbols[left] or not symbols[right]
            if stale or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] < len(symbols):
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return tuple(i for s in symbols if s for i in self._ids_of(s))


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
