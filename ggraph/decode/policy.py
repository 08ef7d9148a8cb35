"""Who is asked for a draft, and how much of it is verified: the protocol, and both policies.

Legend: path_i chance that a draft is right up to its i-th token; rows(n) what a step of n rows
costs beyond one row, in plain steps (steps of one row).

    worth of a draft's first n tokens:  path_1 + .. + path_n - rows(n + 1)

`Adaptive` verifies the length of the greatest worth, and asks a drafter while its drafts pay for
that; each has a small credit, so that the shortest text loses little. Chances are what it says of
each token, corrected by what its words proved to be worth at that depth in this text. Costs are
measured (`prices.py`). No choice changes the text. `scripts/choose_policy.py` chose the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.prices import Prices

BELIEF = 2.0  # guesses that were checked before any was, half of them right
FADING = 0.95  # weight of older guesses at each new one
CREDIT = 0.5  # plain steps that a drafter may cost before it has brought any
MOST_CREDIT = 1.0  # and later, however much it has brought
MOST_PAUSE = 16  # rounds after which a drafter that did not pay is asked again; so far they double


class Policy(Protocol):
    """Chooses whom to ask for a draft in each round, and how much of it to verify."""

    def ask(
        self, drafter: str, room: int, best: Draft = NOTHING, chances: Sequence[float] = ()
    ) -> int:
        """How many tokens, at most `room`, a drafter should guess where `best` is there already; 0
        where it is not to be asked. One that guesses token by token asks before each further one,
        with the chances of those it has made."""
        ...

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        """What to verify: `best`, or the part of a new draft that is worth more; what it took."""
        ...

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """What a round's draft brought, and what its step took."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length, by the first drafter that proposes something."""

    count: int

    def ask(
        self, drafter: str, room: int, best: Draft = NOTHING, chances: Sequence[float] = ()
    ) -> int:
        """`count`, as far as there is room, until there is a draft."""
        return 0 if best else max(0, min(self.count, room))

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        """The first that is not empty."""
        return best or draft

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Depth:
    """What became of a drafter's guesses at one depth, the latest counting most."""

    right: float = field(default_factory=lambda: BELIEF / 2)
    said: float = field(default_factory=lambda: BELIEF / 2)  # of these, by its own chances
    count: float = field(default_factory=lambda: BELIEF)

    def chance(self, said: float) -> float:
        """A chance that the drafter stated, corrected; it is believed more than it says only as far
        as its guesses were usually right."""
        return min(said * self.right / self.said, max(said, self.usual()))

    def usual(self) -> float:
        """The share of guesses that were right."""
        return self.right / self.count

    def check(self, said: float, right: bool) -> None:
        """Hold one guess against the text."""
        self.right = FADING * self.right + right
        self.said = FADING * self.said + said
        self.count = FADING * self.count + 1


@dataclass(slots=True)
class Record:
    """What is known of one drafter in this text."""

    credit: float = field(default_factory=lambda: CREDIT)  # what it brought less what it cost
    depths: list[Depth] = field(default_factory=list)
    pause: int = 1  # rounds from one question to the next
    waited: int = 1  # rounds since the last one
    longest: int = 1  # chain that is verified: as many as were ever right, and one
    silent: bool = False  # whether it does not say how sure it is

    def at(self, depth: int) -> Depth:
        """Guesses of one depth; the first is 0."""
        while len(self.depths) <= depth:
            self.depths.append(Depth())
        return self.depths[depth]

    def path(self, chances: Sequence[float], count: int) -> list[float]:
        """The chances that a draft is right up to its i-th token, i from 1 to `count`; by what its
        drafter states or, where that is nothing, by what usually came of it."""
        path, out = 1.0, []
        for i in range(count):
            at = self.at(i)
            path *= at.chance(chances[i]) if chances else at.usual()
            out.append(path)
        return out


@dataclass
class Adaptive:
    """The policy of this file's head, for one text; `prices` are kept from text to text.

    A draft has `least` to `most` nodes. A tree, whose depth does not grow by a node, is verified
    whole or not at all.
    """

    most: int = 8
    least: int = 0
    prices: Prices = field(default_factory=Prices)
    _records: dict[str, Record] = field(default_factory=dict)
    _offers: list[tuple[Record, Draft, float]] = field(default_factory=list)  # and their prices
    _held: float = 0.0  # worth of the best of them
    _chosen: Record | None = None  # whose it is

    def ask(
        self, drafter: str, room: int, best: Draft = NOTHING, chances: Sequence[float] = ()
    ) -> int:
        """All that may be useful, where its turn has come and more can be hoped for than there is;
        one guess more, where that promises more than its own price and its row's."""
        record, most = self._of(drafter), min(self.most, room)
        if chances:
            made = len(chances)
            hope = record.path(chances, made)[-1] * record.at(made).usual()
            more = hope > self.prices.guess(drafter, made + 1) + self._row(made + 1)
            more = (more and made < record.longest) or made < self.least
            return min(most, made + 1) if more else made
        record.waited += 1
        if most <= 0 or record.waited < record.pause:
            return 0
        if self._held and record.credit - self._held < self.prices.guess(drafter, 1):
            return 0
        return self._ordered(drafter, record, most) if record.silent else most

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        """The length of the greatest worth, where that is more than there is already."""
        record, guesses = self._of(drafter), max(1, len(draft))
        count, worth = self._best(record, draft)
        if record.waited == 1:  # else there was more to read, or nothing
            self.prices.note_guesses(drafter, guesses, seconds)
        further = (guesses - 1) * self.prices.guess(drafter, 2)
        self._offers.append((record, draft, self.prices.guess(drafter, 1) + further))
        record.waited = 0
        record.silent = bool(draft) and draft.is_chain and not draft.chances
        if worth <= self._held:
            return best
        self._held, self._chosen = worth, record
        return draft.first(count)

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Hold every proposal against the text, as far as known, and settle accounts."""
        self.prices.note_step(len(draft) + 1, seconds)
        brought = len(kept.nodes) - self.prices.rows(len(draft) + 1)
        for record, offer, price in self._offers:
            for depth, right in enumerate(outcome(offer, draft, kept)):
                record.at(depth).check(offer.chances[depth] if offer.chances else 1.0, right)
                record.longest = max(record.longest, depth + 1 + right)
            gain = (brought if record is self._chosen else 0.0) - price
            record.credit = min(MOST_CREDIT, record.credit + gain)
            paid = gain > 0 or record.credit > 0
            record.pause = 1 if paid else min(2 * record.pause, MOST_PAUSE)
        self._offers.clear()
        self._held, self._chosen = 0.0, None

    def _of(self, drafter: str) -> Record:
        return self._records.setdefault(drafter, Record())

    def _ordered(self, drafter: str, record: Record, most: int) -> int:
        """How many guesses to order of a drafter that does not say how sure it is; at least one."""
        for n, path in enumerate(record.path((), most), 1):
            if n > 1 and path < self.prices.guess(drafter, n) + self._row(n):
                return n - 1
        return most

    def _row(self, nodes: int) -> float:
        """What the last of so many nodes adds to a step."""
        return self.prices.rows(nodes + 1) - self.prices.rows(nodes)

    def _best(self, record: Record, draft: Draft) -> tuple[int, float]:
        """How many of the draft's nodes are worth most, and how much; (0, 0.0) where none are."""
        if not draft.is_chain:
            worth = sum(record.path((), max(draft.depths()))) - self.prices.rows(len(draft) + 1)
            return (len(draft), worth) if worth > 0 else (0, 0.0)
        best, found, total = 0, 0.0, 0.0
        most = min(len(draft), max(record.longest, self.least))
        for n, chance in enumerate(record.path(draft.chances, most), 1):
            total += chance
            worth = total - self.prices.rows(n + 1)
            if worth > found or (n == self.least and total):
                best, found = n, worth
        return (best, found) if found > 0 else (0, 0.0)


def outcome(offer: Draft, draft: Draft, kept: Kept) -> list[bool]:
    """Whether an offer was right, depth by depth up to the first that was wrong, as far as the
    text is known; of a tree that is known where it was verified."""
    if offer.is_chain:
        results = [a == b for a, b in zip(offer.tokens, kept.tokens, strict=False)]
    else:
        depths = range(max(offer.depths()) if offer is draft else 0)
        results = [d < len(kept.nodes) for d in depths]
    return results[: results.index(False) + 1] if False in results else results
