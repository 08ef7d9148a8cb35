"""Whether a program runs faster on all threads or on the caller's alone. Floor 6: no clock here.

Threads that share a program meet hundreds of times per decoded token. Where another program takes
one of their processors, each meeting may wait for a whole turn of the scheduler (milliseconds), and
all threads together are slower than one. Results do not depend on the number of threads, so the
pool may change it from run to run, by what it measures.
"""

from dataclasses import dataclass, field

RATE = 0.3  # weight of the newest run in the running means
FIRST_TRY = 8  # runs before the other way is tried for the first time
GAP, MOST_GAP = 16, 256  # runs between tries of the other way; doubles while it loses
SURPRISE = 1.5  # a run this much slower than usual lets the other way be tried at once
WINS = 2  # runs in a row in which the other way must be faster to be taken
MARGIN = 0.95  # and the caller alone by this much


@dataclass
class Tempo:
    """The running mean of one program's seconds, and when to try the other way."""

    alone: bool = False  # the better way so far
    _usual: dict[bool, float] = field(default_factory=dict)  # alone or not -> seconds
    _since: int = 0  # runs since the other way was last tried
    _gap: int = FIRST_TRY
    _trying: bool = False
    _wins: int = 0  # of the other way, in this try

    def choose(self) -> bool:
        """Whether the next run is to be the caller's alone."""
        return self.alone != self._trying

    def note(self, seconds: float) -> None:
        """What the run took that `choose` was asked for."""
        if self._trying:
            self._judge(seconds)
            return
        usual = self._usual.get(self.alone, seconds)
        self._usual[self.alone] = usual + RATE * (seconds - usual)
        self._since += 1
        surprised = seconds > SURPRISE * usual and self._since >= GAP // 4
        self._trying = surprised or self._since >= self._gap

    def _judge(self, seconds: float) -> None:
        """After a try of the other way: it must be better twice in a row to be taken."""
        better = seconds < self._usual[self.alone] * (1.0 if self.alone else MARGIN)
        self._wins = self._wins + 1 if better else 0
        if self._wins == WINS:
            self.alone, self._usual = not self.alone, {not self.alone: seconds}
        elif not better:
            self._gap = min(max(GAP, 2 * self._gap), MOST_GAP)
        self._trying = 0 < self._wins < WINS
        if not self._trying:
            self._wins, self._since = 0, 0
