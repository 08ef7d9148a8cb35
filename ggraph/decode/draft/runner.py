"""Steps of a draft head over its own cache."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ggraph.decode.draft.growth import Tree, grown, sown, tables
from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.loop import feeds, guessing, table, unrolled
from ggraph.decode.rows import ROW_BUCKETS, Rows, context_bucket, padded, row_bucket, visibility
from ggraph.decode.runner import Runner
from ggraph.decode.taps import gathering, tap
from ggraph.dtype import F16, DType
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor


class DraftSession(Protocol):
    """What a drafter asks of a session: `ggraph.session.Session` is one."""

    @property
    def replays(self) -> bool:
        """Whether plans are captured and replayed."""
        ...

    def __contains__(self, key: Hashable) -> bool:
        """Whether a plan was prepared under `key`."""
        ...

    def prepare(
        self, key: Hashable, build: Callable[[], Graph], weights: Callable[[Tensor], Array]
    ) -> object:
        """Plan the graph that `build` makes under `key`."""
        ...

    def inputs(self, key: Hashable) -> frozenset[str]:
        """Names of the inputs of the graph under `key`."""
        ...

    def run(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One step of the plan of `key`, with an array for each of its inputs and no other."""
        ...


class DraftRunner:
    """Steps of a draft head over its own cache; `past` slots hold true rows, whose positions in
    the text are `offset` higher. In the session of the `target` it gathers the features of true
    rows where they lie, so that they are given as slots i32 [T, 1]; elsewhere they travel."""

    def __init__(
        self,
        model: DraftHead,
        session: DraftSession,
        context: int,
        *,
        cache_dtype: DType = F16,
        target: Runner | None = None,
    ) -> None:
        self.model, self.session, self.cache_dtype = model, session, cache_dtype
        self._target = target if target is not None and target.session is session else None
        self.past = self.offset = 0
        self.unrolls = session.replays  # a chain is then one plan instead of one per token
        self._rows = context_bucket(context + ROW_BUCKETS[-1], 1 << 30)
        self._ready: dict[tuple[int, int, int, bool, int], tuple[Hashable, DraftShape]] = {}

    @property
    def gathers(self) -> bool:
        """Whether features are given as slots of the target's."""
        return self._target is not None

    def step(
        self, rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool
    ) -> tuple[Array, Array]:
        """Logits f32 [M, W] and hidden f32 [M, E] of the wanted rows; `past` does not move."""
        out = self._run(rows, wanted, features, fed_back=fed_back)
        return out["logits"][: len(wanted)], out["feedback"][: len(wanted)]

    def guess(
        self, rows: Rows, wanted: Sequence[int], features: Array, count: int, *, fed_back: bool
    ) -> tuple[Array, Array, Array]:
        """The `count` best draft tokens of each wanted row i32 [M, count], their chances f32, and
        hidden f32 [M, E]; as `step`, whose logits stay where they are."""
        out = self._run(rows, wanted, features, fed_back=fed_back, guesses=count)
        m = len(wanted)
        return out["best"][:m], out["chance"][:m, :, 0], out["feedback"][:m]

    def read(self, rows: Rows, features: Array) -> None:
        """Only write true rows into the cache, which takes a third of a step's weights."""
        self._run(rows, (), features, fed_back=False)

    def _run(
        self,
        rows: Rows,
        wanted: Sequence[int],
        features: Array,
        *,
        fed_back: bool,
        guesses: int = 0,
    ) -> dict[str, Array]:
        count, reach = len(rows.tokens), max(max(rows.slots) + 1, self.past)
        key, shape = self.ready(count, len(wanted), reach, fed_back=fed_back, guesses=guesses)
        bucket, context = shape.rows, shape.context
        wide = features
        if count < bucket:
            wide = np.zeros((bucket, features.shape[1]), features.dtype)
            wide[:count] = features
        given = {
            "tokens": padded(rows.tokens, bucket, 0),
            "positions": padded([p + self.offset for p in rows.positions], bucket, 0),
            "slots": padded(rows.slots, bucket, self._rows, np.int64),
            **self._masks(rows, bucket, context),
            "length": np.array([reach], np.int32),
            "wanted": padded(wanted, shape.wanted, 0),
            self._fed_as(fed_back): wide,
        }
        return self._fed(key, given)

    def _fed_as(self, fed_back: bool) -> str:
        """The input that a step's rows begin with."""
        return "hidden" if fed_back else "tapped" if self.gathers else "features"

    def _step(self, shape: DraftShape) -> Graph:
        """The head's step; true rows gather their features where they can."""
        step, target = self.model.build(shape), self._target
        if target is None or shape.fed_back:
            return step
        slots = target.shape(1, 1, 1).cache_rows
        return gathering(step, [tap(target.model, i, slots) for i in self.model.taps])

    def _masks(self, rows: Rows, bucket: int, context: int) -> dict[str, Array]:
        """What each row sees."""
        found = {"mask": visibility(rows, bucket, context)}
        if self.model.sliding_window is not None:
            found["window_mask"] = visibility(rows, bucket, context, self.model.sliding_window)
        return found

    def _fed(self, key: Hashable, offered: Mapping[str, Array]) -> dict[str, Array]:
        """A run with what the graph takes of all that a step offers: heads differ in that."""
        taken = self.session.inputs(key)
        return self.session.run(key, {n: a for n, a in offered.items() if n in taken})

    def ready(
        self, rows: int, wanted: int, reach: int, *, fed_back: bool, guesses: int = 0
    ) -> tuple[Hashable, DraftShape]:
        """Key and bucket of the plan of a step of `rows` rows that see `reach` slots, made on first
        use; of one that brings back so many `guesses` of a row and no logits, where any."""
        asked = rows, wanted, context_bucket(reach, self._rows), fed_back, guesses
        found = self._ready.get(asked)
        if found is None:
            seen = row_bucket(wanted) if wanted else 0
            buckets = row_bucket(rows), asked[2], seen, self._rows + 1
            shape = DraftShape(*buckets, fed_back, self.cache_dtype)
            key = self.model.name, guesses, shape, self.gathers

            def build() -> Graph:
                step = self._step(shape)
                return guessing(step, guesses) if guesses else step

            if key not in self.session:  # else the graph would be built to be compared
                self.session.prepare(key, build, self.model.weight)
            found = self._ready[asked] = key, shape
        return found

    def chain(self, token: int, hidden: Array, count: int) -> list[int]:
        """The `count` tokens that follow `token` by best guesses, in one run; `past` stays."""
        key, shape = self.chained(count, self.past)
        given = feeds(token, hidden, self.past, count, shape.context)
        given["positions"] += np.int32(self.offset)
        out = self._fed(key, given)
        found: list[int] = out["drafted"].tolist()
        return found

    def tree(self, said: tuple[Array, Array, Array], depth: int, nodes: int) -> Tree:
        """The tree of `nodes` nodes that grows from these guesses in `depth` levels, in one run;
        `past` stays. What is said is the best draft tokens behind the last true row i32 [1, K],
        their chances, and hidden f32 [1, E]."""
        k = said[0].shape[1]
        key, shape = self.treed(k, depth, nodes, self.past)
        given = sown(*said, self.past, depth, shape.context)
        given["positions"] += np.int32(self.offset)
        return Tree.of(self._fed(key, given), k)

    def chained(self, count: int, past: int) -> tuple[Hashable, DraftShape]:
        """Key and bucket of the plan of `chain` behind `past` true rows, made on first use."""
        shape = self._fed_back(1, past + count)
        key = (self.model.name, "chain", count, shape)
        if key not in self.session:
            self._plan(key, lambda ids: unrolled(self.model.build(shape), count, ids), {})
        return key, shape

    def treed(self, k: int, depth: int, nodes: int, past: int) -> tuple[Hashable, DraftShape]:
        """The same of `tree` with K best guesses of each row."""
        shape = self._fed_back(k, past + depth * k)
        key = (self.model.name, "tree", depth, nodes, shape)
        if key not in self.session:
            self._plan(
                key, lambda ids: grown(self.model.build(shape), depth, nodes, ids), tables(k)
            )
        return key, shape

    def _fed_back(self, rows: int, reach: int) -> DraftShape:
        """Steps of `rows` fed-back rows, of which the last see `reach` slots."""
        context = context_bucket(reach, self._rows)
        return DraftShape(rows, context, rows, self._rows + 1, True, self.cache_dtype)

    def _plan(
        self, key: Hashable, build: Callable[[Tensor], Graph], tables: Mapping[str, Array]
    ) -> None:
        """Make the plan of what `build` makes of the head's target ids; it may know these `tables`
        by name."""
        model = self.model
        ids = table(model.name, model.target_ids)
        known = {ids.name: model.target_ids.astype(np.int32).reshape(ids.shape), **tables}

        def storage(t: Tensor) -> Array:
            return known[t.name] if t.name in known else model.weight(t)

        self.session.prepare(key, lambda: build(ids), storage)
