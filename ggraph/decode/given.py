"""Rows that stand in the place of tokens: what a tower has made of an image.

A prompt is a list of ids, and a `Given` among them is a row that the decoder takes as it is, in
place of a row of its embedding. As a number it is the hash of that row, beyond every vocabulary.
What the cache holds of a text depends on its rows up to there and on nothing else, so whoever
compares ids to find what two texts have in common is right with images, too: equal rows are equal
numbers, and others are not. Whoever takes it for a token by mistake is told: it fits no type of
integers.

Some models turn rows of an image by three positions: of time, line and column. All of an image is
at one time, its lines and columns count from there on, and what follows is behind the longer of
both: a text has fewer positions than rows. How many fewer follows from the rows before; each says
of itself whether what is behind it stands at the next position (`still`), and how far its own
three are from where a token would be (`turn`).

Legend: T rows of a step, E width of a row.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ggraph import ops
from ggraph.dtype import I32
from ggraph.tensor import Array, Tensor, input

PLACES = ("positions", "line_positions", "column_positions")


class Given(int):
    """A row f32 [E], in the place of a `token` of the vocabulary that the text has there.

    Rows of a `block` see one another, so that a step has all of it or none: there are so many
    `before` this one, and `behind` it. Else it sees what a token would.
    """

    row: Array
    token: int
    before: int
    behind: int
    turn: tuple[int, int, int]  # from a token's position to its own: time, line, column
    still: bool  # whether what follows has the position that it takes itself

    def __new__(
        cls,
        row: Array,
        token: int,
        block: bytes = b"",
        before: int = 0,
        behind: int = 0,
        *,
        turn: tuple[int, int, int] = (0, 0, 0),
        still: bool = False,
    ) -> "Given":
        """The number follows from what the decoder makes of it: the row, all of its block, where it
        stands, and where what follows does."""
        values = np.ascontiguousarray(row, np.float32)
        place = np.array([*turn, still], np.int32).tobytes() if still or any(turn) else b""
        digest = hashlib.sha256(values.tobytes() + block + place).digest()
        found = super().__new__(cls, 1 << 256 | int.from_bytes(digest, "little"))
        found.row, found.token, found.before, found.behind = values, token, before, behind
        found.turn, found.still = turn, still
        return found


def on_grid(rows: Array, token: int, columns: int) -> list[Given]:
    """An image's rows [N, E], lines of as many columns, in the place of tokens."""
    most, found = max(len(rows) // columns, columns), list[Given]()
    for i, row in enumerate(rows):
        (y, x), taken = divmod(i, columns), min(i, most)  # positions, by the rows before
        turn = (-taken, y - taken, x - taken)
        found.append(Given(row, token, turn=turn, still=i >= most))
    return found


def given_rows(rows: Array, token: int, *, together: bool = False) -> list[Given]:
    """Rows [N, E] in the place of tokens; or `together`, as one block."""
    if not together:
        return [Given(row, token) for row in rows]
    values = np.ascontiguousarray(rows, np.float32)
    block, last = hashlib.sha256(values.tobytes()).digest(), len(rows) - 1
    return [Given(row, token, block, i, last - i) for i, row in enumerate(values)]


def later(token: int) -> int:
    """How many rows behind its own one in this place sees: those of its block. Windows leave out
    what is before a row, in its block too, as in transformers."""
    return token.behind if type(token) is Given else 0


def piece(tokens: Sequence[int], most: int) -> int:
    """How many of these a step begins with: at most so many, but a block is not cut, and one that
    stands first is taken whole."""
    count = min(most, len(tokens))
    last = tokens[count - 1]
    if not (left := later(last)) or not isinstance(last, Given):
        return count
    begin = count - 1 - last.before
    return begin if begin > 0 else count + left


def pieces(tokens: Sequence[int], most: int) -> list[Sequence[int]]:
    """These tokens in pieces of at most so many, without a block in two of them."""
    found, at = list[Sequence[int]](), 0
    while at < len(tokens):
        count = piece(tokens[at:], most)
        found.append(tokens[at : at + count])
        at += count
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


def is_still(token: int) -> bool:
    """Whether what follows this one has the position that it takes itself."""
    return type(token) is Given and token.still


class Stillness:
    """Of the rows in a cache, those behind which a text's positions did not go on."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # in order

    def positions(self, tokens: Sequence[int], at: Sequence[int], first: int) -> Sequence[int]:
        """Where rows that are written to the slots from `first` on are turned, the `at`-th of their
        text: each as a token would be there. It remembers them in the place of what was there."""
        before = bisect_left(self._slots, first)
        del self._slots[before:]
        found = at if not before else [p - before for p in at]
        if any(is_still(t) for t in tokens):
            found = list(found)
            for i, t in enumerate(tokens):
                found[i] -= len(self._slots) - before
                if is_still(t):
                    self._slots.append(first + i)
        return found


def given_feeds(tokens: Sequence[int], positions: Array, count: int) -> dict[str, Array]:
    """What a step of `count` rows takes beside the tokens where rows are given: `given` f32 [T, E],
    and `which` i32 [T], the row's own number for one of the embedding, T more for one of those; and
    where they are turned by their `positions` i32 [T] and others: all three, i32 [T] each."""
    width = next(len(t.row) for t in tokens if isinstance(t, Given))
    rows, which = np.zeros((count, width), np.float32), np.arange(count, dtype=np.int32)
    places = np.tile(positions, (len(PLACES), 1))
    for i, t in enumerate(tokens):
        if isinstance(t, Given):
            rows[i], which[i] = t.row, count + i
            places[:, i] += np.array(t.turn, np.int32)
    return {"given": rows, "which": which, **dict(zip(PLACES, places, strict=True))}


def placed(x: Tensor, given: Tensor) -> Tensor:
    """Rows of the embedding x [T, E], or in their place those `given` [T, E] to a step: [T, E]."""
    return ops.get_rows(ops.concat((x, given), 0), input("which", x.shape[:1], I32))
