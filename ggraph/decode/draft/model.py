"""A smaller model as the drafter, which may itself be helped by a lookup drafter.

Index alignment: the draft model's cache holds the text up to, not including, its last token. A
draft is the model's own greedy continuation; its rows beyond the text are forgotten each time. A
recurrent model reads its own guesses again for each further one, in one step: a step's rows are all
that it can take back, and a row more costs little beside the weights.

Files pad one vocabulary differently: a token that the draft model has not it reads as its last.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.decode.draft.tree import NOTHING, Draft, Drafter
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.errors import InputError
from ggraph.tensor import Array


class ModelDrafter:
    """Drafts with `runner`'s model. `p_min` ends a draft at the first guess less likely than that.

    `inner` proposes continuations that the draft model checks in one step instead of several
    (staged speculation); it never changes the draft.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, runner: Runner, *, p_min: float = 0.0, inner: Drafter | None = None) -> None:
        if not 0.0 <= p_min <= 1.0:
            raise InputError(f"p_min {p_min}: expected 0 to 1")
        self.runner, self.p_min, self.inner = runner, p_min, inner
        self.name = f"model {runner.model.name}"
        self._waiting: list[int] = []

    def begin(self, first: int) -> None:
        """Forget the old text."""
        self.runner.past = 0
        self._waiting = self._read([first])
        if self.inner is not None:
            self.inner.begin(first)

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Keep the new tokens; they are run when a draft is due."""
        self._waiting.extend(self._read(tokens))
        if self.inner is not None:
            self.inner.observe(tokens, None)

    def propose(self, limit: int) -> Draft:
        """The draft model's greedy continuation of the text, as far as that fits its context."""
        runner, waiting = self.runner, self._waiting
        limit = min(limit, runner.context - runner.past - len(waiting), runner.longest)
        if limit < 1:
            return NOTHING
        if len(waiting) > 1:
            runner.text(waiting[:-1])
            del waiting[:-1]
        past, tokens = runner.past, list(waiting)
        while len(tokens) - 1 < limit and self._step(past, tokens, limit):
            pass
        return Draft.chain(tokens[1 : limit + 1])

    def _step(self, past: int, tokens: list[int], limit: int) -> bool:
        """One step of the draft model; appends what it says and tells whether to go on."""
        left = limit - (len(tokens) - 1)
        guess = self._guess(tokens, left)
        first = 0 if self.runner.recurrent else len(tokens) - 1
        rows = [*tokens[first:], *self._read(guess)]
        slots = range(past + first, past + first + len(rows))
        wanted = range(len(rows) - 1 - len(guess), len(rows))
        logits = self.runner.step(Rows(rows, slots, slots), wanted).logits
        for row, token in enumerate([*guess, -1]):
            best = int(np.argmax(logits[row]))
            if self.p_min > 0 and _chance(logits[row], best) < self.p_min:
                return False
            tokens.append(best)
            if best != token:
                return True
        return True

    def _read(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the draft model knows them."""
        return [min(t, self.runner.model.vocab_size - 1) for t in tokens]

    def _guess(self, tokens: list[int], left: int) -> tuple[int, ...]:
        """What the inner drafter thinks comes next; only at the text's end does it know more."""
        if self.inner is None or left < 2 or len(tokens) > 1:
            return ()
        draft = self.inner.propose(left - 1)
        return draft.tokens if draft.is_chain else ()


def _chance(logits: Array, token: int) -> float:
    shifted = np.exp(logits - logits.max())
    return float(shifted[token] / shifted.sum())
