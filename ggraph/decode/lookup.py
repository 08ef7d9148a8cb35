"""Drafters without a model: what followed here before. Floor 9.

`PromptLookup` finds the longest recent n-gram that ended like the text does now (Saxena 2023,
"prompt lookup decoding"). `SuffixDrafter` does the same for suffixes of any length with a suffix
automaton, built online in amortised constant time per token (Blumer et al. 1985).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ggraph.decode.draft import Draft
from ggraph.errors import InputError
from ggraph.tensor import Array


@dataclass
class PromptLookup:
    """Proposes what followed the last occurrence of the text's final n-gram, longest n first."""

    most: int = 4  # longest n-gram
    least: int = 2  # shortest n-gram
    name: str = "lookup"
    taps: tuple[int, ...] = ()
    _text: list[int] = field(default_factory=list)
    _after: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"lookup: n-grams from {self.least} to {self.most}")

    def begin(self, first: int) -> None:
        """Start over with one token."""
        self._text, self._after = [], {}
        self._push(first)

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Index the n-grams that the new tokens complete."""
        for token in tokens:
            self._push(token)

    def propose(self, limit: int) -> Draft:
        """The continuation of the latest earlier occurrence, up to `limit` tokens."""
        for n in range(self.most, self.least - 1, -1):
            ends = self._after.get(tuple(self._text[-n:]))
            if ends is None or len(self._text) < n:
                continue
            start = ends[0] if ends[0] < len(self._text) else ends[1]
            if start > 0:
                return Draft.chain(continuation(self._text, start, limit))
        return Draft()

    def _push(self, token: int) -> None:
        """Add a token; remember for each n-gram its last two end positions."""
        self._text.append(token)
        end = len(self._text)
        for n in range(self.least, min(self.most, end) + 1):
            gram = tuple(self._text[-n:])
            last, _ = self._after.get(gram, (0, 0))
            self._after[gram] = (end, last)


def continuation(text: Sequence[int], start: int, limit: int) -> list[int]:
    """`limit` tokens from `start`; a text that repeats itself goes on repeating."""
    out: list[int] = []
    period = len(text) - start
    for i in range(limit if period > 0 else 0):
        out.append(text[start + i] if start + i < len(text) else out[i - period])
    return out


@dataclass
class _State:
    """A class of substrings with the same end positions."""

    length: int  # of the longest substring in the class
    link: int  # the class of its longest proper suffix that is elsewhere too
    end: int  # end position of the latest known occurrence
    next: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """All substrings of a growing text, with where each was last seen before the newest token."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._states = [_State(0, -1, 0)]
        self._last = 0  # class of the whole text
        self._earlier = 0
        self._match = 0  # class of the longest suffix that occurred before
        self.match_length = 0

    def push(self, token: int) -> None:
        """Add a token; amortised constant time."""
        self._follow(token)
        self.text.append(token)
        self._extend(token)
        self._touch()

    def earlier_end(self) -> int:
        """End position of an earlier occurrence of the longest repeated suffix."""
        return self._earlier

    def _follow(self, token: int) -> None:
        """Extend the longest repeated suffix by `token`, shortening it until it fits."""
        states = self._states
        while self._match and token not in states[self._match].next:
            self._match = states[self._match].link
            self.match_length = states[self._match].length
        target = states[self._match].next.get(token)
        self._match = target if target is not None else 0
        self.match_length = self.match_length + 1 if target is not None else 0
        self._earlier = states[self._match].end if self.match_length else 0

    def _extend(self, token: int) -> None:
        """The classical online construction: one new class, at most one split."""
        states = self._states
        new, p = len(states), self._last
        states.append(_State(states[p].length + 1, 0, len(self.text)))
        while p != -1 and token not in states[p].next:
            states[p].next[token] = new
            p = states[p].link
        if p != -1:
            q = states[p].next[token]
            states[new].link = (
                q if states[q].length == states[p].length + 1 else self._split(p, q, token)
            )
        self._last = new

    def _split(self, p: int, q: int, token: int) -> int:
        """Separate the shorter substrings of class q; returns their class."""
        states = self._states
        clone = len(states)
        old = states[q]
        states.append(_State(states[p].length + 1, old.link, old.end, dict(old.next)))
        while p != -1 and states[p].next.get(token) == q:
            states[p].next[token] = clone
            p = states[p].link
        old.link = clone
        if self._match == q and self.match_length <= states[clone].length:
            self._match = clone
        return clone

    def _touch(self) -> None:
        """The matched suffix now also ends here; a few links up are refreshed, which is enough
        for recent occurrences to be preferred."""
        state = self._match
        for _ in range(8):
            if state <= 0:
                return
            self._states[state].end = len(self.text)
            state = self._states[state].link


@dataclass
class SuffixDrafter:
    """Proposes what followed the longest suffix of the text that occurred before."""

    least: int = 2  # shortest suffix that is trusted
    per_match: float = 2.0  # drafted tokens per matched token: long matches go on for long
    name: str = "suffix"
    taps: tuple[int, ...] = ()
    _automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def begin(self, first: int) -> None:
        """Start over with one token."""
        self._automaton = SuffixAutomaton()
        self._automaton.push(first)

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Add the new tokens."""
        for token in tokens:
            self._automaton.push(token)

    def propose(self, limit: int) -> Draft:
        """The continuation of the longest repeated suffix."""
        matched = self._automaton.match_length
        if matched < self.least:
            return Draft()
        count = min(limit, max(1, int(self.per_match * matched)))
        start = self._automaton.earlier_end()
        return Draft.chain(continuation(self._automaton.text, start, count))
