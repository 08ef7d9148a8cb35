"""Steps of a model over lists of slots: shape buckets and feeds.

Legend: T token rows, S entries of a list, R cache rows, M rows with logits, V vocabulary, E width.

The cost of a step follows from what its rows see, and not from how large the cache is. Few shapes
are planned: steps whose rows all want logits in each bucket of rows, and others in coarse ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.decode.model import CausalModel, StepShape
from ggraph.decode.rows import ROW_BUCKETS, padded, row_bucket
from ggraph.decode.runner import Result
from ggraph.dtype import F16, DType
from ggraph.errors import InputError
from ggraph.session import Session
from ggraph.tensor import Array

MIXED_ROWS = (16, 32, 48, 64, 96, 128, 256)  # of steps with rows that want no logits
MIXED_WANTED = (1, 16, 64, 256)  # rows of such steps that do
WIDTH, WIDER = 256, 4  # entries of the shortest lists; longer ones are so many times as long


@dataclass(frozen=True)
class Row:
    """One token of a text: where it is written, and which slots it sees, itself included; the
    place in that list is the position in the text. `wanted`: whether it gets logits."""

    token: int
    slot: int
    seen: Array  # i32 [position + 1]
    wanted: bool


class ListRunner:
    """Runs steps over a cache of `slots` rows, of which no text takes more than `context`."""

    def __init__(
        self,
        model: CausalModel,
        session: Session,
        slots: int,
        context: int,
        *,
        cache_dtype: DType = F16,
        taps: Sequence[int] = (),
    ) -> None:
        if not 1 <= context <= slots <= 1 << 24:
            raise InputError(
                f"texts of {context} tokens in a cache of {slots}: expected 1 or more, in order, "
                f"at most {1 << 24}"
            )
        if model.recurrent:
            raise InputError(
                f"{model.name} has recurrent layers, whose state is not in slots: it can be used "
                "for one text at a time"
            )
        self.model, self.session = model, session
        self.slots, self.context = slots, context
        self.cache_dtype, self.taps = cache_dtype, tuple(taps)
        self._window: int | None = model.sliding_window
        self._feeds: dict[StepShape, dict[str, Array]] = {}

    def shape(self, rows: int, wanted: int, reach: int, tapped: bool = False) -> StepShape:
        """The bucket of a step of `rows` rows, `wanted` of them with logits, the longest list of
        `reach` entries; with taps where it is `tapped`."""
        if wanted == rows:
            bucket = seen = row_bucket(rows)
        else:
            bucket = next(b for b in MIXED_ROWS if b >= rows)
            seen = min(bucket, next(b for b in MIXED_WANTED if b >= wanted))
        width = WIDTH
        while width < reach:
            width *= WIDER
        held = self.slots + 1  # the last one takes the writes of rows that fill a bucket up
        return StepShape(
            bucket, held, seen, held, self.taps if tapped else (), self.cache_dtype,
            min(width, self.context),
        )  # fmt: skip

    def prepare(self, shape: StepShape) -> bool:
        """Make the plan of a shape. Whether there was anything to do."""
        key = (self.model.name, shape)
        if key in self.session:
            return False
        self.session.prepare(key, lambda: self.model.build(shape), self.model.weight)
        return True

    def step(self, rows: Sequence[Row], tapped: bool = False) -> Result:
        """One step: logits f32 [M, V] of the rows that want them, in order; taps f32 [T, E]."""
        wanted = [i for i, r in enumerate(rows) if r.wanted]
        reach = max(len(r.seen) for r in rows)
        shape = self.shape(len(rows), max(1, len(wanted)), reach, tapped)
        self.prepare(shape)
        key = (self.model.name, shape)
        offered = self._filled(shape, rows, wanted)
        taken = self.session.inputs(key)
        out = self.session.run(key, {n: a for n, a in offered.items() if n in taken})
        taps = {i: out[f"layer_input.{i}"][: len(rows)] for i in shape.taps}
        return Result(out["logits"][: len(wanted)], taps)

    def _filled(
        self, shape: StepShape, rows: Sequence[Row], wanted: Sequence[int]
    ) -> dict[str, Array]:
        count = shape.rows
        feeds = {
            "tokens": padded([r.token for r in rows], count, 0),
            "positions": padded([len(r.seen) - 1 for r in rows], count, 0),
            "slots": padded([r.slot for r in rows], count, self.slots),
            "mask": self._lists(shape, "mask", rows),
            "length": np.array([shape.cache_rows], np.int32),
            "wanted": padded(wanted, shape.wanted, 0),
        }
        if self._window is not None:
            feeds["window_mask"] = self._lists(shape, "window_mask", rows, self._window)
        return feeds

    def _lists(
        self, shape: StepShape, name: str, rows: Sequence[Row], window: int = 1 << 30
    ) -> Array:
        """i32 [T, S], kept from step to step: what lies behind an end says nothing."""
        kept = self._feeds.setdefault(shape, {})
        if name not in kept:
            kept[name] = np.full((shape.rows, shape.listed), -1, np.int32)
        lists = kept[name]
        for line, row in zip(lists, rows, strict=False):
            seen = row.seen[-window:]
            line[: len(seen)] = seen
            line[len(seen) : len(seen) + 1] = -1
        lists[len(rows) :, 0] = -1
        return lists


def first_shapes(runner: ListRunner, most: int) -> list[StepShape]:
    """The shapes that up to `most` short texts need, alone and together, the commonest first."""
    alone = [runner.shape(rows, 1, 1) for rows in (1, *MIXED_ROWS)]
    going = [runner.shape(rows, rows, 1) for rows in ROW_BUCKETS if rows <= row_bucket(most)]
    beside = [runner.shape(rows, 2, 1) for rows in MIXED_ROWS] if most > 1 else []
    return list(dict.fromkeys([*alone, *going, *beside]))
