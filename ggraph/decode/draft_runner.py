"""Steps of a draft head over its own cache. Floor 9."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ggraph.decode.draft_loop import feeds, table, unrolled
from ggraph.decode.draft_model import DraftModel, DraftShape
from ggraph.decode.rows import ROW_BUCKETS, Rows, context_bucket, padded, row_bucket, visibility
from ggraph.dtype import F16, DType
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor


class DraftSession(Protocol):
    """What a drafter asks of a session: `ggraph.session.Session` is one."""

    @property
    def replays(self) -> bool:
        """Whether plans are captured and replayed."""
        ...

    def prepare(
        self, key: Hashable, build: Callable[[], Graph], weights: Callable[[Tensor], Array]
    ) -> object:
        """Plan the graph that `build` makes under `key`, the first time."""
        ...

    def run(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One step of the plan of `key`."""
        ...


class DraftRunner:
    """Steps of a draft head over its own cache; `past` slots hold true rows, whose positions in
    the text are `offset` higher."""

    def __init__(
        self, model: DraftModel, session: DraftSession, context: int, *, cache_dtype: DType = F16
    ) -> None:
        self.model, self.session, self.cache_dtype = model, session, cache_dtype
        self.past = self.offset = 0
        self.unrolls = session.replays  # a chain is then one plan instead of one per token
        self._rows = context_bucket(context + ROW_BUCKETS[-1], 1 << 30)
        self._ready: dict[tuple[int, int, int, bool], DraftShape] = {}

    def step(
        self, rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool
    ) -> tuple[Array, Array]:
        """Logits f32 [M, W] and hidden f32 [M, E] of the wanted rows; `past` does not move."""
        out = self._run(rows, wanted, features, fed_back=fed_back)
        return out["logits"][: len(wanted)], out["feedback"][: len(wanted)]

    def read(self, rows: Rows, features: Array) -> None:
        """Only write true rows into the cache, which takes a third of a step's weights."""
        self._run(rows, (), features, fed_back=False)

    def _run(
        self, rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool
    ) -> dict[str, Array]:
        count, reach = len(rows.tokens), max(max(rows.slots) + 1, self.past)
        shape = self.ready(count, len(wanted), reach, fed_back=fed_back)
        bucket, context = shape.rows, shape.context
        wide = features
        if count < bucket:
            wide = np.zeros((bucket, features.shape[1]), np.float32)
            wide[:count] = features
        given = {
            "tokens": padded(rows.tokens, bucket, 0),
            "positions": padded([p + self.offset for p in rows.positions], bucket, 0),
            "slots": padded(rows.slots, bucket, self._rows),
            "mask": visibility(rows, bucket, context),
            "length": np.array([reach], np.int32),
            "wanted": padded(wanted, shape.wanted, 0),
            "hidden" if fed_back else "features": wide,
        }
        if self.model.sliding_window is not None:
            given["window_mask"] = visibility(rows, bucket, context, self.model.sliding_window)
        return self.session.run((self.model.name, shape), given)

    def ready(self, rows: int, wanted: int, reach: int, *, fed_back: bool) -> DraftShape:
        """The bucket of a step of `rows` rows that see `reach` slots, planned on first use."""
        context = context_bucket(reach, self._rows)
        found = self._ready.get((rows, wanted, context, fed_back))
        if found is None:
            seen = row_bucket(wanted) if wanted else 0
            buckets = row_bucket(rows), context, seen, self._rows + 1
            shape = found = DraftShape(*buckets, fed_back, self.cache_dtype)
            key = (self.model.name, shape)
            self.session.prepare(key, lambda: self.model.build(shape), self.model.weight)
            self._ready[rows, wanted, context, fed_back] = shape
        return found

    def chain(self, token: int, hidden: Array, count: int) -> list[int]:
        """The `count` tokens that follow `token` by best guesses, in one run; `past` stays."""
        model = self.model
        context = context_bucket(self.past + count, self._rows)
        shape = DraftShape(1, context, 1, self._rows + 1, True, self.cache_dtype)
        ids = table(model.name, model.target_ids)

        def build() -> Graph:
            return unrolled(model.build(shape), count, ids)

        def storage(t: Tensor) -> Array:
            held = t.name == ids.name
            return model.target_ids.astype(np.int32) if held else model.weight(t)

        key = (model.name, "chain", count, shape)
        self.session.prepare(key, build, storage)
        given = feeds(token, hidden, self.past, count, context)
        given["positions"] += np.int32(self.offset)
        out = self.session.run(key, given)
        return [int(t) for t in out["drafted"]]
