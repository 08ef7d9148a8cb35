"""Plain decoding: prompt in, tokens out, with statistics.

Speculative decoding (`ggraph.decode.speculate`) yields the same tokens by another route; both are
iterators of token ids, so a caller cannot tell them apart except by the clock.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ggraph.decode.runner import Result, Runner
from ggraph.errors import InputError
from ggraph.tensor import Array

Pick = Callable[[Array], int]  # logits f32 [V] -> token id


@dataclass
class Statistics:
    """What a generation took. Seconds are wall-clock."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0  # all steps after the prompt
    sample_seconds: float = 0.0  # the part of both that went into choosing tokens
    steps: int = 0
    stopped_by: str = "length"  # "length", "end of text", "stop string" or "context"
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """New tokens per second; the first one belongs to the prompt's step."""
        timed = self.new_tokens - 1
        return timed / self.decode_seconds if self.decode_seconds and timed > 0 else 0.0


class Engine:
    """Decodes with one runner. `ends` are the token ids that end a text.

    An engine that `remembers` does not compute a prompt's step again where the same prompt is read
    twice in a row; nothing else may use the runner in between.
    """

    def __init__(self, runner: Runner, ends: Iterable[int]) -> None:
        self.runner = runner
        self.ends = frozenset(ends)
        self.statistics = Statistics()
        self.remembers = False
        self._read: tuple[tuple[int, ...], Result] | None = None

    def reset(self) -> None:
        """Forget the text in the cache; plans and weights stay."""
        self.runner.past = 0

    def generate(
        self,
        prompt: Sequence[int],
        pick: Pick,
        accept: Callable[[int], None],
        *,
        limit: int = -1,
    ) -> Iterator[int]:
        """Yield up to `limit` new tokens (-1: until the context is full), the end token included.

        `pick` chooses from the logits, `accept` is told of every token that is kept. InputError
        for an empty prompt and for one that does not fit the context.
        """
        room = self.room(prompt)
        limit = room if limit < 0 else min(limit, room)
        stats = self.begin(len(prompt))
        if limit == 0:
            return
        self.runner.prepare(len(prompt))  # planning has statistics of its own
        begun = time.perf_counter()
        token = self.choose(self.read(prompt).logits[-1], pick, accept)
        stats.prompt_seconds = time.perf_counter() - begun
        stats.new_tokens = 1
        yield token
        if token not in self.ends and limit > 1:
            self.runner.prepare(1)  # not before: nobody should wait for it to see the first token
        while token not in self.ends and stats.new_tokens < limit:
            begun = time.perf_counter()
            token = self.choose(self.runner.text([token]).logits[-1], pick, accept)
            stats.decode_seconds += time.perf_counter() - begun
            stats.new_tokens += 1
            stats.steps += 1
            yield token
        self.conclude(token, limit == room)

    def read(self, prompt: Sequence[int]) -> Result:
        """The prompt's step, behind an empty cache or what stands in it."""
        known = tuple(prompt) if self.remembers and self.runner.past == 0 else None
        if known is not None and self._read is not None and self._read[0] == known:
            self.runner.past = len(known)
            return self._read[1]
        result = self.runner.text(prompt)
        self._read = (known, result) if known is not None else None
        return result

    def begin(self, prompt_tokens: int) -> Statistics:
        """Fresh statistics for a generation."""
        self.statistics = Statistics(prompt_tokens=prompt_tokens)
        return self.statistics

    def room(self, prompt: Sequence[int]) -> int:
        """How many new tokens fit after this prompt. InputError when not even one does."""
        if not prompt:
            raise InputError("the prompt is empty")
        used = self.runner.past + len(prompt)
        if used > self.runner.context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, but the context holds "
                f"{self.runner.context} and {self.runner.past} are in use"
            )
        return self.runner.context - used + 1

    def choose(self, logits: Array, pick: Pick, accept: Callable[[int], None]) -> int:
        """Pick a token, tell the sampler's state of it, and count the time."""
        begun = time.perf_counter()
        token = pick(logits)
        accept(token)
        self.statistics.sample_seconds += time.perf_counter() - begun
        return token

    def conclude(self, token: int, filled: bool) -> None:
        """Note why the text ended."""
        stats = self.statistics
        if token in self.ends:
            stats.stopped_by = "end of text"
        elif filled:
            stats.stopped_by = "context"
