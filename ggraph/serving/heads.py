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

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from ggraph.decode.draft.eagle import WINDOW, Expansion, TreeShape
from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.loop import guessing
from ggraph.decode.draft.runner import DraftSession
from ggraph.decode.draft.tree import Draft
from ggraph.decode.model import LONGEST_DRAFT
from ggraph.decode.rows import ROW_BUCKETS, row_bucket
from ggraph.dtype import F16
from ggraph.errors import InputError
from ggraph.serving.pieces import MIXED_ROWS
from ggraph.serving.steps import Lists, Row
from ggraph.serving.text import Request, Text
from ggraph.tensor import Array

SPARE = MIXED_ROWS[-1]  # rows of guesses in one round: a step verifies no more
GoesOn = Callable[[Sequence[float]], bool]


class Growth(Protocol):
    """A draft as it grows, level by level."""

    branches: int  # k, the guesses that are asked of a row

    @property
    def tokens(self) -> Sequence[int]:
        """Guesses that are to be read next."""
        ...

    def add(self, best: Array, chance: Array) -> Array:
        """Go on by the best draft tokens [B, k] behind those that were read, and their chances f32
        [B, k]: the row below which each of the next ones lies; none where no more are wanted."""
        ...

    def draft(self) -> Draft:
        """What there is so far."""
        ...


class Chain:
    """Guess by guess, up to `limit`, as long as `goes_on`."""

    branches = 1

    def __init__(self, limit: int, goes_on: GoesOn, ids: Array) -> None:
        self.limit, self.goes_on, self._ids = limit, goes_on, ids
        self._said: list[int] = []
        self._chances: list[float] = []

    @property
    def tokens(self) -> Sequence[int]:
        """The last guess."""
        return self._said[-1:]

    def add(self, best: Array, chance: Array) -> Array:
        """Add the best guess."""
        self._said.append(int(self._ids[best[0, 0]]))
        self._chances.append(float(chance[0, 0]))
        more = len(self._said) < self.limit and self.goes_on(self._chances)
        return np.zeros(int(more), np.intp)

    def draft(self) -> Draft:
        """What there is so far."""
        return Draft.chain(self._said, self._chances)


class HeadDrafter:
    """Stands for the head among a text's drafters. The batch asks the head, for all texts at once.

    `goes_on`, told how sure the head is of each guess so far, says whether another is wanted; with
    a `tree` the draft is that. `asks` is the kind of the one that is asked: a draft model is, too.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, name: str, goes_on: GoesOn, tree: TreeShape | None = None, *, asks: str = "head"
    ) -> None:
        self.name, self.goes_on, self.tree, self.asks = name, goes_on, tree, asks

    def begin(self, first: int) -> None:
        """Nothing: what the head knows of a text is in the cache."""

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Nothing, likewise."""

    def propose(self, limit: int) -> Draft:
        """InputError: a text alone has no head."""
        raise InputError(f"{self.name}: drafts of a batch come from its head")

    def growth(self, limit: int, ids: Array) -> Growth:
        """A draft of at most `limit` nodes that has not begun. `ids` i64 [W] are the target's
        tokens."""
        if self.tree is None:
            return Chain(limit, self.goes_on, ids)
        return Expansion(self.tree, limit, ids)


def drafts_by_head(request: Request) -> bool:
    """Whether a text asks the head, so that its features are kept."""
    drafts = request.drafts
    asking = () if drafts is None else drafts.drafters
    return any(isinstance(d, HeadDrafter) and d.asks == ListHead.kind for d in asking)


@dataclass(eq=False)
class Question:
    """A text whose last token will be written to `slot`, and its draft."""

    text: Text
    slot: int
    draft: Growth
    seen: list[Array] = field(default_factory=list)  # i32: what those see that are to be read next
    hidden: Array = field(init=False)  # f32 [B, E]: of the rows that they lie below
    depth: int = 0

    def take(self, best: Array, chance: Array, hidden: Array) -> None:
        """The rows of a level were read: the best guesses and their chances [B, k], hidden [B,
        E]."""
        k = self.draft.branches
        below = self.draft.add(best[:, :k], chance[:, :k])
        self.seen, self.hidden = [self.seen[i] for i in below], hidden[below]
        self.depth += 1

    def rows(self, spare: int, shift: int) -> list[Row]:
        """The rows that are to be read next, in slots from `spare` on, so many positions before
        those of their tokens."""
        at, tokens = self.text.computed + self.depth - shift, self.draft.tokens
        self.seen = [np.append(s, np.int32(slot)) for slot, s in enumerate(self.seen, spare)]
        found = zip(tokens, self.seen, strict=True)
        return [Row(token, int(seen[-1]), at, seen, True) for token, seen in found]


class ListHead:
    """Runs a head for texts in a cache of `slots` slots, of which none has more than `context`."""

    kind, shift = "head", 1  # row p is that of the token behind

    def __init__(self, head: DraftHead, session: DraftSession, slots: int, context: int) -> None:
        self.head, self.session, self.slots = head, session, slots
        self.taps = tuple(dict.fromkeys(head.taps))
        self._lists = Lists(slots + SPARE, context + SPARE, head.sliding_window)
        self._known = np.zeros(slots, bool)  # slots with a row

    def forget(self, slots: Sequence[int]) -> None:
        """The target writes to these slots: what was known of them belonged to other tokens."""
        self._known[slots] = False

    def note(self, text: Text, taps: Mapping[int, Array], rows: Sequence[int]) -> None:
        """The text's latest rows have these taps; they are read when the head is asked."""
        rows = rows[-WINDOW:]
        features = np.concatenate([taps[i][rows] for i in self.head.taps], axis=1)
        text.unread.append(features)
        waiting = sum(map(len, text.unread))
        while waiting - len(text.unread[0]) >= WINDOW:
            waiting -= len(text.unread.pop(0))

    def room(self, text: Text) -> int:
        """The most tokens that it can guess behind a text."""
        return LONGEST_DRAFT if text.unread else 0

    def draft(self, asked: Sequence[Question]) -> None:
        """Guess how texts go on, each as far as it wants."""
        spare = self.slots
        self._read(asked)
        while live := [q for q in asked if q.seen]:
            rows: list[Row] = []
            for q in live:
                rows += q.rows(spare + len(rows), self.shift)
            spare += len(rows)
            if spare > self.slots + SPARE:
                return
            self._ask(live, rows, np.concatenate([q.hidden for q in live]), fed_back=True)

    def plans(self, most: int) -> list[Callable[[], object]]:
        """Makes the plans that up to `most` short texts need, one by one."""
        going = [b for b in ROW_BUCKETS if b <= row_bucket(most)]
        shapes = [self._shape(b, b, 1, back) for b in going for back in (False, True)]
        shapes += [self._shape(b, 1, 1, False) for b in ROW_BUCKETS if 1 < b <= WINDOW]
        return [partial(self._prepare, s, Chain.branches) for s in shapes]

    def _read(self, asked: Sequence[Question]) -> None:
        """Read the true rows that wait, and make the first guesses."""
        rows, wide = self._waiting(asked)
        most = MIXED_ROWS[-1]
        answered = iter([q for q in asked if q.seen])
        for at in range(0, len(rows), most):
            part = rows[at : at + most]
            told = [next(answered) for row in part if row.wanted]
            self._ask(told, part, wide[at : at + most], fed_back=False)

    def _waiting(self, asked: Sequence[Question]) -> tuple[list[Row], Array]:
        """The true rows of all that ask, and their features."""
        rows: list[Row] = []
        features: list[Array] = []
        for q in asked:
            found = self._true_rows(q)
            rows += found
            features += self._features(q.text, found)
        return rows, np.concatenate(features)

    def _true_rows(self, q: Question) -> list[Row]:
        """The rows of a text that wait: those of its latest tokens."""
        text, last = q.text, q.text.computed
        count = sum(map(len, text.unread))
        line = np.append(text.slots[1:last], np.int32(q.slot))  # of tokens 1 to the last
        first = last - count  # in the line
        self._known[line[first:]] = True
        known = self._known[line]
        seen, ends = line[known], np.cumsum(known)
        q.seen = [seen]
        return [
            Row(text.tokens[p + 1], int(line[p]), p, seen[: ends[p]], p == last - 1)
            for p in range(first, last)
        ]

    def _features(self, text: Text, rows: Sequence[Row]) -> list[Array]:
        """f32 [.., A*G] of a text's true rows, which wait no more."""
        waiting, text.unread = text.unread, []
        return waiting if rows else []

    def _shape(self, rows: int, wanted: int, reach: int, fed_back: bool) -> DraftShape:
        bucket, seen, width = self._lists.bucket(rows, wanted, reach)
        if wanted == 1:  # what a round brought to a text that is alone
            bucket = row_bucket(rows)
        held = self.slots + SPARE + 1
        return DraftShape(bucket, held, seen, held, fed_back, F16, width)

    def _prepare(self, shape: DraftShape, guesses: int) -> Hashable:
        """The key of the plan of a step with so many guesses of a row."""
        key = self.head.name, guesses, shape
        if key not in self.session:
            build = partial(self.head.build, shape)
            self.session.prepare(key, lambda: guessing(build(), guesses), self.head.weight)
        return key

    def _ask(
        self, asked: Sequence[Question], rows: Sequence[Row], features: Array, *, fed_back: bool
    ) -> None:
        """One step, whose wanted rows are those of the questions, in order."""
        guesses = max([q.draft.branches for q in asked], default=1)
        out, at = self._run(rows, features, guesses, fed_back=fed_back), 0
        for q in asked:
            mine = slice(at, at + len(q.seen))
            q.take(out["best"][mine], out["chance"][mine, :, 0], out["feedback"][mine])
            at = mine.stop

    def _run(
        self, rows: Sequence[Row], features: Array, guesses: int, *, fed_back: bool
    ) -> dict[str, Array]:
        """One step. Its outputs, of the wanted rows in order; what lies behind says nothing."""
        wanted, reach = sum(r.wanted for r in rows), max(len(r.seen) for r in rows)
        shape = self._shape(len(rows), max(1, wanted), reach, fed_back)
        key = self._prepare(shape, guesses)
        wide = np.zeros((shape.rows, features.shape[1]), np.float32)
        wide[: len(rows)] = features
        given = self._lists.feeds(rows, shape.rows, shape.wanted, shape.listed)
        given["hidden" if fed_back else "features"] = wide
        taken = self.session.inputs(key)
        return self.session.run(key, {n: a for n, a in given.items() if n in taken})
