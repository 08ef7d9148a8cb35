"""The decoding loop: prompt in, tokens out, with statistics.

A round drafts, verifies the draft in one step, and keeps what the target would have said. Plain
decoding is the same loop with nobody who drafts. The target's own sampler chooses every token, so
that a caller cannot tell the two apart except by the clock.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ggraph.decode.acceptance import Accept, Kept, Pick, match, reject
from ggraph.decode.draft.tree import Draft
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Result
from ggraph.decode.speculation import Law, Speculation, Steps
from ggraph.decode.statistics import Clock, Statistics
from ggraph.door import checked
from ggraph.errors import InputError, shown
from ggraph.tensor import Array


class Engine:
    """Decodes with one runner. `ends` are the token ids that end a text; `now` is the clock.

    An engine that `remembers` does not compute a prompt's step again where the same prompt is read
    twice in a row; nothing else may use the runner in between. (Recurrent models always do.) Where
    it is `early`, asked once the prompt's plans are made, the plans for rounds come before the
    first token, for which one then waits longer, and not amid the text.
    """

    @checked
    def __init__(
        self,
        runner: Steps,
        ends: Iterable[int],
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.ends = frozenset(_token_ids(ends))
        self.now = now
        self.statistics = Statistics()
        self.remembers = False
        self.early: Callable[[], bool] = lambda: False
        self._computing = threading.RLock()  # held within a text's steps, not between tokens
        self._read: tuple[tuple[int, ...], Result] | None = None

    def reset(self) -> None:
        """Forget the text in the cache, which cannot go on then; plans and weights stay."""
        with self._computing:
            self.runner.past = 0
            self.statistics = Statistics()

    @checked
    def generate(
        self,
        prompt: Sequence[int],
        pick: Pick,
        accept: Accept,
        *,
        limit: int = -1,
        drafts: Speculation | None = None,
    ) -> Iterator[int]:
        """Yield up to `limit` new tokens (-1: until the context is full), the end token included.

        `pick` chooses from what the runner brings back of a row; `accept` is told of every token
        that is kept. Plans for rounds are made behind the first token, for which nobody should wait
        longer. InputError for an empty prompt, for one that does not fit the context, for drafters
        whose taps the runner does not have, and where this text is to go on when another was begun,
        whose rows are in the cache by then.
        """
        drafts = drafts or Speculation()
        with self._computing:
            room = self.room(prompt)
            limit = room if limit < 0 else min(limit, room)
            drafts.check(self.runner)
            stats = self.statistics = Statistics(prompt_tokens=len(prompt), clock=Clock(self.now))
            if limit == 0:
                return
            self.runner.prepare(prompt)  # planning has statistics of its own
            if self.early():
                drafts.warm(self.runner, self.runner.past + len(prompt))
            token = self._prompt(prompt, pick, accept, drafts)
        yield token
        if token not in self.ends and limit > 1:
            with self._computing:
                self._check_latest(stats)
                drafts.warm(self.runner, self.runner.past)
                stats.clock.start()
                drafts.read()
                stats.clock.lap("reading")
        while token not in self.ends and stats.new_tokens < limit:
            with self._computing:
                self._check_latest(stats)
                stats.clock.start()
                kept = self._round(token, limit - stats.new_tokens, pick, accept, drafts)
            yield from kept.tokens
            if kept.error is not None:
                raise kept.error
            token = kept.tokens[-1]
        if token in self.ends:
            stats.stopped_by = "end of text"
        elif limit == room:
            stats.stopped_by = "context"

    @checked
    def room(self, prompt: Sequence[int]) -> int:
        """How many new tokens fit after this prompt. InputError when not even one does."""
        if not prompt:
            raise InputError("the prompt is empty")
        used = self.runner.past + len(prompt)
        if used > self.runner.context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, but the context holds "
                f"{self.runner.context} and {self.runner.past} are in use (-c sets another)"
            )
        return self.runner.context - used + 1

    def _check_latest(self, stats: Statistics) -> None:
        """InputError where another text was begun since the one that has these."""
        if self.statistics is not stats:
            raise InputError(
                "another text was begun with this engine: end one before the next, or use an "
                "engine and a session for each"
            )

    def _prompt(
        self, prompt: Sequence[int], pick: Pick, accept: Accept, drafts: Speculation
    ) -> int:
        """The prompt's step and the first token; drafters will be told of both."""
        clock = self.statistics.clock
        clock.start()
        result = self._known(prompt)
        token = pick(result.logits[-1])
        accept(token)
        drafts.begin([*prompt, token], self.runner)
        clock.lap("prompt")
        self.statistics.new_tokens = 1
        return token

    def _known(self, prompt: Sequence[int]) -> Result:
        """The prompt's step, behind an empty cache or what stands in it."""
        again = self.remembers and self.runner.past == 0 and not self.runner.recurrent
        again = again and isinstance(self.runner.picks, int)  # a drawn token is of one text
        known = tuple(prompt) if again else None
        if known is not None and self._read is not None and self._read[0] == known:
            read = self._read[1]
            if read.picked == self.runner.picks:
                self.runner.past = len(known)
                return read
        result = self.runner.text(prompt)
        self._read = (known, result) if known is not None else None
        return result

    def _round(
        self, token: int, left: int, pick: Pick, accept: Accept, drafts: Speculation
    ) -> Kept:
        """Ask, verify, keep; `left` bounds the tokens that may still be emitted."""
        runner, clock = self.runner, self.statistics.clock
        room = min(left - 1, runner.context - runner.past - 1, runner.longest)
        draft = drafts.draft(room, clock)
        count = len(draft) + 1
        runner.ready(count, runner.past + count)  # planning is not what a step costs
        clock.lap("host")
        if draft:
            result = runner.step(verification_rows(token, draft, runner.past), range(count))
        else:
            result = runner.follow(token)
        took = clock.lap("verify")
        kept = self._kept(draft, result.logits, pick, accept, drafts.law, left)
        took += clock.lap("sample")
        if draft:
            runner.keep([0, *(n + 1 for n in kept.nodes)])
        drafts.learn(draft, kept, took)
        self.statistics.note(draft, kept)
        clock.lap("host")
        return kept

    def _kept(
        self,
        draft: Draft,
        logits: Array,
        pick: Pick,
        accept: Accept,
        law: Law | None,
        left: int,
    ) -> Kept:
        if law is None:
            return match(draft, logits, pick, accept, self.ends, left)
        chances = law.probabilities
        return reject(draft, lambda r: chances(logits[r]), accept, law.uniform, self.ends, left)


def _token_ids(given: Iterable[int]) -> list[int]:
    """Token ids as Python's numbers. InputError for what is none."""
    found = list(given)
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InputError(f"expected token ids, got {shown(token)}")
    return list(map(int, found))


def verification_rows(token: int, draft: Draft, past: int) -> Rows:
    """The rows of the verification step: the last text token, then the draft's nodes."""
    positions = [past, *(past + d for d in draft.depths())]
    slots = range(past, past + len(draft) + 1)
    visible = None if draft.is_chain else draft.visible()
    return Rows([token, *draft.tokens], positions, slots, past, visible)
