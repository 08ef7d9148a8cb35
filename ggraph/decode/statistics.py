"""What a text took: one clock, and the figures that follow from it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import Draft

DECODING = ("draft", "verify", "sample", "host")  # parts of a round; "host" is bookkeeping


@dataclass
class Clock:
    """A stopwatch whose laps belong to parts of the work. Seconds, by `now`."""

    now: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def start(self) -> None:
        """The next lap begins here; what lies between belongs to nobody."""
        self._last = self.now()

    def lap(self, part: str) -> float:
        """Seconds since the last lap, which are added to `part`."""
        here = self.now()
        took, self._last = here - self._last, here
        self.seconds[part] = self.seconds.get(part, 0.0) + took
        return took

    def of(self, *parts: str) -> float:
        """Seconds of these parts together."""
        return sum(self.seconds.get(p, 0.0) for p in parts)


@dataclass
class Statistics:
    """What a generation took and what drafts did. Seconds are wall-clock.

    A round is one step of the target behind the prompt, with a draft or without. The acceptance
    length counts the bonus token: tokens gained per round.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    stopped_by: str = "length"  # "length", "end of text", "stop string" or "context"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)  # drafts that reached depth i + 1
    accepted_at: list[int] = field(default_factory=list)  # of those, accepted
    by_rows: dict[int, int] = field(default_factory=dict)  # rows of a step -> such steps
    clock: Clock = field(default_factory=Clock)

    @property
    def prompt_seconds(self) -> float:
        """Reading the prompt, by the target and by drafters, and choosing the first token."""
        return self.clock.of("prompt", "reading")

    @property
    def reading_seconds(self) -> float:
        """The drafters' share of that."""
        return self.clock.of("reading")

    @property
    def decode_seconds(self) -> float:
        """All rounds."""
        return self.clock.of(*DECODING)

    @property
    def draft_seconds(self) -> float:
        """Asking drafters."""
        return self.clock.of("draft")

    @property
    def verify_seconds(self) -> float:
        """The target's steps."""
        return self.clock.of("verify")

    @property
    def sample_seconds(self) -> float:
        """Choosing tokens, the first one not counted."""
        return self.clock.of("sample")

    @property
    def host_seconds(self) -> float:
        """The rest of the rounds: cache moves, bookkeeping."""
        return self.clock.of("host")

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """New tokens per second; the first one belongs to the prompt's step."""
        timed = self.new_tokens - 1
        return timed / self.decode_seconds if self.decode_seconds and timed > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def note(self, draft: Draft, kept: Kept) -> None:
        """Count one round."""
        self.rounds += 1
        self.new_tokens += len(kept.tokens)
        rows = len(draft) + 1
        self.by_rows[rows] = self.by_rows.get(rows, 0) + 1
        if not draft:
            return
        self.drafted += len(draft)
        self.accepted += len(kept.nodes)
        reach = max(draft.depths(), default=0)
        grow = reach - len(self.tried_at)
        self.tried_at += [0] * grow
        self.accepted_at += [0] * grow
        for depth in range(reach):
            self.tried_at[depth] += 1
            self.accepted_at[depth] += depth < len(kept.nodes)
