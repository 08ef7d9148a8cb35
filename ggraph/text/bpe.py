"""Byte-level BPE.

Text -> words (pre.py) -> bytes written as characters -> merges by rank -> ids. Words are
cut by the `tokenizers` library; merging is done here, because that library's tables of a vocabulary
of 49,000 tokens take 10 MB, ours 0.8. Nothing here knows special tokens: tokenizer.py cuts them out
first.

Legend: L, R the ids of two neighbours; n symbols of a word.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from tokenizers import Regex, pre_tokenizers

from ggraph.errors import FormatError
from ggraph.formats.strings import ABSENT, Texts, checksums, joined_checksums
from ggraph.text.pre import PreTokenizer
from ggraph.text.vocab import byte_chars

GONE = -1  # the id of a symbol that is no token, or was merged into the one before it
# Words of which ids are kept, and their letters at most: in 3.3 MB of ggraph's pages and code there
# are 14,223 different words, of which 3 are longer.
WORDS, LETTERS = 20_000, 64


class Remembered(dict[str, Sequence[int]]):
    """Ids of words by the words, made where they are not known yet."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> Sequence[int]:
        ids = self._encode(word)
        if len(word) <= LETTERS and len(self) < WORDS:
            self[word] = ids
        return ids


class Merges:
    """Which neighbours merge, how early, and into what: three columns sorted by L and R."""

    def __init__(self, merges: Texts, tokens: Texts) -> None:
        starts, stops = merges.bounds[:-1], merges.bounds[1:]
        spaces = np.flatnonzero(np.frombuffer(merges.joined, np.uint8) == ord(" "))
        spaces = np.append(spaces, len(merges.joined) + 1)  # behind a last text that is empty too
        cuts = spaces[np.searchsorted(spaces, starts + 1)]  # a token may itself begin with one
        for at in np.flatnonzero(cuts >= stops).tolist():
            raise _bad(merges, at, "is not two parts")
        lefts, _, rights = checksums(merges.joined, starts, cuts, cuts + 1, stops)
        both = joined_checksums(lefts, cuts - starts, rights)
        left, right, made = map(tokens.find_sums, (lefts, rights, both))
        occurs = np.flatnonzero((left != ABSENT) & (right != ABSENT))
        for at in occurs[made[occurs] == ABSENT].tolist():
            whole = merges[at][0] + merges[at][1:].replace(" ", "", 1)
            raise _bad(merges, at, f"makes {whole!r}, which is no token")
        pairs = left[occurs] << 32 | right[occurs]
        found, first = np.unique(pairs, return_index=True)  # a repeated pair keeps its best rank
        ranks = occurs[first]
        self._pairs = array("q", found.tobytes())
        self._ranks = array("i", ranks.astype(np.int32).tobytes())
        self._made = array("i", made[ranks].astype(np.int32).tobytes())

    def find(self, left: int, right: int) -> tuple[int, int] | None:
        """(rank, id of both together), or None where the two never merge."""
        pair = left << 32 | right
        at = bisect_left(self._pairs, pair)
        if at == len(self._pairs) or self._pairs[at] != pair:
            return None
        return self._ranks[at], self._made[at]

    def apply(self, symbols: list[int]) -> list[int]:
        """The ids that a word's symbols end as: best rank first, leftmost among equals. Those that
        are GONE keep their neighbours apart."""
        ids, n = list(symbols), len(symbols)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        queue: list[tuple[int, int, int, int, int]] = []  # (rank, place of L, L, R, both)

        def offers(left: int) -> Iterator[tuple[int, int, int, int, int]]:
            if left >= 0 and after[left] < n:
                pair = ids[left], ids[after[left]]
                found = self.find(*pair)
                if found is not None:
                    yield found[0], left, *pair, found[1]

        queue += [offer for place in range(n) for offer in offers(place)]
        heapify(queue)
        while queue:
            _, left, *pair, both = heappop(queue)
            right = after[left]
            if right >= n or [ids[left], ids[right]] != pair:
                continue  # one of the two has merged with another since
            ids[left], ids[right], after[left] = both, GONE, after[right]
            if after[left] < n:
                before[after[left]] = left
            for place in (before[left], left):
                for offer in offers(place):
                    heappush(queue, offer)
        return [i for i in ids if i != GONE]


class BpeEncoder:
    """Encodes plain text with ranked merges. Ids are positions in `tokens`.

    A byte that the vocabulary lacks is dropped, and the text before it never merges with the text
    behind it (source: llama.cpp). FormatError when a merge makes a token that does not exist.
    """

    def __init__(self, tokens: Texts, merges: Texts, pre: PreTokenizer) -> None:
        self._tokens, self._takes_known = tokens, pre.ignore_merges
        letters = ((c, tokens.find(c)) for c in byte_chars())
        self._symbols = {c: GONE if i is None else i for c, i in letters}
        self._merges = Merges(merges, tokens)
        self._known = Remembered(self._encode)
        self._words = word_cutter(pre)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of `text`, which holds no lone surrogate, up to the word with which they are more
        than `most`."""
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            ids += self._known[word]
            if most is not None and len(ids) > most:
                break
        return ids

    def _encode(self, word: str) -> list[int]:
        if self._takes_known and (whole := self._tokens.find(word)) is not None:
            return [whole]
        return self._merges.apply([self._symbols[c] for c in word])


def word_cutter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """What cuts text into words, whose bytes are written as characters."""
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, to_bytes])


def _bad(merges: Texts, at: int, how: str) -> FormatError:
    return FormatError(f"tokenizer.ggml.merges[{at}]: {merges[at]!r} {how}")
