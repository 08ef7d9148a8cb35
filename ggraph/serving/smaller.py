"""A smaller model that drafts for many texts at once, over the slots of their cache.

Its row of a token lies in its own cache where the target's lies in its own. It reads what it has
not read yet of a text when it is asked, a piece in each round, and drafts behind the last token. A
token that it has not, since files pad vocabularies differently, it reads as its last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.decode.draft.eagle import WINDOW
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.draft.runner import DraftSession
from ggraph.decode.model import CausalModel
from ggraph.errors import InputError
from ggraph.formats.lazy_array import Storage
from ggraph.graph import Graph
from ggraph.serving.heads import ListHead, Question
from ggraph.serving.steps import Row
from ggraph.serving.text import Text
from ggraph.tensor import Array, Tensor


@dataclass(frozen=True, eq=False)
class WithoutFeatures:
    """A model, where a head is expected that reads no features and feeds nothing back."""

    model: CausalModel
    taps: tuple[int, ...] = ()
    width: int = 0

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name

    @property
    def target_ids(self) -> Array:
        """i64 [V]: its tokens are the target's."""
        return np.arange(self.target_vocabulary)

    @property
    def target_vocabulary(self) -> int:
        """V, the model's too."""
        return self.model.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """The model's."""
        return self.model.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """The model's step."""
        return self.model.build(shape.step)

    def weight(self, t: Tensor) -> Storage:
        """The model's."""
        return self.model.weight(t)


class ListModel(ListHead):
    """Runs a smaller model for texts in a cache of `slots` slots. InputError where it cannot."""

    kind, shift = "model", 0

    def __init__(self, model: CausalModel, session: DraftSession, slots: int, context: int) -> None:
        if model.recurrent:
            raise InputError(
                f"{model.name} has recurrent layers: it can draft for one text at a time"
            )
        self._context = min(context, model.context_length)
        super().__init__(WithoutFeatures(model), session, slots, self._context)

    def note(self, text: Text, taps: Mapping[int, Array], rows: Sequence[int]) -> None:
        """Nothing: tokens are all that it reads."""

    def room(self, text: Text) -> int:
        """As many as the model's own context leaves, beyond which it was not trained."""
        return self._context - len(text.tokens)

    def _true_rows(self, q: Question) -> list[Row]:
        """The next rows of a text that it has not read, the last token's perhaps among them."""
        text, last = q.text, q.text.computed
        line = np.append(text.slots[:last], np.int32(q.slot))  # of tokens 0 to the last
        waiting = np.flatnonzero(~self._known[line])[:WINDOW].tolist()
        self._known[line[waiting]] = True
        q.seen = [line] if last in waiting else []
        read = [min(text.tokens[p], self.head.target_vocabulary - 1) for p in waiting]
        return [
            Row(t, int(line[p]), p, line[: p + 1], p == last)
            for t, p in zip(read, waiting, strict=True)
        ]

    def _features(self, text: Text, rows: Sequence[Row]) -> list[Array]:
        return [np.zeros((len(rows), 0), np.float32)]

    def _shape(self, rows: int, wanted: int, reach: int, fed_back: bool) -> DraftShape:
        return super()._shape(rows, wanted, reach, False)

    def _run(
        self, rows: Sequence[Row], features: Array, guesses: int, *, fed_back: bool
    ) -> dict[str, Array]:
        out = super()._run(rows, features, guesses, fed_back=False)
        return {**out, "feedback": np.zeros((len(rows), 0), np.float32)}
