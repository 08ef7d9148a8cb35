"""Byte-level BPE over the `tokenizers` library. Floor 9.

Text -> words (tokenizer_pre.py) -> bytes written as characters -> merges by rank -> ids. Nothing
here knows special tokens: tokenizer.py cuts them out first.
"""

from collections.abc import Sequence

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from ggraph.decode.tokenizer_pre import PreTokenizer
from ggraph.decode.tokenizer_vocab import byte_chars
from ggraph.errors import FormatError


class BpeEncoder:
    """Encodes plain text with ranked merges. Ids are positions in `tokens`.

    A byte that the vocabulary lacks is dropped, and the text before it never merges with the text
    behind it (source: llama.cpp). FormatError when a merge makes a token that does not exist.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> None:
        self.size = len(tokens)
        vocab = {t: i for i, t in enumerate(tokens)}
        # The engine skips unknown characters before it merges, so that their neighbours would
        # meet; an id past the end keeps them apart and is dropped afterwards.
        absent = [c for c in byte_chars() if c not in vocab]
        vocab |= {c: self.size + i for i, c in enumerate(absent)}
        pairs = _merge_pairs(merges, vocab)
        self._has_absent = bool(absent)
        self._engine = Engine(
            models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
        )
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, which holds no lone surrogate."""
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < self.size] if self._has_absent else ids


def _merge_pairs(merges: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges as pairs, best first. A pair with a part that cannot occur is left out."""
    pairs: dict[tuple[str, str], None] = {}
    for rank, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not left:  # a token may itself begin with a space
            left, space, right = _parted_later(merge)
        if not space:
            raise FormatError(f"tokenizer.ggml.merges[{rank}]: {merge!r} is not two parts")
        if left not in vocab or right not in vocab:
            continue
        if left + right not in vocab:
            raise FormatError(
                f"tokenizer.ggml.merges[{rank}]: {merge!r} makes {left + right!r}, "
                "which is no token"
            )
        pairs[left, right] = None  # a repeated pair keeps its first rank
    return list(pairs)


def _parted_later(merge: str) -> tuple[str, str, str]:
    left, space, right = merge[1:].partition(" ")
    return merge[:1] + left, space, right
