"""Many texts decoded together, each to the bytes that it would have alone.

A row's bits depend on the tokens that it sees and on nothing else: not on the rows beside it, on
the slots in which those tokens lie, on who computed them, or on how a prompt was cut. So a batch
may do whatever is quick: texts come and go between steps, begin with rows that another text left,
draft as long as rows are cheap, and give their slots back when memory is short, to be computed
again. None of this can be read off the text.

The oldest text of the highest priority always goes on: whoever came later gives way to it.
"""

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ggraph.decode.acceptance import Kept, match, only
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.model import LOG, LONGEST_DRAFT
from ggraph.decode.prices import Prices
from ggraph.decode.rows import row_bucket
from ggraph.decode.runner import Result
from ggraph.decode.speculation import Asking
from ggraph.decode.statistics import Clock
from ggraph.errors import InputError
from ggraph.serving.counters import Counters
from ggraph.serving.disk import Spill
from ggraph.serving.heads import HeadDrafter, ListHead, Question, drafts_by_head
from ggraph.serving.memory import LUMP, Memory
from ggraph.serving.parts import Part, course_of, place, rows_of_all, rows_of_text
from ggraph.serving.pieces import beside, filling, mixed_bucket
from ggraph.serving.prices import SharedPrices
from ggraph.serving.states import States
from ggraph.serving.steps import PARTS, ListRunner, first_shapes
from ggraph.serving.stride import Meanwhile, Stride, may_stride
from ggraph.serving.text import Request, Text, begun


@dataclass(frozen=True)
class Limits:
    """How much one step may do. At most `texts` run together. Where prompts are read, a step has up
    to `alone` rows if nobody waits for a next token, about `beside` if few do; where all go on,
    `rows`, drafts included. A prompt is cut to keep a recurrent model's state where that is `apart`
    tokens from the one before: a cut costs a step, as much as five to eight rows."""

    texts: int = 32
    alone: int = 256
    beside: int = 48
    rows: int = 64
    apart: int = 64

    def __post_init__(self) -> None:
        if not (1 <= self.texts <= self.rows <= 256 and 1 <= self.beside <= self.alone <= 256):
            raise InputError(f"{self}: expected texts <= rows and beside <= alone, 1 to 256")
        if self.apart < 1:
            raise InputError(f"{self}: expected states 1 or more tokens apart")


_Asked = tuple[ListHead, Part, Asking, Question]  # whom a text asks, and what


@dataclass(eq=False)
class Batch:
    """Runs texts on one runner. One thread at a time may call it."""

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
        self._arrived = 0
        self._clock = Clock(self.now)
        self._parts: dict[Text, Part] = {}  # of the step that is being put together
        self._rows = 0  # of it, where all its texts go on
        self._row_seconds = 0.0  # of the latest step with prompts
        self._step_seconds = 0.0  # of the latest one without

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def plans(self) -> list[Callable[[], object]]:
        """Makes the plans that short texts need, one by one, the commonest first, and room for the
        cache."""
        runner, most = self.runner, self.limits.texts
        first, *others = (partial(runner.prepare, s) for s in first_shapes(runner, most, self.taps))
        touches = [partial(runner.touch, part) for part in range(PARTS)]
        copying = [runner.copying] if runner.texts else []
        return [
            first, *touches, *copying, *others, *(p for g in self.guessers for p in g.plans(most)),
        ]  # fmt: skip

    def submit(self, request: Request) -> Text:
        """A text to run. InputError where its prompt is empty, or does not fit."""
        count, context = len(request.prompt), self.runner.context
        if not 1 <= count <= context:
            raise InputError(f"the prompt has {count} tokens; a text may have 1 to {context}")
        if request.drafts is not None:
            request.drafts.check(self.runner)
        room = context - count + 1
        limit = room if request.limit < 0 else min(request.limit, room)
        self._arrived += 1
        text = begun(request, self._arrived, limit, self.memory.tree.root)
        bisect.insort(self.waiting, text, key=_order)
        return text

    def cancel(self, text: Text, reason: str = "cancelled") -> None:
        """End a text now; what it has computed stays for others."""
        if text.ended is not None:
            return
        text.ended = reason
        if text in self.waiting:
            self.waiting.remove(text)
        else:
            self.running.remove(text)
            self.memory.forget(text)

    def step(
        self, meanwhile: Meanwhile = lambda _: None, go_on: Callable[[], bool] = lambda: False
    ) -> list[Text]:
        """Run a step of whoever can go on: the texts that ended by it.

        `meanwhile`, which must not use the batch, is called while it computes. A next step that
        needs nothing but tokens follows where `go_on` says so, and so on; the texts that the one
        before has ended are then told to `meanwhile` alone.
        """
        self._admit()
        self._compose()
        parts = list(self._parts.values())
        self._parts.clear()
        if may_stride(self, parts):
            ended = Stride(self, parts, meanwhile, go_on).run()
        else:
            self.runner.session.meanwhile(lambda: meanwhile(()))
            for tapped in (False, True):
                group = [p for p in parts if p.text.request.features == tapped]
                if group:
                    self._run(group, self.runner.taps if tapped else self.taps)
            ended = [p.text for p in parts if p.text.ended is not None]
        self.dismiss(ended)
        return ended

    def dismiss(self, ended: Sequence[Text]) -> None:
        """Texts that have ended hold nothing any more."""
        for text in ended:
            self.running.remove(text)
            if self.disk is not None:
                self.disk.keep(text, self.memory)
            self.memory.forget(text)

    def _admit(self) -> None:
        """Let those who wait begin, as far as there is room for what they will compute."""
        while self.waiting and len(self.running) < self.limits.texts:
            text = self.waiting[0]
            self.memory.look_up(text)
            needed = text.outstanding + LUMP * (1 + len(self.running))
            if self.running and self.memory.room < needed:
                self.memory.forget(text)
                return
            self.waiting.pop(0)
            self.memory.begin(text)
            bisect.insort(self.running, text, key=_order)
            if self.disk is not None:
                self.counters.restored += self.disk.restore(text, self.memory, self.slots)

    def _preempt(self, text: Text) -> None:
        """The text waits again, and computes again what will not be in the tree by then."""
        self.counters.preempted += 1
        if (part := self._parts.pop(text, None)) is not None:
            text.spare += part.slots
        self.running.remove(text)
        self.memory.forget(text)
        text.features.clear()
        bisect.insort(self.waiting, text, key=_order)

    def _reserve(self, text: Text, count: int) -> bool:
        """Give a text slots, at the expense of those that came later. Whether it may go on."""
        while not self.memory.reserve(text, count):
            last = self.running[-1]
            self._preempt(last)
            if last is text:
                return False
        return True

    def _compose(self) -> None:
        """The rows of a step: one for each text that goes on, pieces of prompts, or drafts."""
        for text in list(self.running):
            if text in self.running and text.outstanding == 1 and self._reserve(text, 1):
                slots = self.slots(text, 1)
                self._parts[text] = Part(text, [text.tokens[-1]], slots, text.limit > 0)
        reading = [t for t in self.running if t.outstanding > 1]
        budget = self._budget() if reading else 0
        for text in reading:
            if budget > 0 and text in self.running:
                budget -= self._piece(text, budget)
        if not reading:
            self._draft()

    def _budget(self) -> int:
        """How many rows of prompts this step reads beside those who go on."""
        if going := len(self._parts):
            most = self.limits.beside
            return beside(going, most, self._row_seconds, self._step_seconds)
        return filling(sum(t.outstanding for t in self.running), self.limits.alone)

    def _piece(self, text: Text, budget: int) -> int:
        """Add the next rows of a prompt, at most `budget`: how many."""
        self.memory.look_up(text)
        count = min(self.memory.ahead(text), budget)
        if not self._reserve(text, count):
            return 0
        at, slots = text.computed, self.slots(text, count)
        wanted = count == text.outstanding and text.limit > 0
        self._parts[text] = Part(text, text.tokens[at : at + count], slots, wanted)
        return count

    def slots(self, text: Text, count: int) -> list[int]:
        """The next of a text's spare slots, which it will write to."""
        slots = text.spare[:count]
        del text.spare[:count]
        for g in self.guessers:
            g.forget(slots)
        return slots

    def _draft(self) -> None:
        """Let texts draft, as far as rows are worth it and slots are free; those that ask the
        head ask it together."""
        waiting: list[_Asked] = []
        self._rows = len(self._parts)
        for text, part in self._parts.items():
            drafts = text.request.drafts
            if drafts is None or not text.new or (room := self._room(text)) <= 0:
                continue
            if isinstance(prices := getattr(drafts.policy, "prices", None), SharedPrices):
                prices.others = self._rows - 1
            waiting += self._advance(part, drafts.asking(room), None)
        while waiting:
            guesser = waiting[0][0]
            group = [w for w in waiting if w[0] is guesser]
            waiting = [w for w in waiting if w[0] is not guesser]
            start = self.now()
            guesser.draft([question for _, _, _, question in group])
            made = [q.draft.draft() for _, _, _, q in group]
            share = (self.now() - start) / sum(max(1, len(d)) for d in made)
            for (_, part, asking, _), draft in zip(group, made, strict=True):
                waiting += self._advance(part, asking, (draft, share * max(1, len(draft))))

    def _advance(
        self, part: Part, asking: Asking, answer: tuple[Draft, float] | None
    ) -> "list[_Asked]":
        """Go on with a text's drafters until another is to be asked together with others' (that
        question), or until the draft is there, which the part then has."""
        text, drafts = part.text, part.text.request.drafts
        assert drafts is not None, f"text {text.arrived} has no drafters"
        try:
            while True:
                drafter, wanted = next(asking) if answer is None else asking.send(answer)
                if not isinstance(drafter, HeadDrafter):
                    answer = drafts.proposed(drafter, wanted, self._clock)
                    continue
                for g in self.guessers:
                    if g.kind == drafter.asks and g.knows(text):
                        growth = drafter.growth(wanted, g.head.target_ids)
                        return [(g, part, asking, Question(text, part.slots[0], growth))]
                answer = NOTHING, 0.0
        except StopIteration as end:
            draft = self._permitted(text, end.value.first(self._room(text)))
        if draft and self.memory.reserve(text, len(draft)):
            part.draft, self._rows = draft, self._rows + len(draft)
            part.tokens += draft.tokens
            part.slots += self.slots(text, len(draft))
            if self.runner.texts:
                part.log = self.memory.log.take(len(draft))
        return []

    @staticmethod
    def _permitted(text: Text, draft: Draft) -> Draft:
        """As much of a draft as the text's voice lets pass. What that raises ends the text."""
        try:
            return text.request.voice.permitted(draft)
        except Exception as error:
            text.ended, text.error = "error", error
            return NOTHING

    def _room(self, text: Text) -> int:
        """How many tokens a text may draft in this step."""
        left, slots = self.limits.rows - self._rows, self.memory.room + len(text.spare)
        if self.runner.texts:
            left = min(left, LOG - self._rows, self.memory.log.free)
        return min(text.limit - text.new - 1, left, LONGEST_DRAFT, slots)

    def _run(self, parts: Sequence[Part], taps: tuple[int, ...]) -> None:
        """One step of the runner for these parts, and what follows from it."""
        rows = rows_of_all(parts)
        logits = sum([r.wanted for r in rows])
        start = self.now()
        courses = [course_of(p) for p in parts] if self.runner.texts else []
        greedy = all(p.text.request.voice.greedy for p in parts if p.wanted)
        result = self.runner.step(rows, taps, courses, greedy=greedy)
        took = self.now() - start
        reads = logits < len(rows)
        self.count(took, len(rows) if reads else 0)
        if not reads and taps == self.taps and any(p.text.request.drafts for p in parts):
            self.prices.note_step(row_bucket(logits), took)  # who drafts needs to know
        for part in parts:
            self.take(part, result, took)

    def count(self, took: float, rows: int = 0) -> None:
        """A step was run; of so many rows where prompts are among them."""
        self.counters.steps += 1
        self.counters.seconds += took
        if rows:
            self._row_seconds = took / mixed_bucket(rows)
        else:
            self._step_seconds = took

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


NONE = Kept((), ())


def _order(text: Text) -> tuple[int, int]:
    return text.order
