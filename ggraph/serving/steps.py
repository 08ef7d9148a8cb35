"""Steps of a model over lists of slots: shape buckets and feeds.

Legend: T token rows, S entries of a list, R cache rows, M rows with logits, V vocabulary, E width.

The cost of a step follows from what its rows see, and not from how large the cache is. Few shapes
are planned: steps whose rows all want logits in each bucket of rows, and others in coarse ones.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ggraph.arrays import Feeds
from ggraph.decode.given import given_feeds, has_given, words
from ggraph.decode.model import CausalModel, StepShape
from ggraph.decode.picks import best_of
from ggraph.decode.rows import ROW_BUCKETS, in_view, padded, row_bucket
from ggraph.decode.runner import Result, picking
from ggraph.dtype import F16, DType
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.serving.pieces import MIXED_ROWS, mixed_bucket
from ggraph.serving.states import Course, carried, copy_graph, course_feeds
from ggraph.session import Session
from ggraph.tensor import Array, Kind

# Rows of such steps that do. By `scripts/choose_serving.py --wanted` those that fill one up are
# 1 to 4 % of all costs; with every bucket of rows 64 texts have thrice as many plans.
MIXED_WANTED = (1, 16, 64, 256)
# Entries of the shortest lists; longer ones are so many times as long. A text that outgrows its
# lists may wait for a plan, half a second; lists that are not full cost nothing to be measured
WIDTH, WIDER = 4096, 4


class Row(NamedTuple):
    """One token of a text: where it is written, and which slots it sees, itself included, in the
    order of the text. `wanted`: whether it gets logits. Of a row that sees later ones, `near` ends
    with itself, for layers with a window; it is turned as one `lag` positions earlier is."""

    token: int
    slot: int
    position: int
    seen: Array  # i32
    wanted: bool
    near: Array | None = None
    behind: int = 0  # rows behind it that it sees whatever the window is
    lag: int = 0


class Lists:
    """What rows feed a step with: shape buckets, and lists, in memory that two steps in turn have:
    one may be made while another is run."""

    def __init__(self, slots: int, context: int, window: int | None) -> None:
        self.context, self._window = context, window
        self._spare, self._length = slots, np.array([slots + 1], np.int32)
        self._lists: dict[tuple[str, int, int, int], Array] = {}
        self._turn = 0

    def bucket(self, rows: int, wanted: int, reach: int) -> tuple[int, int, int]:
        """T, M and S of a step of `rows` rows, `wanted` of them with logits, the longest list of
        `reach` entries."""
        if wanted == rows:
            bucket = seen = row_bucket(rows)
        else:
            bucket = mixed_bucket(rows)
            seen = min(bucket, next(b for b in MIXED_WANTED if b >= wanted))
        return bucket, seen, min(width_bucket(reach), self.context)

    def feeds(self, rows: Sequence[Row], count: int, wanted: int, width: int) -> dict[str, Array]:
        """The inputs of a step of `count` rows, `wanted` of them with logits, whose lists have
        `width` entries. Rows that fill it up are written to the slot behind all others."""
        self._turn ^= 1
        feeds = {
            "tokens": padded(words([r.token for r in rows]), count, 0),
            "positions": padded([r.position - r.lag for r in rows], count, 0),
            "slots": padded([r.slot for r in rows], count, self._spare, np.int64),
            "mask": self._listed("mask", rows, count, width),
            "length": self._length,
            "wanted": padded([i for i, r in enumerate(rows) if r.wanted], wanted, 0),
        }
        if self._window is not None:
            rows = [r if r.near is None else r._replace(seen=r.near) for r in rows]
            feeds["window_mask"] = self._listed("window_mask", rows, count, width, self._window)
        return feeds

    def _listed(
        self, name: str, rows: Sequence[Row], count: int, width: int, window: int = 1 << 30
    ) -> Array:
        """i32 [T, S], in kept memory: what lies behind an end says nothing."""
        key = name, count, width, self._turn
        if key not in self._lists:
            self._lists[key] = np.full((count, width), -1, np.int32)
        lists = self._lists[key]
        for line, row in zip(lists, rows, strict=False):
            seen = row.seen[-row.behind - in_view(window, row.position) :]
            line[: len(seen)] = seen
            if len(seen) < width:
                line[len(seen)] = -1
        if len(rows) < count:
            lists[len(rows) :, 0] = -1
        return lists


def width_bucket(reach: int) -> int:
    """Entries of lists of which the longest has `reach`."""
    width = WIDTH
    while width < reach:
        width *= WIDER
    return width


_Planned = tuple[StepShape, Hashable, tuple[str, ...]]  # a step's bucket, its plan's key and inputs
LOGITS, BEST = ("logits",), ("best", "greatest")  # what a step brings back beside its taps


class Ready(NamedTuple):
    """A step that can be run: its bucket, its plan's key, what it is fed, and how many rows it has,
    and of them with logits."""

    shape: StepShape
    key: Hashable
    feeds: Feeds
    rows: int
    wanted: int


class ListRunner:
    """Runs steps over a cache of `slots` rows, of which no text takes more than `context`; and, if
    the model has recurrent layers, over the states of as many `texts`, running ones and kept."""

    def __init__(
        self,
        model: CausalModel,
        session: Session,
        slots: int,
        context: int,
        *,
        cache_dtype: DType = F16,
        taps: Sequence[int] = (),
        texts: int = 32,
    ) -> None:
        if not 1 <= context <= slots <= 1 << 24:
            raise InputError(
                f"texts of {context} tokens in a cache of {slots}: expected 1 or more, in order, "
                f"at most {1 << 24}"
            )
        self.model, self.session = model, session
        self.slots, self.context = slots, context
        self.texts = texts if model.recurrent else 0
        self.cache_dtype, self.taps = cache_dtype, tuple(taps)
        self._lists = Lists(slots, context, model.sliding_window)
        self._plans: dict[tuple[object, ...], _Planned] = {}
        self._caches: dict[str, int] = {}

    def shape(
        self,
        rows: int,
        wanted: int,
        reach: int,
        taps: tuple[int, ...] = (),
        *,
        given: bool = False,
    ) -> StepShape:
        """The bucket of a step of `rows` rows, `wanted` of them with logits, the longest list of
        `reach` entries; with these taps. Some rows may be `given` in place of tokens."""
        bucket, seen, width = self._lists.bucket(rows, wanted, reach)
        held = self.slots + 1  # the last one takes the writes of rows that fill a bucket up
        texts = max(1, self.texts)
        return StepShape(bucket, held, seen, held, taps, self.cache_dtype, width, texts, given)

    def prepare(self, shape: StepShape) -> bool:
        """Make the plan of a shape. Whether there was anything to do."""
        key = (self.model.name, shape)
        if key in self.session:
            return False
        build = partial(self.model.build, shape)
        self.session.prepare(key, lambda: picking(build(), alone=False), self.model.weight)
        return True

    def caches(self) -> dict[str, int]:
        """Names of the states that hold the texts' rows, with the bytes of a row."""
        if not self._caches:
            step = self._smallest()
            others = {t.name for index in ("certain", "log_slots") for t in carried(step, index)}
            rows = [t for t in step.leaves(Kind.STATE) if t.name not in others]
            self._caches = {t.name: t.nbytes // t.shape[0] for t in rows}
        return self._caches

    def states(self) -> dict[str, int]:
        """Names of the states that hold a slot for each text, with the bytes of a slot."""
        held = carried(self._smallest(), "certain")
        return {t.name: t.nbytes // t.shape[0] for t in held}

    def copying(self) -> Hashable:
        """The key of the plan that copies a text's states, made on first use."""
        key = (self.model.name, "copy", self.shape(1, 1, 1))
        if key not in self.session:
            self.session.prepare(key, copy_graph(self._smallest()), self.model.weight)
        return key

    def copy(self, source: int, target: int) -> None:
        """Copy the states in one slot to another."""
        given = np.array([source], np.int32), np.array([target], np.int64)
        self.session.run(self.copying(), dict(zip(("from", "to"), given, strict=True)), ())

    def _smallest(self) -> Graph:
        """A step of one row, which has all states."""
        return self.model.build(self.shape(1, 1, 1))

    def step(
        self,
        rows: Sequence[Row],
        taps: tuple[int, ...] = (),
        courses: Sequence[Course] = (),
        *,
        greedy: bool = False,
    ) -> Result:
        """One step; recurrent layers are told the `courses` of the texts whose rows these are, in
        order."""
        return self.run(self.ready(rows, taps, courses), greedy=greedy)

    def ready(
        self, rows: Sequence[Row], taps: tuple[int, ...] = (), courses: Sequence[Course] = ()
    ) -> Ready:
        """A step of these rows, which holds until the next but one is made."""
        count, wanted = len(rows), sum([r.wanted for r in rows])
        tokens, reach = [r.token for r in rows], max([len(r.seen) for r in rows])
        shape, key, taken = self._planned(count, wanted, reach, taps, given=has_given(tokens))
        offered = self._lists.feeds(rows, shape.rows, shape.wanted, shape.listed)
        if shape.given:
            offered |= given_feeds(tokens, offered["positions"], shape.rows)
        if self.texts:
            offered |= course_feeds(courses, shape.rows, shape.texts)
        feeds = self.session.feeds(key, {n: offered[n] for n in taken})
        return Ready(shape, key, feeds, count, wanted)

    def run(self, step: Ready, *, greedy: bool = False) -> Result:
        """Run it: logits f32 [M, V] of the rows that want them, in order, or where that is
        `greedy` the token of the greatest alone, i32 [M, 1], below 0 where that is no number; taps
        f32 [T, E]."""
        taps = step.shape.taps
        outputs = (BEST if greedy else LOGITS) + tuple([f"layer_input.{i}" for i in taps])
        out = self.session.run(step.key, step.feeds, outputs)
        found = {i: out[f"layer_input.{i}"][: step.rows] for i in taps}
        said = best_of(out, step.wanted) if greedy else out["logits"][: step.wanted]
        return Result(said, found, int(greedy))

    def has_plan(self, rows: int, reach: int, taps: tuple[int, ...]) -> bool:
        """Whether a step of `rows` rows, all with logits, needs no plan any more, whose longest
        list has `reach` entries."""
        return (rows, rows, width_bucket(reach), taps, False) in self._plans

    def _planned(
        self, rows: int, wanted: int, reach: int, taps: tuple[int, ...], *, given: bool
    ) -> _Planned:
        """The bucket of a step whose plan is there; looked up, since every token asks."""
        asked = rows, wanted, width_bucket(reach), taps, given
        found = self._plans.get(asked)
        if found is None:
            shape = self.shape(rows, max(1, wanted), reach, taps, given=given)
            self.prepare(shape)
            key = (self.model.name, shape)
            found = self._plans[asked] = shape, key, tuple(self.session.inputs(key))
        return found


def first_shapes(runner: ListRunner, most: int, taps: tuple[int, ...] = ()) -> list[StepShape]:
    """The shapes that up to `most` short texts need, alone and together, the commonest first."""
    alone = [runner.shape(rows, 1, 1, taps) for rows in (1, *MIXED_ROWS)]
    going = [runner.shape(rows, rows, 1, taps) for rows in ROW_BUCKETS if rows <= row_bucket(most)]
    seen = MIXED_WANTED[1 : bisect_left(MIXED_WANTED, most) + 1]  # none where one text runs alone
    beside = [runner.shape(rows, wanted, 1, taps) for wanted in seen for rows in MIXED_ROWS]
    return list(dict.fromkeys([*alone, *going, *beside]))
