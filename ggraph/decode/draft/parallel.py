"""Parallel drafting: all tokens of a draft from one step of the head.

Legend: K draft length, W draft vocabulary, P the last position whose features are known.

Index alignment: rows behind P take the head's masked row, for they know nothing yet but where they
stand; the row at P + i guesses the token of position P + 2 + i.

    row        slot       feature           token     its logits guess
    true       0..P       taps of 0..P      x1..xP+1  x2..xP+2
    masked 1   P+1        masked.features   masked    xP+3
    masked 2   P+2        masked.features   masked    xP+4

Attention is causal over all of them. The masked rows are forgotten afterwards. The last true row
waits for the next round, since its logits are wanted again if nothing was added in between.
Source: P-EAGLE (arXiv 2602.01469).
"""

import numpy as np

from ggraph.decode.draft.eagle import likeliest
from ggraph.decode.draft.features import FeatureDrafter
from ggraph.decode.draft.head import Masked
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft, Guess
from ggraph.decode.rows import ROW_BUCKETS, Rows
from ggraph.decode.sampler import SamplerConfig
from ggraph.errors import InputError
from ggraph.tensor import Array


class ParallelDrafter(FeatureDrafter):
    """Drafts with a head that knows a masked row. A draft drawn at random has the law of each
    position by itself."""

    def __init__(
        self,
        runner: DraftRunner,
        masked: Masked,
        *,
        p_min: float = 0.0,
        law: SamplerConfig | None = None,
        name: str = "eagle3",
    ) -> None:
        if runner.gathers and masked.features.size:
            raise InputError(f"{name}: masked features are the host's: give its runner no target")
        super().__init__(runner, name, p_min, law)
        self.masked = masked

    def propose(self, limit: int) -> Draft:
        """Run the true rows that are waiting together with limit - 1 masked ones."""
        limit = min(limit, ROW_BUCKETS[-1])
        if limit < 1 or not self._tokens:
            return Draft()
        while len(self._tokens) + limit - 1 > ROW_BUCKETS[-1]:
            self._run(min(len(self._tokens) - 1, ROW_BUCKETS[-1]), 0)
        return self._picked(self._run(len(self._tokens), limit - 1))

    def _run(self, true: int, masked: int) -> Array:
        """Logits f32 [masked + 1, W] of the last true row and the masked ones behind it.

        The true rows become part of the cache, but for the last one of all: the next round begins
        with it.
        """
        tokens = self._tokens[:true] + [self.masked.token] * masked
        unknown = [self.masked.features[None]] * masked
        features = np.concatenate([self._features()[:true], *unknown])
        slots = range(self.runner.past, self.runner.past + len(tokens))
        wanted = range(true - 1, true + masked)
        logits = self.runner.step(Rows(tokens, slots, slots), wanted, features, fed_back=False)
        done = min(true, len(self._tokens) - 1)
        self.runner.past += done
        self._drop(done)
        return logits

    def _picked(self, logits: Array) -> Draft:
        """One token of each row, up to the first that the head finds unlikely."""
        found: list[Guess] = []
        place = self.runner.past + len(self._tokens)
        best, chances = likeliest(logits, 1)  # [K, 1]
        for i, row in enumerate(logits):
            if chances[i, 0] < self.p_min:
                break
            if self.drawing is None:
                found.append(Guess(int(self.runner.model.target_ids[best[i, 0]])))
            else:
                token, law = self.drawing.token(row, self.drawing.numbers(place + i, 1)[0])
                found.append(Guess(token, law=law))
        return Draft.guessed(found)
