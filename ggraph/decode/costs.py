"""What steps and drafts take on this machine, measured while decoding. Floor 9.

Kept from text to text: a table of seconds by rows, for texts of about the same length, of seconds
per guess by drafter, and what asking a drafter was worth. Steps count by their ratio to a step of
one row.
"""

from dataclasses import dataclass, field

RATE = 0.1  # weight of the newest observation in the running means
SPIKE = 1.5  # greatest share of the mean, or its inverse, that an observation counts as
ROW = 0.1  # share of a step that one more row is taken to cost before any was measured
ENOUGH = 4  # runs for texts of this length that are believed before those for others
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

    def add(self, x: float) -> None:
        """Count one observation. The first run of a plan touches its memory, so that the second
        replaces it where it is less."""
        self.seen += 1
        if self.seen <= 2:
            self.value = x if self.seen == 1 else min(self.value, x)
            return
        x = min(max(x, self.value / SPIKE), self.value * SPIKE)
        self.value += max(RATE, 1.0 / self.seen) * (x - self.value)


@dataclass
class Costs:
    """Running means, relative to a step of one row."""

    _steps: dict[int, dict[int, Mean]] = field(default_factory=dict)  # length class -> rows -> s
    _guess: dict[tuple[str, str], Mean] = field(default_factory=dict)  # drafter, kind -> seconds
    _worth: dict[str, tuple[float, int]] = field(default_factory=dict)  # mean, of how many
    _here: dict[int, Mean] = field(default_factory=dict)
    _class: int = -1

    def settle(self, past: int) -> None:
        """The text has `past` tokens now; attention costs what it does for such a text."""
        found = past.bit_length()
        if found != self._class:
            self._class = found
            self._here = self._steps.setdefault(found, {})

    @property
    def plain(self) -> float:
        """Seconds of a step of one row; 0 where none was measured."""
        if 1 in self._here:
            return self._here[1].value
        others = [t[1].value for t in self._steps.values() if 1 in t]
        return others[-1] if others else 0.0

    @property
    def longest(self) -> int:
        """Most rows of which a step was measured, for any text."""
        return max((max(t) for t in self._steps.values() if t), default=0)

    def extra(self, rows: int) -> float:
        """What a step of `rows` rows costs beyond one row, in steps of one row."""
        if rows <= 1:
            return 0.0
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
            return ratio if best.seen > 1 else min(ratio, FIRST_ROW * (rows - 1))
        return self._between(rows)

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
            seen = self._here[rows] = Mean()
        seen.add(seconds)
        return seen.seen

    def note_guesses(self, drafter: str, count: int, seconds: float, *, late: bool = False) -> None:
        """`count` guesses took `seconds` together: what the first does not account for is shared
        by the others, which cost something in any case."""
        kind = LATE if late else STEADY
        first = self._guess.get((drafter, kind))
        if count > 1 and first is not None:
            rest = max(LEAST_REST * seconds, seconds - first.value)
            self._mean(drafter, NEXT).add(rest / (count - 1))
        else:
            self._mean(drafter, kind).add(seconds / count)

    def _mean(self, drafter: str, kind: str) -> Mean:
        return self._guess.setdefault((drafter, kind), Mean())

    def note_worth(self, drafter: str, steps: float) -> None:
        """Asking a drafter was worth so many plain steps, what it took deducted."""
        mean, count = self._worth.get(drafter, (WORTH, WORTHS))
        count = min(LASTING, count + 1)
        self._worth[drafter] = mean + (steps - mean) / count, count

    def worth(self, drafter: str) -> float:
        """What asking a drafter was worth so far, in plain steps."""
        return self._worth.get(drafter, (WORTH, WORTHS))[0]

    def _between(self, rows: int) -> float:
        """Drawn through the nearest measured neighbours."""
        known = {r for table in self._steps.values() if 1 in table for r in table}
        below = max((r for r in known if r < rows), default=1)
        above = min((r for r in known if r > rows), default=None)
        low = self.extra(below)
        if above is None:
            return low + ROW * (rows - below)
        return low + (rows - below) / (above - below) * (self.extra(above) - low)
