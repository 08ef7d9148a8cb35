"""What drafters have in common that read the target's features: the true rows that wait.

Legend: A*G feature width, W draft vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.decode.draft.drawing import Drawing
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.sampler import SamplerConfig
from ggraph.errors import InputError
from ggraph.tensor import Array


class FeatureDrafter:
    """A drafter whose head reads the target's features, `name` to others. What it is told waits
    until a draft is due. `p_min` ends a chain at the first guess that the head itself finds less
    likely than that; by a `law` guesses are drawn."""

    def __init__(
        self, runner: DraftRunner, name: str, p_min: float, law: SamplerConfig | None
    ) -> None:
        if not 0.0 <= p_min <= 1.0:
            raise InputError(f"p_min {p_min}: expected 0 to 1")
        self.runner, self.name, self.p_min = runner, name, p_min
        self.taps, self.gathers = runner.model.taps, runner.gathers
        self.drawing = None if law is None else Drawing(runner.model, law)
        self._tokens: list[int] = []  # that wait
        self._blocks: list[Array] = []  # features before them [n, A*G], or slots i32 [n, 1] of such

    def begin(self, first: int) -> None:
        """Forget the old text. The first token has no feature before it and is not drafted from."""
        self.runner.past = self.runner.offset = 0
        self._tokens, self._blocks = [], []
        if self.drawing is not None:
            self.drawing.begin()

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Keep the new tokens and the features before them; they are run when a draft is due."""
        if features is None or len(features) != len(tokens):
            raise InputError(
                f"{self.name}: {len(tokens)} tokens, "
                f"{'no' if features is None else len(features)} features"
            )
        self._tokens.extend(tokens)
        self._blocks.append(features)

    def _features(self) -> Array:
        """The features [n, A*G] of all tokens that wait, of which there are some."""
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0]

    def _drop(self, count: int) -> None:
        """The first so many tokens wait no more."""
        left = self._features()[count:]
        del self._tokens[:count]
        self._blocks = [left] if self._tokens else []
