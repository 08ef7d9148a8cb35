"""Texts read by an encoder, many to a step, each to the vector that it would have alone.

All rows of a text are in one step, and see one another by lists, in the order of the text: where
they lie, and what lies beside them, does not touch a bit. Nothing is kept from step to step.

Legend: T token rows, M texts of a step, V numbers of a vector.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ggraph.decode.model import CausalModel, StepShape
from ggraph.decode.rows import ROW_BUCKETS, padded
from ggraph.dtype import F32
from ggraph.errors import InputError
from ggraph.serving.counters import Counters
from ggraph.serving.pieces import MIXED_ROWS
from ggraph.serving.prefix import PrefixTree
from ggraph.serving.stride import Meanwhile
from ggraph.serving.text import Request, Text, begun
from ggraph.session import Session
from ggraph.tensor import Array


@dataclass(frozen=True)
class Passage:
    """A text to read: its vector is that of the `row`, -1 the last one, or the mean of all. Tokens
    from number `second` on stand in a second part, where the model tells parts apart."""

    tokens: Sequence[int]
    row: int | None = None
    second: int | None = None


class Encoder:
    """Runs an encoder over up to `texts` texts a step, of `context` tokens each; a step of several
    has `rows` rows at most."""

    def __init__(
        self,
        model: CausalModel,
        session: Session,
        context: int,
        *,
        texts: int = 16,
        rows: int = ROW_BUCKETS[-1],
    ) -> None:
        if min(context, texts, rows) < 1:
            raise InputError(f"{texts} texts of {context} in {rows} rows: expected 1 or more")
        self.model, self.session, self.context = model, session, context
        self.texts, self.rows = texts, rows

    def shape(self, rows: int) -> StepShape:
        """The bucket of a step of so many rows: those of mixed steps, then each twice as large."""
        bucket = next((b for b in ROW_BUCKETS if b >= max(rows, MIXED_ROWS[0])), ROW_BUCKETS[-1])
        while bucket < rows:
            bucket *= 2
        return StepShape(bucket, bucket, self.texts, bucket, cache_dtype=F32, listed=bucket)

    def prepare(self, shape: StepShape) -> Hashable:
        """The key of a bucket's plan, which is made on first use."""
        key = (self.model.name, shape)
        if key not in self.session:
            self.session.prepare(key, partial(self.model.build, shape), self.model.weight)
        return key

    def fitting(self, passages: Sequence[Passage]) -> int:
        """How many of these, from the first on, one step takes; one in any case."""
        ends = np.cumsum([len(p.tokens) for p in passages[: self.texts]])
        return max(1, int(np.searchsorted(ends, self.rows, "right")))

    def vectors(self, passages: Sequence[Passage]) -> list[Array]:
        """A vector f32 [V] of each. InputError for a text without tokens, or with too many."""
        for p in passages:
            if not 1 <= len(p.tokens) <= self.context:
                raise InputError(f"a text of {len(p.tokens)} tokens: expected 1 to {self.context}")
        found: list[Array] = []
        while len(found) < len(passages):
            left = passages[len(found) :]
            found += self._step(left[: self.fitting(left)])
        return found

    def _step(self, passages: Sequence[Passage]) -> list[Array]:
        shape = self.shape(sum(len(p.tokens) for p in passages))
        key, feeds = self.prepare(shape), self._feeds(passages, shape)
        taken = self.session.inputs(key)
        out = self.session.run(key, {n: a for n, a in feeds.items() if n in taken})
        means = shape.wanted  # of which as many rows stand before them
        at = [i + means * (p.row is None) for i, p in enumerate(passages)]
        return list(out["vectors"][at])

    def _feeds(self, passages: Sequence[Passage], shape: StepShape) -> dict[str, Array]:
        """All inputs that a step may have: see `ggraph.decode.model`; and `types` i32 [T]."""
        rows, window = shape.rows, self.model.sliding_window
        lists = [np.full((rows, rows), -1, np.int32) for _ in range(1 + (window is not None))]
        positions, kinds, at, start = list[int](), list[int](), list[int](), 0
        for p in passages:
            count = len(p.tokens)
            here = slice(start, start + count)
            lists[0][here, :count] = np.arange(start, start + count)
            if window is not None:
                near = _around(count, window // 2)
                lists[1][here, : near.shape[1]] = np.where(near < 0, -1, start + near)
            positions += range(count)
            first = count if p.second is None else p.second
            kinds += [int(i >= first) for i in range(count)]
            at.append(start + (p.row or 0) % count)
            start += count
        return {
            "tokens": padded([t for p in passages for t in p.tokens], rows, 0),
            "positions": padded(positions, rows, 0),
            "types": padded(kinds, rows, 0),
            "wanted": padded(at, shape.wanted, 0),
            **dict(zip(("mask", "window_mask"), lists, strict=False)),
        }


def _around(count: int, half: int) -> Array:
    """i32 [count, n]: which of so many rows each sees where a window has `half` to each side, up to
    the first number below 0.

    Sources: transformers' `Gemma3TextConfig`; llama.cpp's `LLAMA_SWA_TYPE_SYMMETRIC`.
    """
    i = np.arange(count)
    first, behind = np.maximum(i - half, 0), np.minimum(i + half + 1, count)
    rows = first[:, None] + np.arange(min(2 * half + 1, count))
    return np.where(rows < behind[:, None], rows, -1).astype(np.int32)


@dataclass(frozen=True)
class Read(Request):
    """A request that an encoder reads a passage."""

    row: int | None = None
    second: int | None = None

    @property
    def passage(self) -> Passage:
        """What is to be read."""
        return Passage(self.prompt, self.row, self.second)


@dataclass(eq=False)
class Encoding:
    """Reads what is asked for, in the order in which it comes; a `Batch` for encoders. The one
    feature of a text is its vector. One thread at a time may call it."""

    encoder: Encoder
    waiting: list[Text] = field(default_factory=list)
    running: list[Text] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting

    @property
    def together(self) -> int:
        """How many texts are computed together at most."""
        return self.encoder.texts

    def plans(self) -> list[Callable[[], object]]:
        """Makes the plans that texts need together, one by one, the smallest first."""
        most = min(self.encoder.rows, self.encoder.context * self.encoder.texts)
        shapes = dict.fromkeys(self.encoder.shape(b) for b in ROW_BUCKETS if b <= most)
        return [partial(self.encoder.prepare, s) for s in shapes]

    def submit(self, request: Request) -> Text:
        """A text to read. InputError where it is none that an encoder reads, or does not fit."""
        count, context = len(request.prompt), self.encoder.context
        if not isinstance(request, Read) or not 1 <= count <= context:
            raise InputError(f"a text of {count} tokens: expected 1 to {context}, to read")
        text = begun(request, 0, 0, PrefixTree().root)
        self.waiting.append(text)
        return text

    def cancel(self, text: Text, reason: str = "cancelled") -> None:
        """Nobody wants this text's vector."""
        if text in self.waiting:
            self.waiting.remove(text)
            text.ended = reason

    def step(
        self, meanwhile: Meanwhile = lambda _: None, go_on: Callable[[], bool] = lambda: False
    ) -> list[Text]:
        """Read the first texts: those that ended by it. `meanwhile` is called while it computes."""
        passages = [t.request.passage for t in self.waiting if isinstance(t.request, Read)]
        count = self.encoder.fitting(passages)
        self.running, self.waiting = self.waiting[:count], self.waiting[count:]
        self.encoder.session.meanwhile(lambda: meanwhile(()))
        start = time.perf_counter()
        for text, vector in zip(self.running, self.encoder.vectors(passages[:count]), strict=True):
            text.features, text.ended = [vector], "read"
        self.counters.seconds += time.perf_counter() - start
        self.counters.steps += 1
        self.counters.prompt_rows += sum(len(t.tokens) for t in self.running)
        ended, self.running = self.running, []
        return ended
