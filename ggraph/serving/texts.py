"""The texts of a batch: which there are, what they hold, and how a step's results move them on.

`Batch` says what a step computes; `Stride` goes on where nothing is to be said.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.decode.acceptance import Kept, match, only
from ggraph.decode.prices import Prices
from ggraph.decode.runner import Result
from ggraph.errors import InputError
from ggraph.serving.counters import Counters
from ggraph.serving.disk import Spill
from ggraph.serving.heads import ListHead, drafts_by_head
from ggraph.serving.memory import Memory
from ggraph.serving.parts import Part, place, rows_of_text
from ggraph.serving.pieces import MIXED_ROWS, mixed_bucket
from ggraph.serving.states import States
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Text

NONE = Kept((), ())


@dataclass(frozen=True)
class Limits:
    """How much one step may do. At most `texts` run together. Where prompts are read, a step has up
    to `alone` rows if nobody waits for a next token, about `beside` if few do; where all go on,
    `rows`, drafts included. A prompt is cut to keep a recurrent model's state where that is `apart`
    tokens from the one before: a cut costs a step, as much as five to eight rows."""

    texts: int = 32
    alone: int = MIXED_ROWS[-1]
    beside: int = 48
    rows: int = 64
    apart: int = 64

    def __post_init__(self) -> None:
        most = MIXED_ROWS[-1]
        if not (1 <= self.texts <= self.rows <= most and 1 <= self.beside <= self.alone <= most):
            raise InputError(f"{self}: expected texts <= rows and beside <= alone, 1 to {most}")
        if self.apart < 1:
            raise InputError(f"{self}: expected states 1 or more tokens apart")


@dataclass(eq=False)
class Texts:
    """Those that wait and those that run, on one runner."""

    runner: ListRunner
    limits: Limits = field(default_factory=Limits)
    prices: Prices = field(default_factory=Prices)
    guessers: Sequence[ListHead] = ()  # who draft for all texts that ask, one of each kind
    disk: Spill | None = None  # for rows that the cache forgets
    now: Callable[[], float] = time.perf_counter
    waiting: list[Text] = field(default_factory=list)
    running: list[Text] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if 0 < self.runner.texts < self.limits.texts:
            most = f"states for {self.runner.texts} texts"
            raise InputError(f"{self.limits}: the runner of {self.runner.model.name} has {most}")
        states = States(self.runner.texts, self.runner.copy) if self.runner.texts else None
        self.memory = Memory(self.runner.slots, states, self.limits.apart)
        # Layers whose inputs a step gives, for the head's sake.
        self.taps = tuple(t for g in self.guessers for t in g.taps)
        self.row_seconds = 0.0  # of the latest step with prompts
        self.step_seconds = 0.0  # of the latest one without

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def together(self) -> int:
        """How many texts are computed together at most."""
        return self.limits.texts

    def slots(self, text: Text, count: int) -> list[int]:
        """The next of a text's spare slots, which it will write to."""
        slots = text.spare[:count]
        del text.spare[:count]
        for g in self.guessers:
            g.forget(slots)
        return slots

    def dismiss(self, ended: Sequence[Text]) -> None:
        """Texts that have ended hold nothing any more."""
        for text in ended:
            self.running.remove(text)
            if self.disk is not None:
                self.disk.keep(text, self.memory)
            self.memory.forget(text)

    def count(self, took: float, rows: int = 0) -> None:
        """A step was run; of so many rows where prompts are among them."""
        self.counters.steps += 1
        self.counters.seconds += took
        if rows:
            self.row_seconds = took / mixed_bucket(rows)
        else:
            self.step_seconds = took

    def take(self, part: Part, result: Result, took: float) -> None:
        """Move a text on by what its rows brought."""
        text, certain = part.text, part.certain
        first = not text.new
        kept = self._kept(part, result, took) if part.wanted else NONE
        place(part, kept.nodes)
        self.memory.replay(text, part.log, kept.nodes)
        if text.request.features:
            at = rows_of_text(part, kept.nodes)
            taps = [result.taps[i][at] for i in self.runner.taps]
            text.features.append(np.concatenate(taps, axis=1))
        elif self.taps and drafts_by_head(text.request):
            for g in self.guessers:
                g.note(text, result.taps, rows_of_text(part, kept.nodes))
        if first:
            text.read += certain
            self.counters.prompt_rows += certain
        if first and kept.tokens:
            self.counters.reused += text.reused
        text.tokens += kept.tokens
        self.counters.new_tokens += len(kept.tokens)
        if text.outstanding != 1 or first:  # others may begin like this prompt
            self.memory.publish(text)
        if text.ended is None and text.limit and text.new >= text.limit:
            text.ended = "length"
        elif not text.limit and not text.outstanding:
            text.ended = "read"

    def _kept(self, part: Part, result: Result, took: float) -> Kept:
        """The tokens that a text gains. What its voice raises ends it."""
        text, voice, drafts = part.text, part.text.request.voice, part.text.request.drafts
        if text.ended is not None:  # before its rows were computed
            return NONE

        def accept(token: int) -> bool:
            text.ended = voice.accept(token)
            return text.ended is not None

        logits, pick = result.logits[part.logits :], only if result.picked else voice.pick
        kept = match(part.draft, logits, pick, accept, frozenset(), text.limit - text.new)
        if kept.error is not None:
            text.ended, text.error = "error", kept.error
            return kept
        if drafts is not None and text.new:
            drafts.learn(part.draft, kept, took)
        elif drafts is not None:
            drafts.begin([*text.tokens, *kept.tokens])
        for counted in (text, self.counters):
            counted.drafted += len(part.draft)
            counted.accepted += len(kept.nodes)
        return kept
