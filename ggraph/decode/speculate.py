"""Speculative decoding: draft, verify in one step, keep what the target would have said. Floor 9.

Yields exactly the tokens of `ggraph.decode.engine.Engine.generate`: the target's own sampler
chooses every one of them, the draft only decides how many steps that takes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.decode.acceptance import Accept, Kept, Pick, match
from ggraph.decode.draft import Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.length import LengthPolicy
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Result
from ggraph.tensor import Array


@dataclass
class SpeculationStatistics:
    """What speculation did. Seconds are wall-clock.

    The acceptance length counts the bonus token: tokens gained per verification step.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)  # drafts that reached depth i + 1
    accepted_at: list[int] = field(default_factory=list)  # of those, accepted
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0  # the rest: cache moves, bookkeeping

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def note(self, draft: Draft, kept: Kept) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += len(draft)
        self.accepted += len(kept.nodes)
        reach = max(draft.depths(), default=0)
        grow = reach - len(self.tried_at)
        self.tried_at += [0] * grow
        self.accepted_at += [0] * grow
        for depth in range(reach):
            self.tried_at[depth] += 1
            self.accepted_at[depth] += depth < len(kept.nodes)


class Speculator:
    """Decodes like `engine`, with a drafter. The runner must have been made with its taps."""

    def __init__(self, engine: Engine, drafter: Drafter, policy: LengthPolicy) -> None:
        self.engine, self.drafter, self.policy = engine, drafter, policy
        self.statistics = SpeculationStatistics()

    def generate(
        self, prompt: Sequence[int], pick: Pick, accept: Accept, *, limit: int = -1
    ) -> Iterator[int]:
        """Yield the tokens that plain decoding would yield (see `Engine.generate`)."""
        engine, stats = self.engine, SpeculationStatistics()
        self.statistics = stats
        room = engine.room(prompt)
        limit = room if limit < 0 else min(limit, room)
        engine.begin(len(prompt))
        if limit == 0:
            return
        token = yield from self._prompt(prompt, pick, accept)
        while token not in engine.ends and engine.statistics.new_tokens < limit:
            left = limit - engine.statistics.new_tokens
            begun = time.perf_counter()
            kept = self._round(token, left, pick, accept)
            engine.statistics.decode_seconds += time.perf_counter() - begun
            engine.statistics.new_tokens += len(kept.tokens)
            engine.statistics.steps += 1
            yield from kept.tokens
            token = kept.tokens[-1]
        engine.conclude(token, limit == room)

    def _prompt(self, prompt: Sequence[int], pick: Pick, accept: Accept) -> Iterator[int]:
        """The prompt's step and the first token; the drafter sees both."""
        engine, begun = self.engine, time.perf_counter()
        result = engine.runner.text(prompt)
        token = engine.choose(result.logits[-1], pick, accept)
        self.drafter.begin(prompt[0])
        self.drafter.observe([*prompt[1:], token], self._features(result))
        engine.statistics.prompt_seconds = time.perf_counter() - begun
        engine.statistics.new_tokens = 1
        yield token
        return token

    def _round(self, token: int, left: int, pick: Pick, accept: Accept) -> Kept:
        """Draft, verify, keep; `left` bounds the tokens that may still be emitted."""
        runner, stats = self.engine.runner, self.statistics
        clock = [time.perf_counter()]
        room = min(left - 1, runner.context - runner.past - 1)
        wanted = self.policy.length(self.drafter.name, room)
        draft = self.drafter.propose(wanted) if wanted > 0 else Draft()
        clock.append(time.perf_counter())
        rows = verification_rows(token, draft, runner.past)
        result = runner.step(rows, range(len(rows.tokens)))
        clock.append(time.perf_counter())
        kept = match(draft, result.logits, pick, accept, self.engine.ends, left)
        clock.append(time.perf_counter())
        chosen = [0, *(n + 1 for n in kept.nodes)]
        runner.keep(chosen)
        self.drafter.observe(kept.tokens, self._features(result, chosen[: len(kept.tokens)]))
        clock.append(time.perf_counter())
        drafting, verifying, sampling, rest = np.diff(clock)
        stats.draft_seconds += drafting
        stats.verify_seconds += verifying
        stats.sample_seconds += sampling
        stats.host_seconds += rest
        stats.note(draft, kept)
        self.policy.learn(self.drafter.name, draft, kept, drafting, verifying)
        return kept

    def _features(self, result: Result, rows: Sequence[int] | None = None) -> Array | None:
        """The drafter's taps side by side, f32 [len(rows), A*G]."""
        if not self.drafter.taps:
            return None
        chunks = [result.taps[i] for i in self.drafter.taps]
        wide = np.concatenate(chunks, axis=1)
        return wide if rows is None else wide[list(rows)]


def verification_rows(token: int, draft: Draft, past: int) -> Rows:
    """The rows of the verification step: the last text token, then the draft's nodes."""
    positions = [past, *(past + d for d in draft.depths())]
    slots = range(past, past + len(draft) + 1)
    visible = None if draft.is_chain else draft.visible()
    return Rows([token, *draft.tokens], positions, slots, past, visible)
