"""How an answer's tokens are chosen, and how they become text."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np

from ggraph import Array
from ggraph.decode.draft.tree import Draft
from ggraph.decode.sampler import Sampler
from ggraph.text.stream import TextStream

from .errors import Refused

STOP = "stop"


@dataclass(frozen=True)
class Chance:
    """A token with the logarithm of its chance."""

    token: int
    logprob: float


Chances = tuple[Chance, ...]


class Said(NamedTuple):
    """A token, the text that it lets be shown, the likeliest tokens in its place, how many letters
    there are before it, what it says that is not for the user, and the stop string that it ends."""

    token: int | None
    text: str
    chance: Chance | None = None
    best: Chances = ()
    at: int = 0
    thought: str = ""
    stopped: str | None = None


Saying = Callable[[], Said]  # called once, in the order in which they were handed on


class Form(Protocol):
    """What an answer may look like, token by token."""

    def allow(self, logits: Array) -> Array:
        """The logits, -inf where a token may not come next."""
        ...

    def accept(self, token: int) -> bool:
        """The answer goes on with `token`; whether it must end there."""
        ...

    def permitted(self, draft: Draft) -> Draft:
        """As much of a draft as fits."""
        ...


@dataclass(eq=False)
class AnswerVoice:
    """Samples tokens and hands on what they say, until an end token, a stop string, or the end of
    the form. `top` is how many of the likeliest tokens are told; None tells no chances.

    What a token says is found when it is told, unless the answer may end by it: the next step need
    not wait for that.
    """

    sampler: Sampler
    stream: TextStream
    ends: frozenset[int]
    say: Callable[[Saying], None]
    bias: Mapping[int, float]
    form: Form | None = None
    top: int | None = None
    told: deque[int] = field(default_factory=deque)  # said elsewhere, and to be said again
    _chance: Chance | None = None
    _best: Chances = ()

    @cached_property
    def greedy(self) -> bool:
        """Whether the token of the greatest logit is always it, and nothing else is told."""
        c = self.sampler.config
        plain = self.form is None and self.top is None and not self.bias
        return plain and c.greedy and not c.penalises

    def pick(self, logits: Array) -> int:
        """The next token; chances are those of the model, before any rule."""
        row = logits
        if self.bias:
            row = row.copy()
            row[list(self.bias)] += np.fromiter(self.bias.values(), np.float32)
        if self.form is not None:
            row = self.form.allow(row)
        token = self.sampler.sample(row)
        if self.top is not None:
            self._chance, self._best = chances(logits, token, self.top)
        return token

    def accept(self, token: int) -> str | None:
        """Say what the token says; "stop" where the answer ends with it. Refused where another
        token was said before."""
        if self.told and (before := self.told.popleft()) != token:
            raise Refused(f"token {before} was said before, but this model says {token}", 409)
        self.sampler.accept(token)
        done = self.form is not None and self.form.accept(token)
        if token in self.ends:
            self.say(self._rest)
            return STOP
        saying = partial(self._said, token, done, self._chance, self._best)
        if self.stream.is_plain(token):
            self.say(saying)
        else:
            said = saying()
            self.say(lambda: said)
        return STOP if done or self.stream.stopped is not None else None

    def permitted(self, draft: Draft) -> Draft:
        """What the form lets pass."""
        return draft if self.form is None else self.form.permitted(draft)

    def rest(self) -> None:
        """Say what was held back, where the answer ended otherwise."""
        if self.stream.stopped is None:
            self.say(self._rest)

    def _said(self, token: int, last: bool, chance: Chance | None, best: Chances) -> Said:
        at = self.stream.letters
        text, thought = self.stream.push(token), self.stream.thought
        if last and self.stream.stopped is None:
            text += self.stream.finish()
        return Said(token, text, chance, best, at, thought, self.stream.stopped)

    def _rest(self) -> Said:
        return Said(None, self.stream.finish(), thought=self.stream.thought)


def chances(logits: Array, token: int, top: int) -> tuple[Chance, Chances]:
    """The chance of a token and those of the `top` likeliest, greatest first."""
    wide = logits.astype(np.float64)
    greatest = wide.max()
    logs = wide - (greatest + np.log(np.exp(wide - greatest).sum()))
    best = np.argpartition(-logs, top)[:top] if 0 < top < len(logs) else np.arange(len(logs))[:top]
    ordered = sorted((int(i) for i in best), key=lambda i: (-logs[i], i))
    return Chance(token, float(logs[token])), tuple(Chance(i, float(logs[i])) for i in ordered)
