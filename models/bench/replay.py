"""Recorded texts played again through the real decoding loop, by a clock that only counts.

A recording has, for each place of an answer, what a head would have guessed there and how sure it
was, and what steps and guesses took on the machine. So rules are compared in a second and without a
clock's scatter: the engine, the policy and the suffix drafter are those that users run, only the
target, the head and the time are played.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ggraph.decode.acceptance import only
from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.draft.tree import Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Policy
from ggraph.decode.rows import Rows, longest_draft
from ggraph.decode.runner import Result
from ggraph.decode.sampler import Sampler
from ggraph.decode.speculation import Speculation
from ggraph.decode.statistics import Statistics
from ggraph.tensor import Array

VOCABULARY = 1 << 30  # any token may be played
WRONG = VOCABULARY - 1  # a token that no text has


@dataclass(frozen=True)
class Recorded:
    """A prompt, its answer, and a head's chain behind each token of the answer but the last: up to
    which of its guesses it is right, and the head's own chance of each in hundredths."""

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]
    guesses: Sequence[tuple[int, Sequence[int]]] = ()


@dataclass(frozen=True)
class Machine:
    """What things take, in seconds."""

    rows: Sequence[float]  # a step with what follows from its logits, by rows - 1
    question: float = 0.0  # asking a head, its first guess
    further: float = 0.0  # each further guess
    unread: float = 0.0  # each row that a head has to read beyond two
    lookup: float = 0.0  # asking the suffix drafter
    host: float = 0.0  # the rest of a round

    def step(self, rows: int) -> float:
        """A step; beyond what was measured, rows cost what the last one did."""
        known = self.rows
        more = rows - len(known)
        return known[rows - 1] if more <= 0 else known[-1] + more * (known[-1] - known[-2])


@dataclass
class Time:
    """A clock that stands still but for what is added."""

    at: float = 0.0

    def __call__(self) -> float:
        return self.at


@dataclass
class Target:
    """Plays a `Runner` that picks: of a row, the next token of the text."""

    tokens: Sequence[int]
    machine: Machine
    time: Time
    past: int = 0
    taps: tuple[int, ...] = ()
    context: int = 1 << 20
    picks: int | Sampler = 1
    recurrent: bool = False
    model: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCABULARY))

    @property
    def longest(self) -> int:
        """A runner's."""
        return longest_draft(self.recurrent)

    def prepare(self, tokens: Sequence[int]) -> None:
        """Nothing is planned."""

    def ready(self, rows: int, reach: int) -> None:
        """Nothing is planned."""

    def keep(self, rows: Sequence[int]) -> None:
        """So many tokens stay."""
        self.past += len(rows)

    def movable(self, rows: int) -> None:
        """Nothing is planned."""

    def tapped(self, slots: Sequence[int]) -> Mapping[int, Array]:
        """No layer."""
        return {}

    def text(self, tokens: Sequence[int]) -> Result:
        """The prompt takes no time."""
        self.past += len(tokens)
        return self._said([self.past - 1])

    def follow(self, token: int) -> Result:
        """A step of one row, which stays."""
        self.time.at += self.machine.step(1) + self.machine.host
        return self.text([token])

    def step(self, rows: Rows, wanted: Sequence[int]) -> Result:
        """One step of the target."""
        self.time.at += self.machine.step(len(rows.tokens)) + self.machine.host
        return self._said(rows.positions)

    def _said(self, positions: Sequence[int]) -> Result:
        last = len(self.tokens) - 1
        return Result(np.array([[self.tokens[min(p + 1, last)]] for p in positions]), {}, 1)


@dataclass
class Head:
    """Plays a head that guesses one token after another. `goes_on` as `EagleDrafter`'s."""

    recorded: Recorded
    machine: Machine
    time: Time
    goes_on: Callable[[Sequence[float]], bool]
    name: str = "eagle3"
    taps: tuple[int, ...] = ()
    levels: int = 0
    _length: int = 0
    _waiting: int = 0

    def warm(self, past: int, longest: int) -> None:
        """Nothing is planned."""

    def begin(self, first: int) -> None:
        """A text of one token."""
        self._length, self._waiting = 1, 0

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """The text goes on."""
        self._length += len(tokens)
        self._waiting += len(tokens)

    def read(self) -> None:
        """The prompt is read, and the first guess made, in the prompt's time."""
        self._waiting = 0

    def propose(self, limit: int) -> Draft:
        """The chain that was recorded here."""
        m, waiting, self._waiting = self.machine, self._waiting, 0
        self.time.at += m.question + m.unread * max(0, waiting - 2) if waiting else 0.0
        done = self._length - len(self.recorded.prompt)
        right, chances = self.recorded.guesses[done - 1]
        said: list[float] = []
        for chance in chances[:limit]:
            if said and not self.goes_on(said):
                break
            self.time.at += m.further if said else 0.0
            said.append(chance / 100)
        good = self.recorded.answer[done : done + min(right, len(said))]
        return Draft.chain([*good, *[WRONG] * (len(said) - len(good))], said)


@dataclass
class Lookup(SuffixDrafter):
    """The suffix drafter, whose time is counted."""

    machine: Machine = field(default_factory=lambda: Machine([1.0]))
    time: Time = field(default_factory=Time)

    def propose(self, limit: int) -> Draft:
        """What it proposes."""
        self.time.at += self.machine.lookup
        return super().propose(limit)


def play(
    recorded: Recorded,
    machine: Machine,
    policy: Policy,
    names: Sequence[str] = ("suffix", "eagle3"),
    others: Sequence[Drafter] = (),
) -> Statistics:
    """Decode a recorded text with drafters and a policy; `others` are asked after those named."""
    time = Time()
    target = Target([*recorded.prompt, *recorded.answer], machine, time)
    engine = Engine(target, (), now=time)
    goes_on = partial(_goes_on, policy)
    made: dict[str, Callable[[], Drafter]] = {
        "suffix": lambda: Lookup(machine=machine, time=time),
        "eagle3": lambda: Head(recorded, machine, time, goes_on),
    }
    drafts = Speculation([*(made[n]() for n in names), *others], policy)
    limit = len(recorded.answer)
    found = list(engine.generate(recorded.prompt, only, _ignore, limit=limit, drafts=drafts))
    assert found == list(recorded.answer), (recorded.name, found)
    return engine.statistics


def speed(done: Statistics, machine: Machine) -> float:
    """Against plain decoding of the same text."""
    plain = (done.new_tokens - 1) * (machine.step(1) + machine.host)
    return plain / done.decode_seconds if done.decode_seconds else 1.0


def _goes_on(policy: Policy, chances: Sequence[float]) -> bool:
    return policy.ask("eagle3", VOCABULARY, chances=chances) > len(chances)


def _ignore(token: int) -> None:
    """A sampler without memory."""
