"""A draft head for many texts at once, over the slots of their cache.

Legend: T rows of a step, M rows whose guess is wanted, A*G feature width, E head width, W draft
vocabulary, p a position of a text.

    slot of token p    target's cache: keys and values of row p
                       head's cache:   those of (feature of row p - 1, token p), position p - 1
    spare slots        head's cache alone: rows of guesses, forgotten after each round

What the head remembers of a token follows from the text up to it, as what the target remembers
does: who begins with another's slots has the head's rows with them. Not every slot has one: the
first token has no feature before it, and those whose drafts are off keep no features. A row sees
the slots that have; no text depends on which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ggraph.decode.draft.eagle import guess_of
from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.runner import DraftSession
from ggraph.decode.draft.tree import Draft
from ggraph.decode.rows import ROW_BUCKETS, row_bucket
from ggraph.dtype import F16, DType
from ggraph.errors import InputError
from ggraph.serving.steps import MIXED_ROWS, Lists, Row
from ggraph.serving.text import Request, Text
from ggraph.tensor import Array

WINDOW = 128  # true rows that wait; earlier ones are passed over
SPARE = 256  # rows of guesses in one round
GoesOn = Callable[[Sequence[float]], bool]


class HeadDrafter:
    """Stands for the head among a text's drafters. The batch asks the head, for all texts at once.

    `goes_on`, told how sure the head is of each guess so far, says whether another is wanted.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, name: str, goes_on: GoesOn) -> None:
        self.name, self.goes_on = name, goes_on

    def begin(self, first: int) -> None:
        """Nothing: what the head knows of a text is in the cache."""

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Nothing, likewise."""

    def propose(self, limit: int) -> Draft:
        """InputError: a text alone has no head."""
        raise InputError(f"{self.name}: drafts of a batch come from its head")


def drafts_by_head(request: Request) -> bool:
    """Whether a text asks the head, so that its features are kept."""
    drafts = request.drafts
    return drafts is not None and any(isinstance(d, HeadDrafter) for d in drafts.drafters)


@dataclass(eq=False)
class Question:
    """A text whose last token will be written to `slot`: at most `limit` guesses are wanted."""

    text: Text
    slot: int
    limit: int
    goes_on: GoesOn
    seen: Array = field(init=False)  # i32: slots that the latest row sees
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def wants_more(self) -> bool:
        """Whether a further guess is worth it."""
        return len(self.tokens) < self.limit and self.goes_on(self.chances)


class ListHead:
    """Runs a head for texts in a cache of `slots` slots, of which none has more than `context`."""

    def __init__(
        self, head: DraftHead, session: DraftSession, slots: int, context: int,
        *, cache_dtype: DType = F16,
    ) -> None:  # fmt: skip
        self.head, self.session, self.slots = head, session, slots
        self.cache_dtype = cache_dtype
        self.taps = tuple(dict.fromkeys(head.taps))
        self._lists = Lists(context + SPARE, head.sliding_window)
        self._known = np.zeros(slots, bool)  # slots with a row

    def forget(self, slots: Sequence[int]) -> None:
        """The target writes to these slots: what was known of them belonged to other tokens."""
        self._known[slots] = False

    def note(self, text: Text, taps: dict[int, Array], rows: Sequence[int]) -> None:
        """The text's latest rows have these taps; they are read when the head is asked."""
        rows = rows[-WINDOW:]
        features = np.concatenate([taps[i][rows] for i in self.head.taps], axis=1)
        text.unread.append(features)
        waiting = sum(map(len, text.unread))
        while waiting - len(text.unread[0]) >= WINDOW:
            waiting -= len(text.unread.pop(0))

    def draft(self, asked: Sequence[Question]) -> None:
        """Guess how texts go on, each until it wants no more."""
        spare = self.slots
        hidden = self._read(asked)  # [M, E]
        live = [(q, i) for i, q in enumerate(asked) if q.tokens and q.wants_more]
        while live and spare + len(live) <= self.slots + SPARE:
            rows = []
            for q, _ in live:
                q.seen = np.append(q.seen, np.int32(spare))
                at = q.text.computed + len(q.tokens) - 1
                rows.append(Row(q.tokens[-1], spare, at, q.seen, True))
                spare += 1
            out = self._run(rows, hidden[[i for _, i in live]], fed_back=True)
            hidden = out["feedback"]
            self._guess([q for q, _ in live], out["logits"])
            live = [(q, i) for i, (q, _) in enumerate(live) if q.wants_more]

    def plans(self, most: int) -> list[Callable[[], object]]:
        """Makes the plans that up to `most` short texts need, one by one."""
        going = [b for b in ROW_BUCKETS if b <= row_bucket(most)]
        shapes = [self._shape(b, b, 1, back) for b in going for back in (False, True)]
        shapes += [self._shape(b, 1, 1, False) for b in MIXED_ROWS if b <= WINDOW]
        return [partial(self._prepare, s) for s in shapes]

    def _read(self, asked: Sequence[Question]) -> Array:
        """Read the true rows that wait, and make the first guesses: hidden f32 [M, E]."""
        rows: list[Row] = []
        features: list[Array] = []
        for q in asked:
            found = self._true_rows(q)
            rows += found
            features += q.text.unread if found else []
            q.text.unread = []
        hidden: list[Array] = []
        wide, most, answered = np.concatenate(features), ROW_BUCKETS[-1], iter(asked)
        for at in range(0, len(rows), most):
            part = rows[at : at + most]
            out = self._run(part, wide[at : at + most], fed_back=False)
            count = sum(r.wanted for r in part)
            self._guess([next(answered) for _ in range(count)], out["logits"])
            hidden.append(out["feedback"][:count])
        return np.concatenate(hidden)

    def _true_rows(self, q: Question) -> list[Row]:
        """The rows of a text that wait: those of its latest tokens."""
        text, last = q.text, q.text.computed
        count = sum(map(len, text.unread))
        line = np.append(text.slots[1:last], np.int32(q.slot))  # of tokens 1 to the last
        first = last - count  # in the line
        self._known[line[first:]] = True
        known = self._known[line]
        q.seen, ends = line[known], np.cumsum(known)
        return [
            Row(text.tokens[p + 1], int(line[p]), p, q.seen[: ends[p]], p == last - 1)
            for p in range(first, last)
        ]

    def _guess(self, asked: Sequence[Question], logits: Array) -> None:
        """Add the best guess of each row of logits [M, W]."""
        for q, row in zip(asked, logits, strict=False):
            best, chance = guess_of(row)
            q.tokens.append(int(self.head.target_ids[best]))
            q.chances.append(chance)

    def _shape(self, rows: int, wanted: int, reach: int, fed_back: bool) -> DraftShape:
        bucket, seen, width = self._lists.bucket(rows, wanted, reach)
        held = self.slots + SPARE + 1
        return DraftShape(bucket, held, seen, held, fed_back, self.cache_dtype, width)

    def _prepare(self, shape: DraftShape) -> None:
        key = (self.head.name, shape)
        if key not in self.session:
            self.session.prepare(key, lambda: self.head.build(shape), self.head.weight)

    def _run(self, rows: Sequence[Row], features: Array, *, fed_back: bool) -> dict[str, Array]:
        """One step. Its outputs, of the wanted rows in order; what lies behind says nothing."""
        wanted, reach = sum(r.wanted for r in rows), max(len(r.seen) for r in rows)
        shape = self._shape(len(rows), max(1, wanted), reach, fed_back)
        self._prepare(shape)
        wide = np.zeros((shape.rows, features.shape[1]), np.float32)
        wide[: len(rows)] = features
        spare = self.slots + SPARE
        given = self._lists.feeds(rows, shape.rows, shape.wanted, shape.listed, spare)
        given["hidden" if fed_back else "features"] = wide
        key = (self.head.name, shape)
        taken = self.session.inputs(key)
        return self.session.run(key, {n: a for n, a in given.items() if n in taken})
