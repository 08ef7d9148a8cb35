"""Drafts that are drawn: the law of a row, and the number of a place.

A drawn token x is kept with chance min(1, p(x) / q(x)), so that whoever judges must know its law q
whole. It is the sampler's own law, of the best few that the head says: their ids and logits, 320
bytes a token, are all that travels. The host makes it of them, and the token, as a device does that
draws within its plan (`ops.draw`), bit for bit. A row that has no law, since it holds no numbers,
gives its best token as a certain guess.

Numbers go by (seed, place in the text). A place whose draft was not looked at is drawn again with
the same number, upon which nothing in the text depends yet. Legend: W draft vocabulary, V the
target's, k candidates.
"""

from dataclasses import replace

import numpy as np

from ggraph.decode.draft.head import DraftHead
from ggraph.decode.sampler import CANDIDATE, Sampler, SamplerConfig
from ggraph.ops.draw import first_beyond
from ggraph.tensor import Array

CANDIDATES = 40  # most tokens of a law
_AT_ONCE = 256  # numbers that are made together


class Drawing:
    """By what a head's guesses are drawn: the stages of `config`, without penalties, and its seed.
    Numbers are those of a stream of its own beside the sampler's."""

    def __init__(self, head: DraftHead, config: SamplerConfig) -> None:
        size, most = len(head.target_ids), config.top_k if config.top_k > 0 else CANDIDATES
        self.config = replace(
            config, top_k=min(most, CANDIDATES, size), repeat_penalty=1.0, frequency_penalty=0.0,
            presence_penalty=0.0,
        )  # fmt: skip
        self._ids, self._vocabulary = head.target_ids, head.target_vocabulary
        self._sampler = Sampler(self.config, size)
        self._random = np.random.default_rng(None if config.seed is None else [config.seed, 1])
        self._numbers = np.zeros(0)  # from the text's first place on

    def begin(self) -> None:
        """Another text, which has numbers of its own where there is no seed."""
        if self.config.seed is None:
            self._numbers = np.zeros(0)

    def numbers(self, place: int, count: int) -> Array:
        """The numbers f64 [count] of these places in [0, 1)."""
        missing = place + count - len(self._numbers)
        if missing > 0:
            more = self._random.random(max(missing, _AT_ONCE))
            self._numbers = np.concatenate([self._numbers, more])
        return self._numbers[place : place + count]

    def token(self, said: Array, number: float) -> tuple[int, Array | None]:
        """The target's token that a number draws of a row, logits f32 [W] or the greatest,
        CANDIDATE [k], the best first; and the law f64 [V] of such tokens."""
        found = self._found(said)
        if found is None:
            best = said["id"][0] if said.dtype == CANDIDATE else np.argmax(said)
            return int(self._ids[best]), None
        ids, law = found
        return int(self._ids[ids[first_beyond(law, number)]]), self._wide(ids, law)

    def law(self, said: Array) -> Array | None:
        """The same law alone."""
        found = self._found(said)
        return None if found is None else self._wide(*found)

    def _found(self, said: Array) -> tuple[Array, Array] | None:
        """Draft tokens and their law, times its sum; None where a row has none."""
        scores = said["logit"] if said.dtype == CANDIDATE else said
        return self._sampler.law(said) if np.isfinite(scores.max()) else None

    def _wide(self, ids: Array, law: Array) -> Array:
        wide = np.zeros(self._vocabulary)
        wide[self._ids[ids]] = law / np.cumsum(law)[-1]
        return wide
