"""Many texts decoded together, each to the bytes that it would have alone.

A row's bits depend on the tokens that it sees and on nothing else: not on the rows beside it, on
the slots in which those tokens lie, on who computed them, or on how a prompt was cut. So a batch
may do whatever is quick: texts come and go between steps, begin with rows that another text left,
draft as long as rows are cheap, and give their slots back when memory is short, to be computed
again. None of this can be read off the text.

The oldest text of the highest priority always goes on: whoever came later gives way to it.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.given import piece
from ggraph.decode.model import LOG, LONGEST_DRAFT
from ggraph.decode.rows import ROW_BUCKETS, row_bucket
from ggraph.decode.speculation import Asking
from ggraph.decode.statistics import Clock
from ggraph.errors import InputError
from ggraph.serving.heads import HeadDrafter, ListHead, Question
from ggraph.serving.parts import Part, course_of, rows_of_all
from ggraph.serving.pieces import beside, filling
from ggraph.serving.prices import SharedPrices
from ggraph.serving.steps import first_shapes
from ggraph.serving.stride import Meanwhile, Stride, may_stride
from ggraph.serving.text import Request, Text, begun
from ggraph.serving.texts import Texts

# Slots beside those of its prompt that each text finds where another is to begin, lest that be sent
# back at once. By `scripts/choose_serving.py` 16 to 32 cost least, 1 up to 5 % more, 64 up to 9.
GROWTH = 16


class _Asked(NamedTuple):
    """Whom a text asks through its drafter, and what; the draft goes to its part of a step."""

    guesser: ListHead
    drafter: HeadDrafter
    part: Part
    asking: Asking
    question: Question


@dataclass(eq=False)
class Batch(Texts):
    """Runs texts on one runner. One thread at a time may call it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock = Clock(self.now)
        self._arrived = 0
        self._parts: dict[Text, Part] = {}  # of the step that is being put together
        self._rows = 0  # of it, where all its texts go on

    def plans(self) -> list[Callable[[], object]]:
        """Makes the plans that short texts need, one by one, the commonest first, and has memory
        for the cache before texts write there, for which the first prompts would wait by as much
        as a third of their time."""
        runner, most = self.runner, self.limits.texts
        first, *others = (partial(runner.prepare, s) for s in first_shapes(runner, most, self.taps))
        touches = [partial(runner.session.touch, name) for name in runner.caches()]
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

    def cancel(self, text: Text) -> None:
        """End a text now; what it has computed stays for others."""
        if text.ended is not None:
            return
        text.ended = "cancelled"
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

    def _admit(self) -> None:
        """Let those who wait begin, as far as there is room for what they will compute."""
        while self.waiting and len(self.running) < self.limits.texts:
            text = self.waiting[0]
            self.memory.look_up(text)
            needed = text.outstanding + GROWTH * (1 + len(self.running))
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
            return beside(going, most, self.row_seconds, self.step_seconds)
        return filling(sum(t.outstanding for t in self.running), self.limits.alone)

    def _piece(self, text: Text, budget: int) -> int:
        """Add the next rows of a prompt, at most `budget`, or a block of more: how many. None where
        the step has no room for that any more, which the first text never finds."""
        self.memory.look_up(text)
        most = min(self.memory.ahead(text), budget)
        count = piece(text.tokens[text.computed : text.computed + most], most)
        there = sum(len(p.tokens) for p in self._parts.values())
        if there + count > ROW_BUCKETS[-1] or not self._reserve(text, count):
            return 0
        at, slots = text.computed, self.slots(text, count)
        wanted = count == text.outstanding and text.limit > 0
        self._parts[text] = Part(text, text.tokens[at : at + count], slots, wanted)
        return count

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
            guesser = waiting[0].guesser
            group = [w for w in waiting if w.guesser is guesser]
            waiting = [w for w in waiting if w.guesser is not guesser]
            start = self.now()
            made = _guessed(guesser, group)
            share = (self.now() - start) / sum(max(1, len(d)) for d in made)
            for asked, draft in zip(group, made, strict=True):
                answer = draft, share * max(1, len(draft))
                waiting += self._advance(asked.part, asked.asking, answer)

    def _advance(
        self, part: Part, asking: Asking, answer: tuple[Draft, float] | None
    ) -> list[_Asked]:
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
                    if g.kind == drafter.asks and (most := min(wanted, g.room(text))) > 0:
                        growth = drafter.growth(most, g.head.target_ids)
                        question = Question(text, part.slots[0], growth)
                        return [_Asked(g, drafter, part, asking, question)]
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


def _guessed(guesser: ListHead, group: Sequence[_Asked]) -> list[Draft]:
    """What those who ask it together get. Where it raises, none of these texts asks it again, and
    what it knew of them is forgotten, since nobody can tell how much of that was computed."""
    try:
        guesser.draft([w.question for w in group])
        return [w.question.draft.draft() for w in group]
    except Exception as error:
        for w in group:
            drafts, text = w.part.text.request.drafts, w.part.text
            assert drafts is not None, f"text {text.arrived} has no drafters"
            guesser.forget([*text.slots[: text.computed], w.question.slot])
            drafts.lose(w.drafter, error)
        return [NOTHING] * len(group)


def _order(text: Text) -> tuple[int, int]:
    return text.order
