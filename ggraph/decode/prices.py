"""What steps and guesses take on this machine, in plain steps, measured while decoding.

A plain step is a step of one row. A machine that others use runs at half its speed for a while and
at its own again, so that what was measured now and what was measured then do not compare. Hence
seconds are taken as *pace* times *price*: the pace follows every step, whatever its rows, at once,
and prices follow slowly. Both are kept from text to text.
"""

from dataclasses import dataclass, field

PACE = 0.2  # weight of the newest step in the pace
SLOW = 0.05  # the same in a price, once it was seen often
ROW = 0.2  # what one more row is taken to cost before any was measured
GUESS = 0.1  # the same for a guess
FAR = 2.0  # greatest factor by which an observation counts as off


@dataclass(slots=True)
class Price:
    """A running mean of ratios to plain steps, which begins as if seen once."""

    value: float
    seen: int = 1

    def scale(self, ratio: float) -> None:
        """One more observation, so many times the value."""
        self.seen += 1
        self.value *= 1 + max(SLOW, 1 / self.seen) * (ratio - 1)


@dataclass
class Prices:
    """Running means. Seconds of one mode of the machine do not count in another: see `mode`."""

    pace: float = 0.0  # seconds of a plain step by now; 0 before any step
    _rows: dict[int, Price] = field(default_factory=dict)  # whole steps, by their rows
    _extra: list[float] = field(default_factory=list)  # beyond one row, by rows - 1
    _guess: dict[tuple[str, bool], Price] = field(default_factory=dict)  # drafter, further ones

    def rows(self, count: int) -> float:
        """What a step of `count` rows costs beyond one row; for a number of rows that was not
        measured, by the next smaller one that was, and no less than that."""
        extra = self._extra
        while len(extra) < count:
            least, seen = extra[-1] if extra else 0.0, self._rows.get(len(extra) + 1)
            unseen = least + ROW if extra else 0.0
            extra.append(unseen if seen is None else max(seen.value - 1.0, least))
        return extra[count - 1]

    def guess(self, drafter: str, number: int) -> float:
        """What the first guess of a draft costs, or a further one."""
        return self._price(drafter, number > 1).value

    def note_step(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`, with what follows from its logits."""
        expected = 1.0 + self.rows(rows)
        if not self.pace:
            self.pace = seconds / expected
        ratio = _ratio(seconds, self.pace * expected)
        self.pace *= 1 + PACE * (ratio - 1)
        if rows > 1:
            self._rows.setdefault(rows, Price(expected)).scale(ratio)
            self._extra.clear()

    def note_guesses(self, drafter: str, count: int, seconds: float) -> None:
        """`count` guesses took `seconds` together."""
        if not self.pace:
            return
        first, further = self._price(drafter, False), self._price(drafter, True)
        expected = first.value + (count - 1) * further.value
        ratio = _ratio(seconds, self.pace * expected)
        first.scale(ratio)
        if count > 1:
            further.scale(ratio)

    def _price(self, drafter: str, further: bool) -> Price:
        return self._guess.setdefault((drafter, further), Price(GUESS / 2 if further else GUESS))


def _ratio(seconds: float, expected: float) -> float:
    return min(max(seconds / expected, 1 / FAR), FAR)
