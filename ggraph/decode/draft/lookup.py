"""Drafters without a model: what followed here before.

`PromptLookup` finds the longest recent n-gram that ended like the text does now (Saxena 2023,
"prompt lookup decoding"). `SuffixDrafter` goes on from the longest suffix that stood there before,
with a suffix automaton built online in amortised constant time per token (Blumer et al. 1985), and
says how sure it is: a token that followed c of n times is taken to come again with chance
(c - D) / n, D by the length of the suffix (absolute discounting, Ney, Essen and Kneser 1994).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.door import fit
from ggraph.errors import InputError
from ggraph.tensor import Array

# The chance that is held back for other tokens, by the length of the suffix, 1 first. Measured on
# 403 greedy answers of SmolLM2-135M-Instruct to prompts of its own and of public training sets.
DISCOUNTS = (0.81, 0.49, 0.42, 0.34, 0.26, 0.24, 0.23, 0.09)


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
        fit(self)
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


@dataclass(slots=True)
class _State:
    """A class of substrings with the same end positions."""

    length: int  # of the longest substring in the class
    link: int  # the class of its longest proper suffix that is elsewhere too
    count: int = 1  # end positions
    end: int = 0  # the latest of them
    next: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """All substrings of a growing text, with how often each was seen."""

    def __init__(self) -> None:
        self.size = 0  # tokens of the text
        self._states = [_State(0, -1)]
        self._last = 0  # class of the whole text

    @property
    def match(self) -> int:
        """The class of the longest suffix that occurred before; 0 is the empty one's."""
        return max(0, self._states[self._last].link)

    def push(self, token: int) -> None:
        """Add a token; amortised constant time. Of its suffixes that occurred before, the longest
        are counted, as many as have a discount: 2, 8 and all give drafts alike, and all are the
        whole text where one token repeats (docs/log/2026-11-30-constants.md)."""
        self.size += 1
        self._extend(token)
        states, state = self._states, self.match
        for _ in DISCOUNTS:
            if state <= 0:
                return
            here = states[state]
            here.count += 1
            here.end = self.size
            state = here.link

    def following(self, state: int) -> tuple[int, int, float]:
        """What followed the suffixes of a class most often (the latest of equals): the token, the
        class that it leads to, and its chance. Not asked of the empty suffix, nor where none
        occurred before."""
        states = self._states
        here = states[state]
        while not here.next and here.link > 0:  # only the end of the text is like this
            here = states[here.link]
        best, total, most, latest = (0, 0), 0, 0, 0
        for pair in here.next.items():
            then = states[pair[1]]
            count = then.count
            total += count
            if count > most or (count == most and then.end > latest):
                best, most, latest = pair, count, then.end
        return (*best, (most - DISCOUNTS[min(here.length, len(DISCOUNTS)) - 1]) / total)

    def _extend(self, token: int) -> None:
        """The classical online construction: one new class, at most one split."""
        states = self._states
        new, p = len(states), self._last
        states.append(_State(states[p].length + 1, 0, 1, self.size))
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
        states.append(_State(states[p].length + 1, old.link, old.count, old.end, dict(old.next)))
        while p != -1 and states[p].next.get(token) == q:
            states[p].next[token] = clone
            p = states[p].link
        old.link = clone
        return clone


@dataclass
class SuffixDrafter:
    """Proposes what followed the longest suffix of the text that occurred before. How much of it is
    verified is the policy's to say, by the chances."""

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
        """The likeliest continuation of the longest repeated suffix, with the chance of each."""
        known, tokens, chances = self._automaton, list[int](), list[float]()
        state = known.match
        while state and len(tokens) < limit:
            token, state, chance = known.following(state)
            tokens.append(token)
            chances.append(chance)
        return Draft.chain(tokens, chances) if tokens else NOTHING
