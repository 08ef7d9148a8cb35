"""How long to draft: the length that promises most tokens per second. Floor 9.

Legend: K draft length, a_i chance that a draft is accepted up to and including depth i,
v(K) seconds to verify K + 1 rows, d seconds to draft one token.

    tokens per second of K:  (1 + a_1 + .. + a_K) / (v(K) + K d)

K = 0 is plain decoding, so a drafter that does not pay is left alone; it is tried again now and
then, ever more rarely while it keeps failing. Drafts must also be afforded: what they have gained
against plain decoding so far, less what a failing draft of K would cost, may not fall below a
small debt. All numbers are measured while decoding. The choice changes the speed only, never the
text.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft import Draft

RATE = 0.15  # weight of the newest observation in the running means
BORROWED = 2  # observations of the depth above that a depth's own are blended with
PATIENCE = 8  # rounds without a draft before a failing drafter is tried again; doubles
MOST_PATIENCE = 128
LOOK = 8  # rounds without a draft for which a choice holds
FIRST = 4  # drafted tokens of a drafter's first try
# Steps of plain decoding that drafts may lose in all, by the measured means: at once, and more with
# each step. The bookkeeping of a round and the scatter of single steps come on top.
DEBT, DEBT_PER_STEP = 0.12, 0.015


class LengthPolicy(Protocol):
    """Chooses the draft length of each round."""

    def length(self, drafter: str, most: int) -> int:
        """Nodes to ask for, 0 to `most`."""
        ...

    def learn(
        self, drafter: str, draft: Draft, kept: Kept, draft_seconds: float, verify_seconds: float
    ) -> None:
        """What a round took and brought."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length."""

    count: int

    def length(self, drafter: str, most: int) -> int:
        """`count`, as far as there is room."""
        return max(0, min(self.count, most))

    def learn(
        self, drafter: str, draft: Draft, kept: Kept, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Nothing to learn."""


@dataclass
class Mean:
    """A running mean that forgets."""

    value: float
    seen: int = 0

    def add(self, x: float) -> None:
        """Count one observation; the first few weigh more."""
        self.seen += 1
        self.value += max(RATE, 1.0 / (self.seen + 1)) * (x - self.value)


@dataclass
class Habits:
    """What is known of one drafter."""

    conditional: list[Mean] = field(default_factory=list)  # chance at depth i, given depth i - 1
    seconds: Mean = field(default_factory=lambda: Mean(0.0))  # per drafted token
    patience: int = PATIENCE
    waiting: int = 0
    best: tuple[int, int] = (0, 0)  # the bound under which a length was chosen, and that length
    fresh: int = 0  # rounds for which it still holds


@dataclass
class Adaptive:
    """The measured cost model of this file's head. `most` bounds the length.

    `whole` is for trees, whose depth does not grow by a node: all of `most`, or nothing.
    """

    most: int = 8
    least: int = 0
    whole: bool = False
    _habits: dict[str, Habits] = field(default_factory=dict)
    _verify: dict[int, Mean] = field(default_factory=dict)  # rows -> seconds
    _credit: float = DEBT  # steps that drafts may still lose

    def length(self, drafter: str, most: int) -> int:
        """The best length by the model; unknown lengths are tried upwards one by one."""
        most = min(self.most, most)
        habits = self._habits.setdefault(drafter, Habits())
        if most <= 0:
            return 0
        if 1 not in self._verify:
            return 0  # a plain step first: all costs are held against it
        if not habits.conditional:
            return most if self.whole else self._afforded(habits, min(most, FIRST))
        best = self._settled(habits, most)
        if best == 0:
            return self._patiently(habits, most)
        habits.patience, habits.waiting = PATIENCE, 0
        return self._afforded(habits, max(best, min(self.least, most)))

    def learn(
        self, drafter: str, draft: Draft, kept: Kept, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Update acceptance by depth and both costs."""
        rows = len(draft) + 1
        self._verify.setdefault(rows, Mean(verify_seconds)).add(verify_seconds)
        self._credit += DEBT_PER_STEP
        habits = self._habits.setdefault(drafter, Habits())
        if not draft:
            return
        habits.fresh = 0
        habits.seconds.add(draft_seconds / len(draft))
        self._credit += len(kept.nodes) - self._loss(habits, len(draft))
        reach = max(draft.depths())
        for depth in range(min(reach, len(kept.nodes) + 1)):
            if depth == len(habits.conditional):
                habits.conditional.append(Mean(0.5))
            habits.conditional[depth].add(float(depth < len(kept.nodes)))

    def _afforded(self, habits: Habits, k: int) -> int:
        """The longest draft up to k whose failure leaves no more debt than is allowed."""
        if self.whole:
            return k if self._loss(habits, k) <= self._credit else 0
        while k > 0 and self._loss(habits, k) > self._credit:
            k -= 1
        return k

    def _loss(self, habits: Habits, k: int) -> float:
        """What a draft of k costs, in steps of plain decoding."""
        plain = self._verify_seconds(1)
        return (self._verify_seconds(k + 1) - plain + k * habits.seconds.value) / plain

    def _patiently(self, habits: Habits, most: int) -> int:
        habits.waiting += 1
        if habits.waiting < habits.patience:
            return 0
        tried = self._afforded(habits, most if self.whole else min(2, most))
        if not tried:
            return 0
        habits.waiting = 0
        habits.patience = min(2 * habits.patience, MOST_PATIENCE)
        return tried

    def _settled(self, habits: Habits, most: int) -> int:
        """The best length, which is looked for again after a draft and every `LOOK` rounds."""
        if habits.fresh == 0 or habits.best[0] != most:
            habits.best, habits.fresh = (most, self._best(habits, most)), LOOK
        habits.fresh -= 1
        return habits.best[1]

    def _best(self, habits: Habits, most: int) -> int:
        """The length up to `most` with the most expected tokens per second; a tree is as deep as
        the deepest so far."""
        gained, chance, here = 1.0, 1.0, 0.5
        best, rate = 0, 1.0 / self._verify_seconds(1)
        for k in range(1, most + 1):
            if k <= len(habits.conditional):
                seen = habits.conditional[k - 1]
                here = (seen.seen * seen.value + BORROWED * here) / (seen.seen + BORROWED)
            chance *= here
            gained += chance if k <= len(habits.conditional) or not self.whole else 0.0
            if k == most or not self.whole:
                found = gained / (self._verify_seconds(k + 1) + k * habits.seconds.value)
                best, rate = (k, found) if found > rate else (best, rate)
        return best

    def _verify_seconds(self, rows: int) -> float:
        """Measured, or drawn through the nearest measured neighbours."""
        if rows in self._verify:
            return self._verify[rows].value
        below = max((r for r in self._verify if r < rows), default=1)
        above = min((r for r in self._verify if r > rows), default=None)
        low = self._verify[below].value
        if above is not None:
            share = (rows - below) / (above - below)
            return low + share * (self._verify[above].value - low)
        return low * (1 + 0.1 * (rows - below))
