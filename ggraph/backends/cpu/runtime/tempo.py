"""Whether programs run faster on all threads or on the caller's alone. No clock here.

Threads that share a program meet hundreds of times per decoded token. Where another program takes
one of their processors, each meeting may wait for a whole turn of the scheduler (milliseconds), and
all threads together are slower than one. Results do not depend on the number of threads, so the
pool may change it from run to run, by what it measures.

Whether a processor is taken is a matter of the pool: what one of its programs finds out holds for
all that take about as long. A decoded token, which waits for memory, may be as quick on one thread,
and a prompt of ten times its seconds, which computes, half as quick then. A short program, which
may lose more by its meetings than it gains at any time, goes by itself, however long a single run
of it had to wait for sleeping threads. A try costs as much as the
program that makes it: a program that takes a second waits for many seconds, and a decoded token,
which tells as much, makes it before; and where threads had their processors to themselves, there is
hardly a reason for one. A single run tells nothing, for anything may have interrupted it; so the
other way must beat the present one before and behind a run of it.
"""

import math
from dataclasses import dataclass, field

RATE = 0.3  # weight of the newest run in a running mean
SPIKE = 1.5  # greatest share of the mean that a run counts as; more than that is a surprise
SURPRISES = 3  # in a row, after which the other way is tried at once
KNOWN = 4  # runs of a program on all threads before it may serve to compare the two ways
LONG = 3e-4  # least seconds of a program from which meetings are a small part of it
ALIKE = 4  # times the least seconds of a program, the least of others that are not about as long
FIRST_TRY = 8  # a program's times before it tries the other way, at first and behind a change
GAP, MOST_GAP, MOST_ALONE = 16, 256, 64  # the same between tries; doubles while they lose
TAKEN = 0.4  # processors' worth of a run that its threads did not get: 0.5 where one is shared,
# up to 0.22 in quiet hours
MARGIN = 0.95  # the caller alone must be faster by this much


@dataclass
class Usual:
    """The running mean of one program's seconds on all threads, and the least of them."""

    seconds: float = 0.0
    least: float = math.inf
    runs: int = 0

    @property
    def long(self) -> bool:
        """Whether the program is known to be long: a short one may take so long at times."""
        return LONG < self.least < math.inf

    @property
    def length(self) -> int:
        """The same number for long programs that take about as long."""
        return int(math.log(self.least / LONG, ALIKE))

    def add(self, seconds: float) -> None:
        """Count a run. The second replaces the first, which touched memory, where it is less."""
        self.runs += 1
        self.least = min(self.least, seconds)
        if self.runs <= 2:
            self.seconds = seconds if self.runs == 1 else min(self.seconds, seconds)
            return
        seconds = min(seconds, SPIKE * self.seconds)
        self.seconds += RATE * (seconds - self.seconds)


@dataclass
class Tempo:
    """The better way so far, and when to try the other one: there, back and there again."""

    alone: bool = False
    _since: float = 0.0  # what has run since the other way was last tried, in usual seconds
    _gap: int = FIRST_TRY
    _slow: int = 0  # surprises in a row
    _taken: bool = True  # whether somebody else had a processor in the latest run of all threads
    _trying: bool = False
    _tried: list[float] = field(default_factory=list)  # seconds in usual ones, in the present try

    def choose(self, usual: Usual) -> bool:
        """Whether the next run, of the program that takes `usual`, is to be the caller's alone."""
        gap = self._gap if self.alone or self._taken else MOST_GAP
        waited = self._since >= gap * usual.seconds or self._slow >= SURPRISES
        if usual.runs < KNOWN:  # it becomes known on all threads: there may be no other to try
            return self.alone and not waited
        self._trying = self._trying or waited
        return self.alone != (self._trying and len(self._tried) != 1)

    def note(self, usual: Usual, seconds: float, missing: float = math.inf) -> None:
        """What the run took that `choose` was asked for, and how many processors its threads did
        without in the mean, if that is known."""
        times = seconds / usual.seconds if usual.seconds else 1.0
        if self._trying and usual.runs >= KNOWN:
            self._judge(times)
            return
        self._since += usual.seconds
        self._slow = self._slow + 1 if times > SPIKE and not self.alone else 0
        self._taken = missing > TAKEN

    def _judge(self, times: float) -> None:
        """One more run of a try: it is lost as soon as the other way was not the better one."""
        self._tried.append(times)
        if len(self._tried) == 1:
            return
        there = max(self._tried[::2])
        lost = there >= self._tried[1] * (1.0 if self.alone else MARGIN)
        if not lost and len(self._tried) == 2:
            return
        if lost:
            most = MOST_ALONE if self.alone else MOST_GAP
            self._gap = min(max(GAP, 2 * self._gap), most)
        else:
            self.alone, self._gap = not self.alone, FIRST_TRY
        self._trying, self._since, self._slow = False, 0.0, 0
        self._tried.clear()
