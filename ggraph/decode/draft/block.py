"""Block drafting: all tokens of a draft from one step over masked rows that see one another.

Legend: K draft length, W draft vocabulary, P the last position whose features are known.

Index alignment: true rows are features alone. Behind them stand the text's last token, whose
feature is not known yet, and masked rows; each of those guesses the token at its own position.

    row        slot       made of          its logits guess
    true       0..P       taps of 0..P     nothing: only read
    last       P+1        token xP+1       nothing
    masked 1   P+2        masked token     xP+2
    masked 2   P+3        masked token     xP+3

A block is forgotten afterwards: its slots are written again by true rows.
Source: DFlash (arXiv 2602.06036).
"""

import numpy as np

from ggraph.decode.draft.head import Masked
from ggraph.decode.draft.parallel import ParallelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.decode.rows import ROW_BUCKETS, Rows, visibility
from ggraph.decode.sampler import SamplerConfig
from ggraph.tensor import Array

NOTHING = np.zeros(0, np.float32)


class BlockRunner(DraftRunner):
    """Steps of a head whose rows see one another, in sliding layers their forerunners alone."""

    def _masks(self, rows: Rows, bucket: int, context: int) -> dict[str, Array]:
        plain = Rows(rows.tokens, rows.positions, rows.slots)
        window = self.model.sliding_window
        found = {"mask": visibility(rows, bucket, context)}
        if window is not None:
            found["window_mask"] = visibility(plain, bucket, context, window)
        return found


class BlockDrafter(ParallelDrafter):
    """Drafts blocks of up to `size` rows, whose masked ones take the token `mask`; rows of a
    `causal` head see no later ones. The rest is as in `ParallelDrafter`."""

    def __init__(
        self,
        runner: BlockRunner,
        mask: int,
        size: int,
        *,
        causal: bool = False,
        p_min: float = 0.0,
        law: SamplerConfig | None = None,
        name: str = "dflash",
    ) -> None:
        super().__init__(runner, Masked(mask, NOTHING), p_min=p_min, law=law, name=name)
        self.size, self.causal = size, causal
        self._last = -1  # the text's last token

    levels = 0

    def warm(self, past: int, longest: int) -> None:
        """Make the plan of a whole block, or of `longest` guesses."""
        count = min(longest + 1, self.size)
        self.runner.ready(count, count - 1, past + count, fed_back=True)

    def read(self) -> None:
        """Keys and values of the true rows that are waiting."""
        while self._tokens:
            count, runner = min(len(self._tokens), ROW_BUCKETS[-1]), self.runner
            slots = range(runner.past, runner.past + count)
            runner.read(Rows(self._tokens[:count], slots, slots), self._features()[:count])
            runner.past += count
            self._last = self._tokens[count - 1]
            self._drop(count)

    def propose(self, limit: int) -> Draft:
        """Read what waits, then one block behind it."""
        self.read()
        count = min(limit, self.size - 1) + 1
        if count < 2 or not self.runner.past:
            return Draft()
        slots = range(self.runner.past, self.runner.past + count)
        seen = None if self.causal else np.ones((count, count), bool)
        tokens = [self._last] + [self.masked.token] * (count - 1)
        rows = Rows(tokens, slots, slots, self.runner.past, seen)
        logits = self.runner.step(
            rows, range(1, count), np.zeros((count, 0), np.float32), fed_back=True
        )
        return self._picked(logits)
