"""Speculative decoding: draft, verify in one step, keep what the target would have said.

Yields exactly the tokens of `ggraph.decode.engine.Engine.generate`: the target's own sampler
chooses every one of them, the draft only decides how many steps that takes.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from ggraph.decode.acceptance import Accept, Kept, Pick, match, reject
from ggraph.decode.draft.tree import NOTHING, Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import LengthPolicy
from ggraph.decode.rows import Rows
from ggraph.errors import InputError
from ggraph.tensor import Array

FIRST = (0,)
FORGET = 64  # steps that every drafter was told of before they are forgotten
# New tokens, the taps of the step behind them (not its logits, which are large), its rows.
Seen = tuple[Sequence[int], dict[int, Array], Sequence[int]]


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
    by_rows: dict[int, int] = field(default_factory=dict)  # rows of a step -> such steps
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0  # the rest: cache moves, bookkeeping
    reading_seconds: float = 0.0  # drafters' share of the prompt's time

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def note_plain(self, steps: int) -> None:
        """Steps for which nobody was asked, and which are counted as rounds already."""
        self.by_rows[1] = self.by_rows.get(1, 0) + steps

    def note(self, draft: Draft, kept: Kept) -> None:
        """Count one round."""
        self.rounds += 1
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


class Law(Protocol):
    """What stochastic rejection needs of a sampler."""

    def probabilities(self, logits: Array) -> Array:
        """The law f64 [V] that the sampler would draw from."""
        ...

    def uniform(self) -> float:
        """A random number in [0, 1) of the sampler's stream."""
        ...


@runtime_checkable
class Plans(Protocol):
    """A drafter that has plans to make."""

    def warm(self) -> None:
        """Make them."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A drafter that can take the prompt in before it is asked."""

    def read(self) -> None:
        """Take in what it was told."""
        ...


class Speculator:
    """Decodes like `engine`, with drafters that are asked in order as the policy says.

    The runner must have been made with the drafters' taps. With `law` (a sampler) drafts are held
    against the target by stochastic rejection, which keeps the law but not the individual text;
    without it by sample-and-match, which keeps both.
    """

    def __init__(
        self,
        engine: Engine,
        drafters: Sequence[Drafter],
        policy: LengthPolicy,
        *,
        law: Law | None = None,
    ) -> None:
        missing = {i for d in drafters for i in d.taps} - set(engine.runner.taps)
        if not drafters or missing:
            raise InputError(
                f"speculation needs a drafter and its taps; drafters: "
                f"{[d.name for d in drafters]}, layers not tapped: {sorted(missing)}"
            )
        self.engine, self.drafters, self.policy, self.law = engine, tuple(drafters), policy, law
        self.statistics = SpeculationStatistics()
        self._names = tuple(d.name for d in self.drafters)
        self._seen: list[Seen] = []
        self._told: dict[str, int] = {}  # how much of it each drafter knows

    def generate(
        self,
        prompt: Sequence[int],
        pick: Pick,
        accept: Accept,
        *,
        limit: int = -1,
        longest: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens that plain decoding would yield (see `Engine.generate`). The plans for
        drafts of up to `longest` tokens are made behind the first token, for which nobody should
        wait longer, and before the second, so that no round waits."""
        engine, stats = self.engine, SpeculationStatistics()
        self.statistics = stats
        room = engine.room(prompt)
        limit = room if limit < 0 else min(limit, room)
        engine.begin(len(prompt))
        if limit == 0:
            return
        token = yield from self._prompt(prompt, pick, accept)
        if token not in engine.ends and limit > 1:
            if longest:
                self.warm(longest)
            self._read_prompt()
        while token not in engine.ends and engine.statistics.new_tokens < limit:
            left = limit - engine.statistics.new_tokens
            begun = time.perf_counter()
            rest = 0 if self.law is not None else self.policy.rest(self._names, engine.runner.past)
            if rest > 0:
                token = yield from self._rest(token, min(rest, left), pick, accept, begun)
                continue
            kept = self._round(token, left, pick, accept, begun)
            engine.statistics.decode_seconds += time.perf_counter() - begun
            engine.statistics.new_tokens += len(kept.tokens)
            engine.statistics.steps += 1
            yield from kept.tokens
            token = kept.tokens[-1]
        engine.conclude(token, limit == room)

    def warm(self, most: int) -> None:
        """Make the plans that drafts of up to `most` tokens will need, so that no round waits."""
        runner = self.engine.runner
        for rows in range(1, most + 2):
            runner.ready(rows, runner.past + rows)
        for drafter in self.drafters:
            if isinstance(drafter, Plans):
                drafter.warm()

    def _prompt(
        self, prompt: Sequence[int], pick: Pick, accept: Accept
    ) -> Generator[int, None, int]:
        """The prompt's step and the first token; the drafter sees both."""
        engine = self.engine
        engine.runner.prepare(len(prompt))
        begun = time.perf_counter()
        result = engine.read(prompt)
        token = engine.choose(result.logits[-1], pick, accept)
        self._told = dict.fromkeys(self._names, 0)
        for drafter in self.drafters:
            drafter.begin(prompt[0])
        self._seen = [([*prompt[1:], token], result.taps, range(len(prompt)))]
        engine.statistics.prompt_seconds = time.perf_counter() - begun
        engine.statistics.new_tokens = 1
        yield token
        return token

    def _read_prompt(self) -> None:
        """Drafters read the prompt as well, where they may be asked soon; that belongs to the
        prompt's time, but nobody waits for the first token longer."""
        begun = time.perf_counter()
        for drafter in self.drafters:
            if not drafter.taps:
                self._tell(drafter)
            elif isinstance(drafter, Reader) and self.policy.hopes(drafter.name):
                self._tell(drafter)
                drafter.read()
                self.policy.was_read(drafter.name)
        self.statistics.reading_seconds = time.perf_counter() - begun
        self.engine.statistics.prompt_seconds += self.statistics.reading_seconds

    def _rest(
        self, token: int, count: int, pick: Pick, accept: Accept, begun: float
    ) -> Generator[int, None, int]:
        """Up to `count` steps of plain decoding, which cost what they cost there; the first began
        at `begun`."""
        engine, counts, made = self.engine, self.engine.statistics, 0
        first = others = 0.0
        while made < count and token not in engine.ends:
            started = time.perf_counter()
            token = self._plain(token, pick, accept)
            self.statistics.rounds += 1
            ended = time.perf_counter()
            if made:
                others += ended - started
            else:
                first = ended - started
            made += 1
            if made == count or token in engine.ends:
                self.statistics.note_plain(made)
                self.policy.rested(made, first, others)
                ended = time.perf_counter()
            counts.decode_seconds += ended - begun
            counts.new_tokens += 1
            counts.steps += 1
            yield token
            begun = time.perf_counter()
        return token

    def _round(self, token: int, left: int, pick: Pick, accept: Accept, begun: float) -> Kept:
        """Ask, verify, keep; `left` bounds the tokens that may still be emitted. The round began at
        `begun`."""
        runner, stats = self.engine.runner, self.statistics
        draft, asking = self._draft(min(left - 1, runner.context - runner.past - 1))
        if draft or self.law is not None:
            rows = verification_rows(token, draft, runner.past)
            chosen = time.perf_counter()
            runner.ready(len(rows.tokens), max(rows.slots) + 1)
            ready = time.perf_counter()  # planning is not what such a step costs
            kept = self._verified(rows, draft, left, pick, accept)
        else:
            chosen = ready = time.perf_counter()
            kept = Kept((), (self._plain(token, pick, accept),))
        verified = time.perf_counter()
        stats.note(draft, kept)
        self.policy.learn(draft, kept, verified - ready)
        stats.draft_seconds += asking
        host = chosen - begun - asking + time.perf_counter() - verified
        stats.host_seconds += host
        self.policy.note_host(bool(draft), host)
        return kept

    def _plain(self, token: int, pick: Pick, accept: Accept) -> int:
        """The step of `Engine.generate`; drafters will be told of it."""
        engine, stats, begun = self.engine, self.statistics, time.perf_counter()
        sampled = engine.statistics.sample_seconds
        result = engine.runner.text([token])
        stats.verify_seconds += time.perf_counter() - begun
        token = engine.choose(result.logits[-1], pick, accept)
        stats.sample_seconds += engine.statistics.sample_seconds - sampled
        self._seen.append(((token,), result.taps, FIRST))
        return token

    def _verified(self, rows: Rows, draft: Draft, left: int, pick: Pick, accept: Accept) -> Kept:
        """One step over the last token and the draft, and what is kept of it."""
        runner, stats = self.engine.runner, self.statistics
        begun = time.perf_counter()
        result = runner.step(rows, range(len(rows.tokens)))
        run = time.perf_counter()
        kept = self._accept(draft, result.logits, pick, accept, left)
        chosen = time.perf_counter()
        path = [0, *(n + 1 for n in kept.nodes)]
        runner.keep(path)
        self._seen.append((kept.tokens, result.taps, path[: len(kept.tokens)]))
        stats.verify_seconds += run - begun
        stats.sample_seconds += chosen - run
        self.engine.statistics.sample_seconds += chosen - run
        stats.host_seconds += time.perf_counter() - chosen
        return kept

    def _draft(self, room: int) -> tuple[Draft, float]:
        """The draft that is worth most of those that are asked for, none where none is worth it;
        and the seconds that asking took."""
        policy, best, held, spent = self.policy, NOTHING, 0.0, 0.0
        policy.begin(self.engine.runner.past)
        for drafter in self.drafters:
            wanted = policy.length(drafter.name, room, held)
            if wanted <= 0:
                continue
            begun = time.perf_counter()
            self._tell(drafter)
            draft = drafter.propose(wanted)
            took = time.perf_counter() - begun
            spent += took
            draft, worth = policy.weigh(drafter.name, draft, took)
            if worth > held:
                best, held = draft, worth
        return (known(best, self.engine.runner.model.vocab_size) if best else best), spent

    def _accept(self, draft: Draft, logits: Array, pick: Pick, accept: Accept, left: int) -> Kept:
        ends, law = self.engine.ends, self.law
        if law is None:
            return match(draft, logits, pick, accept, ends, left)
        return reject(
            draft, lambda row: law.probabilities(logits[row]), accept, law.uniform, ends, left
        )

    def _tell(self, drafter: Drafter) -> None:
        """What the drafter has not been told yet, with the taps that it wants. It is told when it
        is asked: gathering features takes time, and what is told at once costs less."""
        told = self._told
        new = self._seen[told[drafter.name] :]
        if not new:
            return
        told[drafter.name] = len(self._seen)
        least = min(told.values())
        if least >= FORGET:
            del self._seen[:least]
            self._told = {name: at - least for name, at in told.items()}
        tokens = [t for said, _, _ in new for t in said]
        if not drafter.taps:
            drafter.observe(tokens, None)
            return
        drafter.observe(tokens, side_by_side([(taps, rows) for _, taps, rows in new], drafter.taps))


def side_by_side(
    seen: Sequence[tuple[dict[int, Array], Sequence[int]]], taps: Sequence[int]
) -> Array:
    """Features f32 [N, A*G]: the given rows of each step's taps, one tap beside the other."""
    width = seen[0][0][taps[0]].shape[1]
    features = np.empty((sum(len(rows) for _, rows in seen), len(taps) * width), np.float32)
    at = 0
    for parts, rows in seen:
        count = len(rows)
        first = rows[-1] == count - 1  # rows ascend: these are the first
        for i, tap in enumerate(taps):
            part = parts[tap][:count] if first else parts[tap][list(rows)]
            features[at : at + count, i * width : (i + 1) * width] = part
        at += count
    return features


def known(draft: Draft, vocabulary: int) -> Draft:
    """The draft up to its first token that the target does not have."""
    if not draft or (min(draft.tokens) >= 0 and max(draft.tokens) < vocabulary):
        return draft
    bad = [i for i, t in enumerate(draft.tokens) if not 0 <= t < vocabulary]
    return draft.first(bad[0])


def verification_rows(token: int, draft: Draft, past: int) -> Rows:
    """The rows of the verification step: the last text token, then the draft's nodes."""
    positions = [past, *(past + d for d in draft.depths())]
    slots = range(past, past + len(draft) + 1)
    visible = None if draft.is_chain else draft.visible()
    return Rows([token, *draft.tokens], positions, slots, past, visible)
