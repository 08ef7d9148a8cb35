"""Rows that stand in the place of tokens: what a tower has made of an image.

A prompt is a list of ids, and a `Given` among them is a row that the decoder takes as it is, in
place of a row of its embedding. As a number it is the hash of that row, beyond every vocabulary.
What the cache holds of a text depends on its rows up to there and on nothing else, so whoever
compares ids to find what two texts have in common is right with images, too: equal rows are equal
numbers, and others are not. Whoever takes it for a token by mistake is told: it fits no type of
integers.

Legend: T rows of a step, E width of the residual stream.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ggraph import ops
from ggraph.dtype import I32
from ggraph.tensor import Array, Tensor, input


class Given(int):
    """A row f32 [E], in the place of a `token` of the vocabulary that the text has there."""

    row: Array
    token: int

    def __new__(cls, row: Array, token: int) -> "Given":
        """The number follows from the row alone."""
        values = np.ascontiguousarray(row, np.float32)
        digest = hashlib.sha256(values.tobytes()).digest()
        found = super().__new__(cls, 1 << 256 | int.from_bytes(digest, "little"))
        found.row, found.token = values, token
        return found


def first_given(tokens: Sequence[int]) -> int:
    """How many of these are tokens up to the first in whose place a row stands; all, if none."""
    return next((i for i, t in enumerate(tokens) if type(t) is Given), len(tokens))


def has_given(tokens: Sequence[int]) -> bool:
    """Whether a row stands in the place of one of these."""
    return any(type(t) is Given for t in tokens)


def words(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens alone, for whoever knows nothing else."""
    if not has_given(tokens):
        return tokens
    return [t.token if isinstance(t, Given) else t for t in tokens]


def given_feeds(tokens: Sequence[int], count: int, width: int) -> dict[str, Array]:
    """What a step of `count` rows takes beside the tokens where rows are given: `given` f32 [T, E],
    and `which` i32 [T], the row's own number for one of the embedding, T more for one of those."""
    rows, which = np.zeros((count, width), np.float32), np.arange(count, dtype=np.int32)
    for i, t in enumerate(tokens):
        if isinstance(t, Given):
            rows[i], which[i] = t.row, count + i
    return {"given": rows, "which": which}


def placed(x: Tensor) -> Tensor:
    """Rows of the embedding x [T, E], or those that a step is given in their place: [T, E]."""
    both = ops.concat((x, input("given", x.shape)), 0)
    return ops.get_rows(both, input("which", x.shape[:1], I32))
