"""Steps of one model over its KV cache: shape buckets, feeds, masks.

Legend: T token rows, C cache rows that attention sees, R cache rows, V vocabulary, E width.

Rows of the cache are numbered slots. Plain text uses slot = position; the nodes of a draft tree
take the slots after the text, while their position is that of their depth. The last slot takes
the writes of rows that only fill a bucket up.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ggraph import ops
from ggraph.arrays import Feeds
from ggraph.decode.given import Stillness, given_feeds, has_given, pieces, words
from ggraph.decode.model import LOG, REPLAYED, CausalModel, StepShape
from ggraph.decode.picks import best_of, candidates, drawn_of, greatest_of, numbers_of
from ggraph.decode.rows import (
    ROW_BUCKETS,
    Rows,
    columns,
    context_bucket,
    longest_draft,
    padded,
    parents_of,
    row_bucket,
    visibility,
)
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.taps import Taps, keeping
from ggraph.door import checked
from ggraph.dtype import F16, F32, F64, I32, I64, DType
from ggraph.errors import GgraphError, InputError
from ggraph.graph import Graph
from ggraph.plan import VerifiedPlan
from ggraph.session import Session
from ggraph.tensor import Array, Kind, Tensor, input

# The bucket of a step whose plan is there, its key, and what the model looks at of all that a step
# offers
Ready = tuple[StepShape, tuple[Hashable, ...], frozenset[str]]


class _Step(NamedTuple):
    """A step that can be run: its plan's key, what it is fed, the slots of its rows, how many of
    them have logits; and what it brings back of a row."""

    key: Hashable
    feeds: Feeds
    slots: Sequence[int]
    wanted: int
    brings: Hashable


@dataclass(frozen=True)
class Result:
    """Logits f32 [M, V] of the wanted rows, or where `picked` are brought back only a token of
    each, i32 [M, 1], or several of the greatest, CANDIDATE [M, picked]; and the taps f32 [T, E] by
    layer, which stay where they are until they are asked for."""

    logits: Array
    taps: Mapping[int, Array]
    picked: int | Sampler = 0


class Runner:
    """Runs a model's steps in a session. `past` is the number of cache slots that hold text. One
    that `picks` brings back that many best tokens of each wanted row, or the one that a sampler
    would take, of whose numbers it uses none up; and leaves the logits on the device."""

    @checked
    def __init__(
        self,
        model: CausalModel,
        session: Session,
        context: int,
        *,
        batch: int = 512,
        cache_dtype: DType = F16,
        taps: Sequence[int] = (),
    ) -> None:
        if not 1 <= context <= 1 << 24:
            raise InputError(f"context size {context}: expected 1 to {1 << 24}")
        if batch < 1:
            raise InputError(f"batch {batch}: expected 1 or more")
        self.model, self.session = model, session
        self.context, self.batch, self.cache_dtype = context, batch, cache_dtype
        self.taps = tuple(taps)
        self.recurrent: bool = model.recurrent
        self.picks: int | Sampler = 0
        self.spreads = session.replays  # masks are made on the device, where one more node is cheap
        self._past = 0
        self._replay: tuple[int, ...] = ()  # rows of the last step that are text, but not in states
        self._full = context_bucket(context + ROW_BUCKETS[-1], 1 << 30)
        self._window: int | None = model.sliding_window
        self._ready: dict[tuple[Hashable, ...], Ready] = {}
        self._stillness = Stillness()
        self._ahead: _Step | None = None  # of one more token of text, but for that token

    @property
    def past(self) -> int:
        """Slots of the cache that hold text. Setting it forgets what lies behind; InputError where
        a recurrent model would have to go back, but not to the beginning."""
        return self._past

    @past.setter
    def past(self, count: int) -> None:
        if self.recurrent and count not in (0, self._past):
            raise InputError(
                f"{self.model.name} has recurrent layers, whose state cannot go from {self._past} "
                f"tokens to {count}"
            )
        self._past, self._replay = count, self._replay if count else ()

    @checked
    def shape(self, rows: int, wanted: int, reach: int, *, given: bool = False) -> StepShape:
        """The bucket for `rows` token rows of which `wanted` get logits, seeing `reach` slots; some
        may be `given` in place of tokens."""
        bucket, context = row_bucket(rows), context_bucket(reach, self._full)
        seen, held = 1 if wanted == 1 else bucket, self._full + 1
        return StepShape(bucket, context, seen, held, self.taps, self.cache_dtype, given=given)

    @checked
    def plan(self, shape: StepShape) -> VerifiedPlan:
        """The verified plan of a bucket, made on first use."""
        key = self._key(shape)
        if key in self.session:
            return self.session.plan(key)

        def build() -> Graph:
            step = self._step(shape)
            if self._is_spread(shape):
                step = spreading(step)
            if isinstance(self.picks, Sampler):
                return drawing(step, self.picks.config)
            return picking(step, self.picks) if self.picks else step

        return self.session.prepare(key, build, self.model.weight)

    def _step(self, shape: StepShape) -> Graph:
        """The model's step, whose taps stay in the session."""
        return keeping(self.model.build(shape), self.model, shape.cache_rows)

    def _key(self, shape: StepShape) -> tuple[Hashable, ...]:
        return (self.model.name, shape, *([self._brings] if self._brings else ()))

    @property
    def _brings(self) -> Hashable:
        """What a step brings back of a row: the stages of a draw, or how many of the greatest."""
        return self.picks.config.stages if isinstance(self.picks, Sampler) else self.picks

    @checked
    def ready(self, rows: int, reach: int) -> None:
        """Make the plan of a step of `rows` rows with logits for each, if it is not there yet."""
        self._planned(rows, rows, reach)

    @checked
    def movable(self, rows: int) -> None:
        """Make the plans that keep up to `rows` rows which lie apart in the cache."""
        for count in range(2, rows + 1):
            self._moving(row_bucket(count))

    @checked
    def prepare(self, tokens: Sequence[int]) -> None:
        """Make the plans that appending these tokens will need."""
        reach = self.past
        for part in pieces(tokens, self.batch):
            reach += len(part)
            self._planned(len(part), 1, reach, has_given(part))

    @checked
    def text(self, tokens: Sequence[int], *, every: bool = False) -> Result:
        """Append text to the cache. Logits of the last row, or of `every` row.

        InputError when the context is full; the cache is unchanged then.
        """
        if not tokens:
            raise InputError("a step needs at least one token, got none")
        self._check_room(len(tokens))
        first, results, self._ahead = self.past, [], None
        for part in pieces(tokens, self.batch):
            slots = range(self.past, self.past + len(part))
            wanted = range(len(part)) if every else [len(part) - 1]
            results.append(self._run(self._composed(Rows(part, slots, slots), wanted, len(part))))
            self._past += len(part)
        logits = np.concatenate([r.logits for r in results]) if every else results[-1].logits
        return Result(logits, self.tapped(range(first, self.past)), results[-1].picked)

    def follow(self, token: int) -> Result:
        """Append one token. What its step is fed is made while the one before computes."""
        past, step, self._ahead = self._past, self._ahead, None
        at = range(past, past + 1)
        if step is None or self._replay or (step.slots, step.brings) != (at, self._brings):
            self._check_room(1)
            step = self._composed(Rows([token], at, at), [0], 1)
        else:
            step.feeds.put("tokens", np.array([token], np.int32))
        if not isinstance(self.picks, Sampler):  # which knows its numbers when a token is drawn
            self.session.meanwhile(partial(self._look_ahead, past + 1))
        result = self._run(step)
        self._past = past + 1
        return result

    @property
    def longest(self) -> int:
        """Most nodes of a draft that one step verifies."""
        return longest_draft(self.recurrent)

    def _check_room(self, count: int) -> None:
        if self.past + count > self.context:
            raise InputError(
                f"context of {self.context} tokens is full: {self.past} in use, {count} more wanted"
            )

    def _look_ahead(self, past: int) -> None:
        """Compose the step of one more token behind so many, where that can be done now."""
        if past < self.context and self._asked(1, 1, past + 1, False) in self._ready:
            at = range(past, past + 1)
            with suppress(GgraphError):
                self._ahead = self._composed(Rows([0], at, at), [0], 1)

    def step(self, rows: Rows, wanted: Sequence[int]) -> Result:
        """Run one step; `past` is not moved, so rows beyond it are forgotten unless kept."""
        if self.recurrent and (rows.slots[0] != self._past or len(rows.tokens) > 1 + self.longest):
            raise InputError(
                f"{self.model.name} has recurrent layers: a step of {len(rows.tokens)} rows from "
                f"slot {rows.slots[0]} does not follow {self._past} tokens, or is no draft"
            )
        return self._run(self._composed(rows, wanted, 0))

    def _composed(self, rows: Rows, wanted: Sequence[int], certain: int) -> _Step:
        """One step whose first `certain` rows are text."""
        count = len(rows.tokens)
        reach = max(max(rows.slots) + 1, self.past)
        if reach > self._full:
            raise InputError(f"a step to slot {reach - 1}: the cache has {self._full} slots")
        shape, key, taken = self._planned(count, len(wanted), reach, has_given(rows.tokens))
        offered = self._feeds(rows, wanted, shape, reach)
        if self.recurrent:
            offered.update(self._course(rows, shape.rows, certain))
        if isinstance(self.picks, Sampler):
            offered["numbers"] = numbers_of(self.picks, rows, wanted, shape.wanted)
        feeds = self.session.feeds(key, {n: a for n, a in offered.items() if n in taken})
        return _Step(key, feeds, rows.slots, len(wanted), self._brings)

    def _run(self, step: _Step) -> Result:
        self._replay = ()
        out = self.session.run(step.key, step.feeds)
        return Result(self._said(out, step.wanted), self.tapped(step.slots), self.picks)

    def tapped(self, slots: Sequence[int]) -> Taps:
        """The taps of the rows that lie in these slots."""
        return Taps(self.session, self.model, self.taps, slots)

    def _said(self, out: Mapping[str, Array], count: int) -> Array:
        """The logits of a step, or what of them is brought back."""
        if isinstance(self.picks, Sampler):
            return out["best"][:count, None]
        if not self.picks:
            return out["logits"][:count]
        return candidates(out, count) if self.picks > 1 else best_of(out, count)

    def _planned(self, rows: int, wanted: int, reach: int, given: bool = False) -> Ready:
        """The plan of a step, which is there then; looked up, since every token asks."""
        asked = self._asked(rows, wanted, reach, given)
        found = self._ready.get(asked)
        if found is None:
            shape = self.shape(rows, wanted, reach, given=given)
            self.plan(shape)
            key = self._key(shape)
            found = self._ready[asked] = shape, key, self.session.inputs(key)
        return found

    def _asked(self, rows: int, wanted: int, reach: int, given: bool) -> tuple[Hashable, ...]:
        """What tells the plans of steps apart."""
        return rows, wanted, context_bucket(reach, self._full), given, self._brings

    def keep(self, rows: Sequence[int]) -> None:
        """Make the given rows of the last step part of the text: root first, then down a path.

        Rows that were not in order in the cache are moved there by a plan of their own.
        """
        source = [self.past + r for r in rows]
        target = list(range(self.past, self.past + len(rows)))
        if source != target:
            self._move(source, target)
        self._past += len(rows)
        self._replay = tuple(rows)

    def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
        count, filler = row_bucket(len(source)), self._full
        to = padded(target, count, filler, np.int64)
        self.session.run(self._moving(count), {"from": padded(source, count, filler), "to": to})

    def _moving(self, count: int) -> Hashable:
        """The key of the plan that moves so many rows, made on first use."""
        shape = self.shape(1, 1, 1)  # states are the same in all
        key = (self.model.name, "move", count, shape)
        if key not in self.session:
            graph = move_graph(self._step(shape), count, shape.cache_rows)
            self.session.prepare(key, graph, self.model.weight)
        return key

    def _is_spread(self, shape: StepShape) -> bool:
        """Whether a step is given its mask's columns, which are fewer bytes than the mask."""
        given = (shape.rows + 2) * shape.rows + shape.context
        return self.spreads and given < shape.rows * shape.context

    def _course(self, rows: Rows, count: int, certain: int) -> dict[str, Array]:
        """What recurrent layers must know of a step's rows (see `ggraph.decode.model`)."""
        found: dict[str, Array] = {
            "parents": parents_of(rows, count),
            "replay": padded(self._replay, REPLAYED, -1)[None],
            "past": np.array([rows.slots[0]], np.int32),
            "certain": np.array([certain - 1], np.int32),
        }
        if count <= LOG:
            found["log_slots"] = np.arange(count, dtype=np.int64)
        return found

    def _feeds(
        self, rows: Rows, wanted: Sequence[int], shape: StepShape, reach: int
    ) -> dict[str, Array]:
        at = self._stillness.positions(rows.tokens, rows.positions, rows.slots[0])
        feeds = {
            "tokens": padded(words(rows.tokens), shape.rows, 0),
            "positions": padded(at, shape.rows, 0),
            "slots": padded(rows.slots, shape.rows, shape.cache_rows - 1, np.int64),
            "length": np.array([reach], np.int32),
            "wanted": padded(wanted, shape.wanted, 0),
        }
        if shape.given:
            feeds |= given_feeds(rows.tokens, feeds["positions"], shape.rows)
        if self._is_spread(shape):
            feeds["columns"], feeds["column"] = columns(rows, shape.rows, shape.context)
        else:
            feeds["mask"] = visibility(rows, shape.rows, shape.context)
        if self._window is not None:
            feeds["window_mask"] = visibility(rows, shape.rows, shape.context, self._window)
        return feeds


@checked
def picking(step: Graph, count: int = 1, *, alone: bool = True) -> Graph:
    """A model's step with `best` i32 [M], the token of each wanted row's greatest logit, or
    i32 [M, K] of the `count` greatest, and `greatest` f32 [M, K, 1], those logits (NaN counts as
    the least), in place of all logits, or beside them."""
    best, greatest = greatest_of(step["logits"], count)
    found = {"best": best, "greatest": greatest}
    return _with(step, found, f"best of {step.name}", without="logits" if alone else "")


@checked
def spreading(step: Graph) -> Graph:
    """A model's step whose mask is made of its few different columns (`ggraph.decode.rows`):
    `columns` f32 [T + 2, T], and which of them each slot has, `column` i32 [C]."""
    if "mask" not in {t.name for t in step.leaves(Kind.INPUT)}:
        return step  # all layers have windows
    rows, context = step["mask"].shape
    given = input("columns", (rows + 2, rows), F32), input("column", (context,), I32)
    return step.replace({"mask": ops.cont(ops.transpose(ops.get_rows(*given)))})


@checked
def drawing(step: Graph, config: SamplerConfig) -> Graph:
    """A model's step with `best` i32 [M], a token drawn of each wanted row by `numbers` f64 [M], in
    place of all logits; -1 where `ops.draw` has none."""
    numbers = input("numbers", step["logits"].shape[:1], F64)
    best = drawn_of(step["logits"], numbers, config)
    return _with(step, {"best": best}, f"draw of {step.name}", without="logits")


def _with(step: Graph, found: Mapping[str, Tensor], name: str, without: str) -> Graph:
    """The step with these outputs beside its own, or in place of one of them."""
    outputs = {t.name: t for t in step.outputs if t.name != without}
    also = [t for t in step.updates.values() if not t.is_leaf]
    return Graph.of({**outputs, **found}, also=also, name=name)


@checked
def move_graph(step: Graph, count: int, slots: int) -> Graph:
    """The graph that copies `count` rows of every cache of `step` with as many `slots`: rows `from`
    to rows `to`. States of recurrent layers are no caches."""
    source, target = input("from", (count,), I32), input("to", (count,), I64)
    moved = []
    for cache in step.leaves(Kind.STATE):
        if cache.shape[0] != slots:
            continue
        rows, width = cache.shape[0], cache.size // cache.shape[0]
        flat = cache.reshape(rows, width)
        new = ops.set_rows(
            cache, ops.get_rows(flat, source).reshape(count, *cache.shape[1:]), target
        )
        moved.append(new)
    return Graph.of({"moved": ops.cont(source)}, also=moved, name="move cache rows")
