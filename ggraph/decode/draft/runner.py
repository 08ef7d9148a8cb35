"""Steps of a draft head over its own cache."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ggraph.arrays import WeightSource
from ggraph.decode.draft.growth import Tree, grown, sown, tables
from ggraph.decode.draft.head import DraftHead, DraftShape
from ggraph.decode.draft.hidden import held, keeping, root
from ggraph.decode.draft.loop import feeds, guessing, table, unrolled
from ggraph.decode.picks import candidates
from ggraph.decode.rows import ROW_BUCKETS, Rows, context_bucket, padded, row_bucket, visibility
from ggraph.decode.runner import Runner, picking
from ggraph.decode.sampler import SamplerConfig
from ggraph.decode.taps import gathering, tap
from ggraph.dtype import F16, DType
from ggraph.formats.lazy_array import Storage
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

    def prepare(self, key: Hashable, build: Callable[[], Graph], weights: WeightSource) -> object:
        """Plan the graph that `build` makes under `key`."""
        ...

    def inputs(self, key: Hashable) -> frozenset[str]:
        """Names of the inputs of the graph under `key`."""
        ...

    def run(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One step of the plan of `key`, with an array for each of its inputs and no other."""
        ...


class Brings(NamedTuple):
    """What a step brings back of each wanted row: its `most` best draft tokens, with their chances
    or, where a law is made of them, their `logits`; all logits where that is 0."""

    most: int = 0
    logits: bool = False

    def of(self, step: Graph) -> Graph:
        """The step that brings this back."""
        if not self.most:
            return step
        return picking(step, self.most) if self.logits else guessing(step, self.most)


ALL = Brings()


class DraftRunner:
    """Steps of a draft head over its own cache; `past` slots hold true rows, whose positions in
    the text are `offset` higher. In the session of the `target` it gathers the features of true
    rows where they lie, so that they are given as slots i32 [T, 1]; elsewhere they travel. Of
    fed-back rows is given which row each follows, i32 [T, 1] (`ggraph.decode.draft.hidden`)."""

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
        self._held = held(model.name, model.width)
        self.past = self.offset = 0
        self.unrolls = session.replays  # a chain is then one plan instead of one per token
        self._rows = context_bucket(context + ROW_BUCKETS[-1], 1 << 30)
        self._ready: dict[tuple[int, int, int, bool, Brings], tuple[Hashable, DraftShape]] = {}

    @property
    def gathers(self) -> bool:
        """Whether features are given as slots of the target's."""
        return self._target is not None

    def step(self, rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool) -> Array:
        """Logits f32 [M, W] of the wanted rows; `past` does not move."""
        return self._run(rows, wanted, features, fed_back=fed_back)["logits"][: len(wanted)]

    def guess(
        self, rows: Rows, wanted: Sequence[int], features: Array, count: int, *, fed_back: bool
    ) -> tuple[Array, Array]:
        """The `count` best draft tokens of each wanted row i32 [M, count], and their chances f32;
        as `step`, whose logits stay where they are."""
        out = self._run(rows, wanted, features, fed_back=fed_back, brings=Brings(count))
        return out["best"][: len(wanted)], out["chance"][: len(wanted), :, 0]

    def candidates(
        self, rows: Rows, wanted: Sequence[int], features: Array, count: int, *, fed_back: bool
    ) -> Array:
        """The `count` best draft tokens of each wanted row and their logits, CANDIDATE [M, count],
        the best first."""
        brings = Brings(count, logits=True)
        out = self._run(rows, wanted, features, fed_back=fed_back, brings=brings)
        return candidates(out, len(wanted))

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
        brings: Brings = ALL,
    ) -> dict[str, Array]:
        count, reach = len(rows.tokens), max(max(rows.slots) + 1, self.past)
        key, shape = self.ready(count, len(wanted), reach, fed_back=fed_back, brings=brings)
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
        return "behind" if fed_back else "tapped" if self.gathers else "features"

    def _step(self, shape: DraftShape) -> Graph:
        """The head's step, which begins and ends where hidden rows are held; true rows gather their
        features where they can."""
        step, target = keeping(self.model.build(shape), self._held), self._target
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
        self, rows: int, wanted: int, reach: int, *, fed_back: bool, brings: Brings = ALL
    ) -> tuple[Hashable, DraftShape]:
        """Key and bucket of the plan of a step of `rows` rows that see `reach` slots, made on first
        use."""
        asked = rows, wanted, context_bucket(reach, self._rows), fed_back, brings
        found = self._ready.get(asked)
        if found is None:
            seen = row_bucket(wanted) if wanted else 0
            buckets = row_bucket(rows), asked[2], seen, self._rows + 1
            shape = DraftShape(*buckets, fed_back, self.cache_dtype)
            key = self.model.name, brings, shape, self.gathers
            if key not in self.session:  # else the graph would be built to be compared
                weights = self.model.weight
                self.session.prepare(key, lambda: brings.of(self._step(shape)), weights)
            found = self._ready[asked] = key, shape
        return found

    def chain(self, token: int, count: int) -> list[int]:
        """The `count` tokens that follow `token` by best guesses, in one run; `past` stays."""
        found: list[int] = self._chain(token, count)["drafted"].tolist()
        return found

    def drawn(self, token: int, law: SamplerConfig, numbers: Array) -> tuple[list[int], Array]:
        """The tokens that follow `token`, as many as there are numbers f64 [K], which draw them by
        the law's stages; and the best of each row, CANDIDATE [K, top_k]. In one run, as `chain`."""
        out = self._chain(token, len(numbers), law, numbers)
        return out["drafted"].tolist(), candidates(out, len(numbers))

    def _chain(
        self,
        token: int,
        count: int,
        law: SamplerConfig | None = None,
        numbers: Array | None = None,
    ) -> dict[str, Array]:
        key, shape = self.chained(count, self.past, law)
        given = feeds(token, self.past, count, shape.context)
        given["positions"] += np.int32(self.offset)
        return self._fed(key, given if numbers is None else given | {"numbers": numbers})

    def tree(self, best: Array, chance: Array, depth: int, nodes: int) -> Tree:
        """The tree of `nodes` nodes that grows in `depth` levels, in one run, from the best draft
        tokens behind the last true row i32 [1, K] and their chances; `past` stays."""
        k = best.shape[1]
        key, shape = self.treed(k, depth, nodes, self.past)
        given = sown(best, chance, self.past, depth, shape.context)
        given["positions"] += np.int32(self.offset)
        return Tree.of(self._fed(key, given), k)

    def chained(
        self, count: int, past: int, law: SamplerConfig | None = None
    ) -> tuple[Hashable, DraftShape]:
        """Key and bucket of the plan of `chain` behind `past` true rows, or of `drawn` by a law;
        made on first use."""
        shape = self._fed_back(1, past + count)
        key = (self.model.name, "chain", count, shape, law.stages if law is not None else None)
        if key not in self.session:
            step = partial(self.model.build, shape)
            self._plan(key, lambda ids, root: unrolled(step(), count, ids, root, law), {})
        return key, shape

    def treed(self, k: int, depth: int, nodes: int, past: int) -> tuple[Hashable, DraftShape]:
        """The same of `tree` with K best guesses of each row."""
        shape = self._fed_back(k, past + depth * k)
        key = (self.model.name, "tree", depth, nodes, shape)
        if key not in self.session:
            step = partial(self.model.build, shape)
            self._plan(key, lambda ids, root: grown(step(), depth, nodes, ids, root), tables(k))
        return key, shape

    def _fed_back(self, rows: int, reach: int) -> DraftShape:
        """Steps of `rows` fed-back rows, of which the last see `reach` slots."""
        context = context_bucket(reach, self._rows)
        return DraftShape(rows, context, rows, self._rows + 1, True, self.cache_dtype)

    def _plan(
        self, key: Hashable, build: Callable[[Tensor, Tensor], Graph], tables: Mapping[str, Array]
    ) -> None:
        """Make the plan of what `build` makes of the head's target ids and the row of the root; it
        may know these `tables` by name."""
        model = self.model
        ids = table(model.name, model.target_ids)
        known = {ids.name: model.target_ids.astype(np.int32).reshape(ids.shape), **tables}

        def storage(t: Tensor) -> Storage:
            return known[t.name] if t.name in known else model.weight(t)

        self.session.prepare(key, lambda: build(ids, root(self._held)), storage)
