"""What steps and guesses take on this machine, in plain steps (of one row), measured in decoding.

A machine that others use runs at half its speed for a while, so that what was measured now and then
do not compare. Hence seconds are *pace* times *price*: the pace follows a step at once as far as
its price is known, prices follow slowly. What seemed too dear is not done again, so that its price
would stay as it is: it is forgotten after a while. `scripts/choose_policy.py` chose the constants.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import itemgetter

PACE = 0.2  # weight of the newest step in the pace
SLOW = 0.05  # the same in a price, once it was seen often
ROW = 0.1  # what one more row is taken to cost before any was measured
GUESS = 0.1  # the same for a guess; further ones of a draft half of it
FAR = 2.0  # greatest factor by which an observation counts as off
MEMORY = 512  # steps without it after which a high price is forgotten, at most twice as many


@dataclass(slots=True)
class Price:
    """A running mean of ratios to plain steps, which begins as if seen once."""

    value: float
    seen: int = 1
    latest: int = 0  # the step in which it was

    def scale(self, ratio: float) -> float:
        """One more observation, so many times the value. Returns its weight."""
        self.seen += 1
        self.value *= 1 + (weight := max(SLOW, 1 / self.seen)) * (ratio - 1)
        return weight


@dataclass
class Prices:
    """Running means. What is measured in one `mode` of the machine does not count in another."""

    mode: Callable[[], Hashable] = lambda: None
    _mode: Hashable = None  # of the latest step
    _pace: dict[Hashable, float] = field(default_factory=dict)  # seconds of a plain step by now
    _steps: dict[tuple[Hashable, int], Price] = field(default_factory=dict)  # by their rows
    _guesses: dict[tuple[Hashable, str, bool], Price] = field(default_factory=dict)  # further ones?
    _extra: list[float] = field(default_factory=lambda: [0.0])  # in this mode, by rows - 1
    _count: int = 0  # of steps

    def rows(self, count: int) -> float:
        """What `count` rows cost beyond one; where none was measured, one less and `ROW`."""
        for rows in range(len(self._extra) + 1, count + 1):
            seen = self._steps.get((self._mode, rows))
            self._extra.append(self._extra[-1] + ROW if seen is None else seen.value - 1.0)
        return self._extra[count - 1]

    def guess(self, drafter: str, number: int) -> float:
        """What the first guess of a draft costs, or a further one."""
        key = self._mode, drafter, number > 1
        return self._guesses.setdefault(key, Price(GUESS / 2 if number > 1 else GUESS)).value

    def note_step(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`, with what follows from its logits."""
        mode = self.mode()
        if mode != self._mode:
            self._mode = mode
            del self._extra[1:]
        expected = 1.0 + self.rows(rows)
        pace = self._pace.get(mode, seconds / expected)
        ratio = min(max(seconds / (pace * expected), 1 / FAR), FAR)
        news = 0.0  # how much of what is off the price explains
        self._count += 1
        if rows > 1:
            price = self._steps.setdefault((mode, rows), Price(expected))
            price.latest, news = self._count, price.scale(ratio)
            del self._extra[1:]
        self._pace[mode] = pace * (1 + PACE * (1 - news) * (ratio - 1))
        if self._count % MEMORY == 0:
            self._forget(self._count - MEMORY)

    def _forget(self, since: int) -> None:
        """Prices that nobody has paid since then, and that are above what would be taken for them;
        fewer rows first."""
        old = [key for key, price in self._steps.items() if price.latest <= since]
        for mode, rows in sorted(old, key=itemgetter(1)):
            if mode == self._mode and self.rows(rows) > self.rows(rows - 1) + ROW:
                del self._steps[mode, rows], self._extra[rows - 1 :]

    def note_guesses(self, drafter: str, count: int, seconds: float) -> None:
        """`count` guesses took `seconds` together; before any step they tell nothing."""
        if self._mode not in self._pace:
            return
        expected = self.guess(drafter, 1) + (count - 1) * self.guess(drafter, 2)
        ratio = min(max(seconds / (self._pace[self._mode] * expected), 1 / FAR), FAR)
        for further in (False, True)[: min(count, 2)]:
            self._guesses[self._mode, drafter, further].scale(ratio)
