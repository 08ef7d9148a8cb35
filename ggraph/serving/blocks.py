"""A head that drafts a whole block in one step, for many texts at once, over the slots of a cache.

The head's row of a token lies in its own cache where the target's lies in its own, and is made of
the token's feature alone; so whoever begins with another's slots has these with them. A block is
the text's last token and masked ones behind it, in spare slots, and is forgotten after each round
(`ggraph.decode.draft.block`).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from ggraph.decode.draft.eagle import WINDOW
from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.runner import DraftSession
from ggraph.decode.rows import ROW_BUCKETS
from ggraph.serving.heads import SPARE, Chain, ListHead, Question
from ggraph.serving.pieces import MIXED_ROWS
from ggraph.serving.steps import Row

UNSEEN = np.zeros(0, np.int32)


class MasksBlocks(DraftHead, Protocol):
    """A head that guesses the tokens of a whole block."""

    @property
    def block(self) -> int:
        """The most rows of a block."""
        ...

    @property
    def mask(self) -> int:
        """The token that all but the first of them are."""
        ...

    @property
    def causal(self) -> bool:
        """Whether they see no later ones."""
        ...


class ListBlock(ListHead):
    """Runs such a head for texts in a cache of `slots` slots, none longer than `context`."""

    shift = 0

    def __init__(self, head: MasksBlocks, session: DraftSession, slots: int, context: int) -> None:
        super().__init__(head, session, slots, context)
        self._block, self._mask, self._causal = head.block, head.mask, head.causal

    def draft(self, asked: Sequence[Question]) -> None:
        """Guess how texts go on, by one block each; who has no room among the spare slots gets
        none."""
        self._read(asked)
        rows: list[Row] = []
        told: list[tuple[Question, slice]] = []
        for q in asked:
            assert isinstance(q.draft, Chain), "a block is no tree"
            count = min(q.draft.limit + 1, self._block)
            if len(rows) + count <= SPARE:
                told.append((q, slice(len(rows) + 1, len(rows) + count)))
                rows += self._masked(q, self.slots + len(rows), count)
        nothing = np.zeros((len(rows), 0), np.float32)
        out = self._run(rows, nothing, Chain.branches, fed_back=True)
        for q, mine in told:
            guesses = zip(out["best"][mine], out["chance"][mine, :, 0], strict=True)
            for best, chance in guesses:
                if not len(q.draft.add(best[None], chance[None])):
                    break

    def plans(self, most: int) -> list[Callable[[], object]]:
        """Makes the plans that a short text alone needs, one by one; of blocks those of up to
        eight guesses."""
        reads = [self._shape(b, 1, 1, False) for b in (1, *MIXED_ROWS) if b <= WINDOW]
        blocks = [b for b in ROW_BUCKETS if b <= min(self._block, 9)]
        drafts = [self._shape(b, b, 1, True) for b in blocks]
        return [partial(self._prepare, s, Chain.branches) for s in (*reads, *drafts)]

    def _read(self, asked: Sequence[Question]) -> None:
        """Read the features that wait."""
        rows, wide = self._waiting(asked)
        most = MIXED_ROWS[-1]
        for at in range(0, len(rows), most):
            part = rows[at : at + most]
            self._run(part, wide[at : at + most], Chain.branches, fed_back=False)

    def _true_rows(self, q: Question) -> list[Row]:
        """The rows of a text that wait: those of its latest tokens but the last."""
        text, last = q.text, q.text.computed
        first = last - sum(map(len, text.unread))
        line = text.slots[:last]
        self._known[line[first:]] = True
        q.seen = [line[self._known[line]]]
        return [Row(0, int(line[p]), p, UNSEEN, False) for p in range(first, last)]

    def _masked(self, q: Question, spare: int, count: int) -> list[Row]:
        """A block's rows, in slots from `spare` on. Sliding layers see forerunners in any head."""
        (known,) = q.seen
        whole = np.append(known, np.arange(spare, spare + count, dtype=np.int32))
        rows, at = list[Row](), q.text.computed
        for i in range(count):
            token = self._mask if i else q.text.tokens[at]
            near = whole[: len(known) + i + 1]
            seen = near if self._causal else whole
            rows.append(Row(token, spare + i, at + i, seen, True, near))
        return rows

    def _prepare(self, shape: DraftShape, guesses: int) -> Hashable:
        """Rows that are read guess nothing."""
        if shape.fed_back:
            return super()._prepare(shape, guesses)
        key = self.head.name, "read", shape
        if key not in self.session:
            self.session.prepare(key, partial(self.head.build, shape), self.head.weight)
        return key
