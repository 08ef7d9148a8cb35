"""What a policy of lengths learns of each drafter in one text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

BELIEF = 3.0  # right guesses that a drafter's word is taken to be worth before any was checked
FADING = 0.97  # weight of older proposals at each new one
UNSAID = 0.5  # the chance of a token of which the drafter says nothing
SURE = 0.98  # no chance is taken to be greater
FREE = 0.05  # a drafter whose guess costs less than this share of a step is cheap to ask
HOPES = 10  # observations that the worth of asking in earlier texts counts as
DULL = 2  # fruitless questions in a row after which a cheap drafter is asked less
PAUSE, MOST_PAUSE = 3, 12  # rounds between its questions then
DULLER = 6  # further ones after which that doubles
PATIENCE = 8  # rounds before a dear drafter that did not pay is asked again; doubles
MOST_PATIENCE = 128
FORGET = 0.08  # least weight of the newest worth of asking
SAYING = 0.15  # weight of the newest chance that a drafter gave its guess


@dataclass(slots=True)
class Trust:
    """What a drafter's words proved to be worth: right guesses, and how many it had promised."""

    right: float = BELIEF
    promised: float = BELIEF

    def chance(self, said: float) -> float:
        """A chance that the drafter stated, corrected."""
        return min(SURE, said * self.right / self.promised)

    def check(self, said: float, right: bool) -> None:
        """Hold one statement against the text; the first belief fades too."""
        self.right = FADING * self.right + right
        self.promised = FADING * self.promised + said


@dataclass(slots=True)
class Habits:
    """What is known of one drafter in this text. `pause` is the number of rounds from one question
    to the next, as things stand."""

    name: str
    price: float = FREE  # of a guess, in plain steps, where the drafter is asked round by round
    late_price: float = FREE  # of one behind a pause
    next_price: float = FREE  # of each further one of a draft
    is_cheap: bool = False  # whether asking costs next to nothing
    late: bool = False  # whether it is asked behind a pause now
    trust: dict[int, Trust] = field(default_factory=dict)  # class of statements -> their worth
    next_said: dict[int, float] = field(default_factory=dict)  # guess number -> mean chance
    asking: float = 0.0  # mean worth of asking, its cost deducted
    asked: int = HOPES
    patience: int = PATIENCE
    pause: int = 1
    waiting: int = 0  # rounds since it was asked
    dull: int = 0  # times that it was asked and nothing of it was worth verifying, in a row
    states: bool = False  # whether it says how sure it is

    def cost(self, guesses: int) -> float:
        """What a draft of so many guesses costs, in plain steps, where it is asked steadily."""
        return self.price + (guesses - 1) * self.next_price

    def priced(self, steady: float, late: float, further: float) -> None:
        """What its guesses cost by now."""
        self.price, self.late_price, self.next_price = steady, late, further
        self.is_cheap = steady < FREE
        self.settle()

    def settle(self) -> None:
        """Work out the pause."""
        if not self.is_cheap:
            self.pause = 1 if self.asking > 0 else self.patience
        elif self.dull < DULL:
            self.pause = 1
        else:
            self.pause = min(MOST_PAUSE, PAUSE << ((self.dull - DULL) // DULLER))

    def trusted(self, depth: int, said: float, states: bool) -> Trust:
        """Statements of about the same chance are trusted alike; without any, those of a depth."""
        key = int(4 * said) if states else -1 - depth
        found = self.trust.get(key)
        if found is None:
            found = self.trust[key] = Trust()
        return found

    def was_asked(self, chances: Sequence[float], gain: float) -> None:
        """Note what asking a dear drafter was worth."""
        for i, said in enumerate(chances):
            mean = self.next_said.get(i, UNSAID)
            self.next_said[i] = mean + SAYING * (said - mean)
        self.asked += 1
        self.asking += max(FORGET, 1 / self.asked) * (gain - self.asking)
