"""What steps and drafts take on this machine, measured while decoding.

Kept from text to text: a table of seconds by rows, for texts of about the same length, of seconds
per guess by drafter, and what asking a drafter was worth. Steps count by their ratio to a step of
one row.

A machine that others use runs at half its speed for a hundred steps and at its own again: what was
measured now and what was measured then do not compare. So every time is divided by the pace that
the latest steps of one row showed, and the means are of seconds at the usual pace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

RATE = 0.1  # weight of the newest observation in the running means
PACE = 0.3  # the same in the pace
USUAL = 0.02  # the same in what a step of one row takes at the usual pace
SPIKE = 1.2  # greatest share of the mean, or its inverse, that an observation counts as
JOLT = 1.5  # the same for the pace
ROW = 0.1  # share of a step that one more row is taken to cost before any was measured
ENOUGH = 4  # runs for texts of this length that are believed before those for others
MANY, DRAWN = 20.0, 4.0  # runs that a mean counts as at most, and that the line of all counts as
FIRST_ROW = 0.15  # most that one more row is taken to cost after a single run
GUESS = 0.15  # the same for a guess
LEAST_REST = 0.05  # least share of the time that guesses beyond the first took

# Kinds of guesses: the first of a draft; the first behind a pause, in which there was more to be
# read and the drafter's own memory was forgotten; further ones of a draft.
STEADY, LATE, NEXT = "steady", "late", "next"

WORTH, WORTHS = 0.2, 30  # steps that asking is taken to be worth at first, and as how many times
LASTING = 200  # times of asking that the mean worth goes back

# What attention of one more row costs of the first one's, whose keys are in the cache then.
KEYS = 0.5


@dataclass(slots=True)
class Mean:
    """A running mean that forgets, and that single disturbances hardly move."""

    value: float = 0.0
    seen: int = 0
    rate: float = RATE

    def add(self, x: float) -> None:
        """Count one observation. The first run of a plan touches its memory, so that the second
        replaces it where it is less."""
        self.seen += 1
        if self.seen <= 2:
            self.value = x if self.seen == 1 else min(self.value, x)
            return
        x = min(max(x, self.value / SPIKE), self.value * SPIKE)
        self.value += max(self.rate, 1.0 / self.seen) * (x - self.value)


@dataclass
class Costs:
    """Running means, relative to a step of one row."""

    _steps: dict[int, dict[int, Mean]] = field(default_factory=dict)  # length class -> rows -> s
    _guess: dict[tuple[str, str], Mean] = field(default_factory=dict)  # drafter, kind -> seconds
    _asked: Mean = field(default_factory=Mean)
    _host: dict[bool, Mean] = field(default_factory=dict)  # of rounds with a draft and without
    _worth: dict[str, tuple[float, int]] = field(default_factory=dict)  # mean, of how many
    _here: dict[int, Mean] = field(default_factory=dict)
    _class: int = -1
    _pace: float = 1.0  # seconds now over seconds at the usual pace

    def settle(self, past: int) -> None:
        """The text has `past` tokens now; attention costs what it does for such a text."""
        found = past.bit_length()
        if found != self._class:
            self._class = found
            self._here = self._steps.setdefault(found, {})

    @property
    def plain(self) -> float:
        """Seconds of a step of one row at the usual pace; 0 where none was measured."""
        if 1 in self._here:
            return self._here[1].value
        others = [t[1].value for t in self._steps.values() if 1 in t]
        return others[-1] if others else 0.0

    @property
    def longest(self) -> int:
        """Most rows of which a step was measured, for any text."""
        return max((max(t) for t in self._steps.values() if t), default=0)

    def extras(self, most: int) -> list[float]:
        """What steps of 1 to `most` rows cost beyond one row, in steps of one row. Rows cost nearly
        alike: a length of which few runs are known is drawn to the line through all of them, and
        no step costs less than one of fewer rows."""
        known = {rows: self._measured(rows) for rows in range(2, most + 1)}
        first, slope = _line([(rows - 1, *found) for rows, found in known.items()])
        costs = [0.0]
        for rows, (cost, runs) in known.items():
            drawn = (runs * cost + DRAWN * (first + slope * (rows - 1))) / (runs + DRAWN)
            costs.append(max(costs[-1], drawn))
        return costs

    def extra(self, rows: int) -> float:
        """The same for one length, by its own mean alone; 0 where none was measured."""
        return self._measured(rows)[0]

    def _measured(self, rows: int) -> tuple[float, float]:
        """What a step of `rows` rows costs beyond one row, and how many runs say so."""
        if rows <= 1:
            return 0.0, 0.0
        best: Mean | None = None
        for table in (self._here, *reversed(self._steps.values())):
            seen = table.get(rows)
            if seen is not None and 1 in table and (best is None or seen.seen > best.seen):
                best, one = seen, table[1].value
                if seen.seen >= ENOUGH:
                    break
        if best is not None:
            ratio = self._ratio(best.value - one, rows, one)
            # A single run says how little, not how much: it may have touched its memory first.
            cost = ratio if best.seen > 1 else min(ratio, FIRST_ROW * (rows - 1))
            return cost, min(best.seen, MANY)
        return 0.0, 0.0

    def _ratio(self, more: float, rows: int, one: float) -> float:
        """The share of a step here that `rows` rows add, where they took `more` seconds beyond the
        `one` of a row alone, for texts of any length: attention grows with the text, row by row."""
        plain = self.plain
        return max(0.0, more + KEYS * (rows - 1) * (plain - one)) / plain

    def guess(self, drafter: str, kind: str = STEADY) -> float:
        """What a guess of a drafter costs, in steps of one row."""
        seen = self._guess.get((drafter, kind))
        if seen is None:
            return GUESS if kind == STEADY else self.guess(drafter)
        return seen.value / self.plain if self.plain else 0.0

    def note_step(self, rows: int, seconds: float) -> int:
        """A step of `rows` rows took `seconds`, with what follows from its logits; how many such
        steps were noted, for texts of this length."""
        seen = self._here.get(rows)
        if seen is None:
            seen = self._here[rows] = Mean(rate=USUAL if rows == 1 else RATE)
        elif rows == 1 and seen.seen > 1:
            pace = seconds / seen.value
            pace = min(max(pace, self._pace / JOLT), self._pace * JOLT)
            self._pace += PACE * (pace - self._pace)
        seen.add(seconds / self._pace)
        return seen.seen

    def note_asked(self, seconds: float) -> int:
        """A step of one row took `seconds` behind a question of which nothing came: the caches hold
        a drafter then. How many such steps were noted."""
        if self.plain:
            self._asked.add(seconds / (self._pace * self.plain))
        return self._asked.seen

    def asked(self) -> float:
        """What such a step costs beyond one in a row of its like."""
        return max(0.0, self._asked.value - 1.0) if self._asked.seen else 0.0

    def note_guesses(self, drafter: str, count: int, seconds: float, *, late: bool = False) -> None:
        """`count` guesses took `seconds` together: what the first does not account for is shared
        by the others, which cost something in any case."""
        seconds /= self._pace
        kind = LATE if late else STEADY
        first = self._guess.get((drafter, kind))
        if count > 1 and first is not None:
            rest = max(LEAST_REST * seconds, seconds - first.value)
            self._mean(drafter, NEXT).add(rest / (count - 1))
        else:
            self._mean(drafter, kind).add(seconds / count)

    def _mean(self, drafter: str, kind: str) -> Mean:
        return self._guess.setdefault((drafter, kind), Mean())

    def note_host(self, drafted: bool, seconds: float) -> None:
        """A round took `seconds` beside asking and its step."""
        self._host.setdefault(drafted, Mean()).add(seconds / self._pace)

    def host(self, drafted: bool) -> float:
        """What a round costs beside asking and its step, in steps of one row."""
        seen = self._host.get(drafted)
        return seen.value / self.plain if seen is not None and self.plain else 0.0

    def note_worth(self, drafter: str, steps: float) -> None:
        """Asking a drafter was worth so many plain steps, what it took deducted."""
        mean, count = self._worth.get(drafter, (WORTH, WORTHS))
        count = min(LASTING, count + 1)
        self._worth[drafter] = mean + (steps - mean) / count, count

    def worth(self, drafter: str) -> float:
        """What asking a drafter was worth so far, in plain steps."""
        return self._worth.get(drafter, (WORTH, WORTHS))[0]


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Height at 0 and slope, neither below 0, of the line nearest to points (x, y, weight); where
    no point has a weight, that of `ROW`."""
    weight = sum(w for _, _, w in points)
    if not weight:
        return 0.0, ROW
    x = sum(px * w for px, _, w in points) / weight
    y = sum(py * w for _, py, w in points) / weight
    spread = sum(w * (px - x) ** 2 for px, _, w in points)
    slope = sum(w * (px - x) * (py - y) for px, py, w in points) / spread if spread else y / x
    slope = min(max(slope, 0.0), y / x)
    return y - slope * x, slope
