"""Byte-level BPE.

Text -> words (pre.py) -> bytes written as characters -> merges by rank -> ids. Words are
cut by the `tokenizers` library; merging is done here, because that library's tables of a vocabulary
of 49,000 tokens take 10 MB, ours 0.8. Nothing here knows special tokens: tokenizer.py cuts them out
first.

Legend: L, R the ids of two neighbours; n symbols of a word.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from tokenizers import Regex, pre_tokenizers

from ggraph.errors import FormatError
from ggraph.formats.strings import ABSENT, Texts, checksums, joined_checksums
from ggraph.text.pre import PreTokenizer
from ggraph.text.vocab import byte_chars

GONE = -1  # the id of a symbol that is no token, or was merged into the one before it
NEVER = -1  # what neighbours are worth that do not merge
_LOW = (1 << 32) - 1
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

    def apply(self, symbols: Sequence[int]) -> list[int]:
        """The ids that a word's symbols end as. Those that are GONE keep their neighbours apart."""
        return merged(symbols, Pairs(self.find))


class Pairs(dict[int, int]):
    """What two neighbours are worth, by `left << 32 | right`: their rank and what they make, as
    `rank << 32 | both`, or NEVER. Looked up once, since long words have the same ones again and
    again."""

    def __init__(self, find: Callable[[int, int], tuple[int, int] | None]) -> None:
        self._find = find

    def __missing__(self, pair: int) -> int:
        found = None if pair < 0 else self._find(pair >> 32, pair & _LOW)  # GONE is below 0
        worth = self[pair] = NEVER if found is None else found[0] << 32 | found[1]
        return worth


def merged(symbols: Sequence[int], pairs: Pairs) -> list[int]:
    """What symbols end as: the neighbours of the best rank merge first, the leftmost among equals,
    until none do."""
    ids, n = [*symbols, GONE], len(symbols)  # what is behind the last never merges
    before, after = list(range(-1, n - 1)), list(range(1, n + 2))
    best = [pairs[left << 32 | right] for left, right in pairwise(ids)]  # by the place of L
    queue = [(worth >> 32) << 32 | place for place, worth in enumerate(best) if worth >= 0]
    heapify(queue)  # of rank and place, in one number: half the time that pairs of two take
    while queue:
        offer = heappop(queue)
        place = offer & _LOW
        if best[place] >> 32 != offer >> 32:
            continue  # one of the two has merged with another since
        gone, both = after[place], best[place] & _LOW
        behind = after[place] = after[gone]
        ids[place], best[gone], ids[gone] = both, NEVER, GONE
        worth = best[place] = pairs[both << 32 | ids[behind]]
        if worth >= 0:
            heappush(queue, (worth >> 32) << 32 | place)
        if behind < n:
            before[behind] = place
        first = before[place]
        if first >= 0:
            worth = best[first] = pairs[ids[first] << 32 | both]
            if worth >= 0:
                heappush(queue, (worth >> 32) << 32 | first)
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
