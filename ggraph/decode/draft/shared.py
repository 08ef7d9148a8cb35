"""Steps of a draft head that has no cache of its own: it reads the target's.

Nothing is remembered from one step to the next: true rows that wait need not be read, and a row of
a draft sees the text alone, from the position of the text's last token.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.runner import ALL, Brings, DraftRunner
from ggraph.decode.rows import Rows, padded
from ggraph.decode.runner import Runner
from ggraph.tensor import Array


class SharedRunner(DraftRunner):
    """A head's steps over the caches that `target`'s steps write, in the same session."""

    def __init__(self, model: DraftHead, target: Runner) -> None:
        super().__init__(
            model, target.session, target.context, cache_dtype=target.cache_dtype, target=target
        )
        self.target, self.unrolls = target, False

    def ready(
        self, rows: int, wanted: int, reach: int, *, fed_back: bool, brings: Brings = ALL
    ) -> tuple[Hashable, DraftShape]:
        """As in `DraftRunner`: rows of which nothing is wanted are not computed."""
        count = max(wanted, 1)
        return super().ready(count, count, reach, fed_back=fed_back, brings=brings)

    def _run(
        self,
        rows: Rows,
        wanted: Sequence[int],
        features: Array,
        *,
        fed_back: bool,
        brings: Brings = ALL,
    ) -> dict[str, Array]:
        if not wanted:
            return {}
        count, past = len(wanted), self.target.past
        key, shape = self.ready(count, count, past, fed_back=fed_back, brings=brings)
        wide = np.zeros((shape.rows, features.shape[1]), features.dtype)
        wide[:count] = features[list(wanted)]
        behind = past - np.arange(shape.context)  # how far each slot lies behind the rows
        given = {
            "tokens": padded([rows.tokens[w] for w in wanted], shape.rows, 0),
            "positions": padded([past] * count, shape.rows, 0),
            "mask": _mask(behind > 0, shape.rows),
            "length": np.array([past], np.int32),
            "wanted": padded(range(count), shape.wanted, 0),
            self._fed_as(fed_back): wide,
        }
        window = self.model.sliding_window
        if window is not None:
            given["window_mask"] = _mask((behind > 0) & (behind <= window + 1), shape.rows)
        return self._fed(key, given)


def _mask(seen: Array, rows: int) -> Array:
    """f32 [rows, C]: 0 where all rows may see a slot, else -inf."""
    row = np.where(seen, np.float32(0), np.float32(-np.inf))
    return np.repeat(row[None], rows, axis=0)
