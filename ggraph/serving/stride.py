"""Steps one after the other, between which nobody waits for Python.

Where every text goes on by one row and always takes the best token, the step before brings all that
a step needs: its tokens. So its rows are made while that one computes, and it begins as soon as the
tokens are there. What follows from them, such as words and ends, is found out while it computes: it
has one row too many of a text that has ended by then, and nobody looks at that row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ggraph.decode.runner import Result
from ggraph.serving.parts import Part, rows_of_all
from ggraph.serving.steps import Ready
from ggraph.serving.text import Text
from ggraph.serving.texts import Texts

# Told of texts that have ended, while a step computes.
Meanwhile = Callable[[Sequence[Text]], object]


def may_stride(texts: Texts, parts: Sequence[Part]) -> bool:
    """Whether nothing but tokens is needed to go on behind a step of these parts."""
    return not texts.runner.texts and bool(parts) and all(_is_plain(p) for p in parts)


def _is_plain(part: Part) -> bool:
    text, asked = part.text, part.text.request
    is_one = len(part.tokens) == 1 and part.wanted and text.new > 0
    return is_one and asked.drafts is None and not asked.features and asked.voice.greedy


@dataclass(eq=False)
class Stride:
    """A step of these parts, which are all that there is to do, and those that may follow it."""

    texts: Texts
    parts: list[Part]
    meanwhile: Meanwhile
    go_on: Callable[[], bool]
    _untaken: tuple[list[Part], Result, float] | None = None  # what a step found, and its seconds
    _ended: list[Text] = field(default_factory=list)  # by that
    _next: list[Part] = field(default_factory=list)
    _ready: Ready | None = None  # of those, but for their tokens

    def run(self) -> list[Text]:
        """The texts that ended, but for those of which `meanwhile` was told."""
        texts, runner = self.texts, self.texts.runner
        ready: Ready | None = self._rows(self.parts, 0)
        while ready is not None:
            runner.session.meanwhile(self._meanwhile)
            start = texts.now()
            result = runner.run(ready, greedy=True)
            took = texts.now() - start
            texts.count(took)
            gone = [p for p in self.parts if p.text.ended is not None]
            self._give_back(gone)
            texts.dismiss(self._ended)
            self._untaken = [p for p in self.parts if p not in gone], result, took
            ready = self._follow(result)
        return self._take()

    def _follow(self, result: Result) -> Ready | None:
        """The next step, with the tokens that the last one has found; None where there is none."""
        ready, parts = self._ready, self._next
        self._ready, self._next = None, []
        found = {p.text: int(token) for p, [token] in zip(self.parts, result.logits, strict=True)}
        tokens = [found[p.text] for p in parts]
        if ready is None or min(tokens) < 0 or not self.go_on():
            self._give_back(parts)
            return None
        for part, token in zip(parts, tokens, strict=True):
            part.tokens = [token]
        ready.feeds.stored["tokens"][: len(tokens)] = tokens
        self.parts = parts
        return ready

    def _meanwhile(self) -> None:
        """What is done while a step computes."""
        self._ended = self._take()
        self.meanwhile(self._ended)
        self._compose()

    def _take(self) -> list[Text]:
        """Move texts on by what the step before has found: those that ended."""
        if self._untaken is None:
            return []
        (parts, result, took), self._untaken = self._untaken, None
        for part in parts:
            self.texts.take(part, result, took)
        return [p.text for p in parts if p.text.ended is not None]

    def _compose(self) -> None:
        """The next step, of those who will go on behind the present one; none where others may come
        in, or slots or a plan are missing."""
        texts = self.texts
        stay = [
            p.text for p in self.parts if p.text.ended is None and p.text.new + 1 < p.text.limit
        ]
        if not stay or (texts.waiting and len(stay) < len(self.parts)):
            return
        reach = max(t.computed for t in stay) + 2
        if not texts.runner.has_plan(len(stay), reach, texts.taps):
            return
        if not all(texts.memory.reserve(t, 1) for t in stay):
            return
        self._next = [Part(t, [0], texts.slots(t, 1), wanted=True) for t in stay]
        self._ready = self._rows(self._next, 1)

    def _rows(self, parts: Sequence[Part], ahead: int) -> Ready:
        return self.texts.runner.ready(rows_of_all(parts, ahead), self.texts.taps)

    @staticmethod
    def _give_back(parts: Sequence[Part]) -> None:
        """The slots of rows that nobody looks at."""
        for part in parts:
            part.text.spare[:0] = part.slots
