"""EAGLE drafters: a chain, or a dynamic tree, from a head that reads target features. Floor 9.

Legend: N true rows, K chain length, B branching (top_k), W draft vocabulary, E head width.

Index alignment (P = last position whose features are known, xP+1 already chosen):

    row        slot     feature           token    its logits guess
    true       0..P     taps of 0..P      x1..xP+1 x2..xP+2
    draft 1    P+1      hidden of row P   guess 1  guess 2
    draft 2    P+2      hidden of draft 1 guess 2  guess 3

The cache holds true rows only: draft rows are written behind them and forgotten, so after a
rejection the head is in the state of one that never drafted. With a `window`, the cache begins anew
with the last true rows where more of them wait: reading all of a long prompt, or of what was
written while nobody asked, would take the head longer than the drafts of a short answer save.
Sources: Li et al. 2024 (arXiv 2406.16858) for the tree, 2025 (arXiv 2503.01840) for the head.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ggraph.decode.acceptance import draw
from ggraph.decode.draft import ROOT, Draft
from ggraph.decode.draft_loop import feeds, table, unrolled
from ggraph.decode.draft_model import DraftModel, DraftShape
from ggraph.decode.rows import ROW_BUCKETS, Rows, context_bucket, padded, row_bucket, visibility
from ggraph.dtype import F16, DType
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor

LONGEST_LOOP = 8  # steps that are unrolled into one plan; longer chains go step by step
PARTS = (32, 16, 8)  # rows of a step that reads many, with a window: few plans, and none is padded


@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2's tree: `total_tokens` nodes with the root counted, `depth` expansions of `top_k`."""

    total_tokens: int = 16
    depth: int = 4
    top_k: int = 4

    def __post_init__(self) -> None:
        scored = self.top_k + self.depth * self.top_k**2
        if self.top_k < 1 or self.depth < 0 or not 2 <= self.total_tokens <= scored + 1:
            raise InputError(
                f"tree of {self.total_tokens} tokens, depth {self.depth}, top_k {self.top_k}: "
                f"expected 2 to {scored + 1} tokens"
            )
        most = ROW_BUCKETS[-1]
        if self.total_tokens > most or self.top_k * max(1, self.depth) > most:
            raise InputError(
                f"tree of {self.total_tokens} tokens, depth {self.depth}, top_k {self.top_k}: "
                f"tokens, and depth times top_k, may not exceed {most}"
            )


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
        count, reach = len(rows.tokens), max(max(rows.slots) + 1, self.past)
        shape = self.ready(count, len(wanted), reach, fed_back=fed_back)
        bucket, seen, context = shape.rows, shape.wanted, shape.context
        wide = features
        if count < bucket:
            wide = np.zeros((bucket, features.shape[1]), np.float32)
            wide[:count] = features
        feeds = (
            {}
            if self.model.sliding_window is None
            else {"window_mask": visibility(rows, bucket, context, self.model.sliding_window)}
        )
        out = self.session.run(
            (self.model.name, shape),
            {
                **feeds,
                "tokens": padded(rows.tokens, bucket, 0),
                "positions": padded([p + self.offset for p in rows.positions], bucket, 0),
                "slots": padded(rows.slots, bucket, self._rows),
                "mask": visibility(rows, bucket, context),
                "length": np.array([reach], np.int32),
                "wanted": padded(wanted, seen, 0),
                "hidden" if fed_back else "features": wide,
            },
        )
        return out["logits"][: len(wanted)], out["feedback"][: len(wanted)]

    def ready(self, rows: int, wanted: int, reach: int, *, fed_back: bool) -> DraftShape:
        """The bucket of a step of `rows` rows that see `reach` slots, planned on first use."""
        context = context_bucket(reach, self._rows)
        found = self._ready.get((rows, wanted, context, fed_back))
        if found is None:
            buckets = row_bucket(rows), context, row_bucket(wanted), self._rows + 1
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


class EagleDrafter:
    """Drafts with an EAGLE-3 head: a chain, or a tree when `tree` is given.

    `p_min` ends a chain at the first guess that the head itself finds less likely than that.
    `goes_on`, told how sure the head is of each guess so far, says whether another is wanted.
    With `random`, a chain's guesses are drawn at `temp` and carry their law, for stochastic
    rejection; nothing else may depend on them then, so they tell no chances and are not cut short.
    Of more than `window` true rows that wait, the head reads the last; of a prompt, which it reads
    beforehand, the last `prompt_window`.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        tree: TreeShape | None = None,
        p_min: float = 0.0,
        random: np.random.Generator | None = None,
        temp: float = 1.0,
        window: int | None = None,
        prompt_window: int | None = None,
        goes_on: Callable[[Sequence[float]], bool] | None = None,
    ) -> None:
        few = any(w is not None and w < 1 for w in (window, prompt_window))
        if not 0.0 <= p_min <= 1.0 or temp <= 0 or few:
            raise InputError(
                f"p_min {p_min}, temp {temp}, windows {window} and {prompt_window}: "
                f"expected 0 to 1, above 0, and rows"
            )
        if tree is not None and tree.top_k > len(runner.model.target_ids):
            raise InputError(
                f"tree of top_k {tree.top_k}: the head knows {len(runner.model.target_ids)} tokens"
            )
        self.runner, self.tree, self.p_min = runner, tree, p_min
        self.random, self.temp, self.goes_on = random, temp, goes_on
        self.window, self.prompt_window = window, prompt_window
        self.name, self.taps = "eagle3", runner.model.taps
        self._tokens: list[int] = []
        self._features: list[Array] = []  # of those tokens, in blocks f32 [n, A*G]
        self._logits = self._hidden = np.zeros((1, 0), np.float32)

    def warm(self) -> None:
        """Make the plans of the usual steps, where the rows that are read at once are bounded."""
        if self.window is None:
            return
        for rows in (*range(1, PARTS[-1]), *reversed(PARTS)):
            self.runner.ready(rows, 1, rows, fed_back=False)
        if self.tree is None:
            self.runner.ready(1, 1, 1, fed_back=True)

    def begin(self, first: int) -> None:
        """Forget the old text. The first token has no feature before it and is not drafted from."""
        self.runner.past = self.runner.offset = 0
        self._tokens, self._features = [], []

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """Keep the new tokens and the features before them; they are run when a draft is due."""
        if features is None or len(features) != len(tokens):
            raise InputError(
                f"eagle3: {len(tokens)} tokens, "
                f"{'no' if features is None else len(features)} features"
            )
        self._tokens.extend(tokens)
        self._features.append(features)

    def read(self) -> None:
        """Run the prompt's rows, so that the first draft need not wait for them."""
        self._catch_up(self.prompt_window)

    def propose(self, limit: int) -> Draft:
        """Run the true rows that are waiting, then draft behind them."""
        self._catch_up(self.window)
        if limit < 1:
            return Draft()
        return self._chain(limit) if self.tree is None else self._tree(self.tree, limit)

    def _catch_up(self, window: int | None) -> None:
        """True rows through encoder and decoder, in parts; the last row's output is kept."""
        if not self._tokens:
            return
        blocks, runner = self._features, self.runner
        tokens, features = self._tokens, blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        self._tokens, self._features = [], []
        skipped = len(tokens) - (window or len(tokens))
        if skipped > 0:
            tokens, features = tokens[skipped:], features[skipped:]
            runner.offset += runner.past + skipped
            runner.past = 0
        done = 0
        while done < len(tokens):
            rows = self._part(len(tokens) - done)
            part, at = slice(done, done + rows), runner.past
            slots = range(at, at + rows)
            self._logits, self._hidden = runner.step(
                Rows(tokens[part], slots, slots), [rows - 1], features[part], fed_back=False
            )
            runner.past += rows
            done += rows

    def _part(self, left: int) -> int:
        """How many of the rows that are left are read in one step."""
        if self.window is None:
            return min(left, ROW_BUCKETS[-1])
        return next((p for p in PARTS if p <= left), left)

    @property
    def _is_plain(self) -> bool:
        """Whether a chain needs nothing of the host between its steps."""
        certain = self.p_min == 0 and self.random is None
        return self.runner.unrolls and certain and self.runner.model.sliding_window is None

    def _chain(self, limit: int) -> Draft:
        if self._is_plain and 1 < limit <= LONGEST_LOOP + 1:
            first = int(self.runner.model.target_ids[int(np.argmax(self._logits[0]))])
            return Draft.chain([first, *self.runner.chain(first, self._hidden, limit - 1)])
        tokens: list[int] = []
        laws: dict[int, Array] = {}
        chances: list[float] = []
        logits, hidden, past = self._logits, self._hidden, self.runner.past
        while True:
            best = int(np.argmax(logits[0]))
            sure = chance_of(logits[0], best)
            if sure < self.p_min:
                break
            if self.random is not None:
                best, law = drawn(self.runner.model, logits[0], self.temp, self.random)
                laws[len(tokens) - 1] = law
            else:
                chances.append(sure)
            tokens.append(int(self.runner.model.target_ids[best]))
            if len(tokens) == limit or not self._wants_more(chances):
                break
            slot = [past + len(tokens) - 1]
            rows = Rows(tokens[-1:], slot, slot)
            logits, hidden = self.runner.step(rows, [0], hidden, fed_back=True)
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), laws, tuple(chances))

    def _wants_more(self, chances: Sequence[float]) -> bool:
        return self.goes_on is None or self.random is not None or self.goes_on(chances)

    def _tree(self, shape: TreeShape, limit: int) -> Draft:
        """Expand level by level, then keep the best nodes of all that were scored."""
        count = min(shape.total_tokens - 1, limit)
        depth = max(0, min(shape.depth, limit - 1))
        scored = self._expand(TreeShape(shape.total_tokens, shape.depth, shape.top_k), depth)
        return scored.best(min(count, len(scored.tokens)))

    def _expand(self, shape: TreeShape, depth: int) -> "Scored":
        """Score the root's top_k children, then those of the best top_k nodes, `depth` times."""
        k, past, ids = shape.top_k, self.runner.past, self.runner.model.target_ids
        scored = Scored()
        best, score = top(log_softmax(self._logits), k)  # [1, B]
        level = scored.add(ids[best[0]], score[0], [ROOT] * k)
        level_score, hidden = score[0], np.repeat(self._hidden, k, axis=0)  # [B, E]
        seen = np.eye(k, dtype=bool)  # [B, S]: draft slots that each row may see
        for i in range(depth):
            slots = range(past + i * k, past + (i + 1) * k)
            tokens = [scored.tokens[n] for n in level]
            rows = Rows(tokens, [past + i] * k, slots, past, seen)
            logits, out = self.runner.step(rows, range(k), hidden, fed_back=True)
            best, score = top(log_softmax(logits), k)  # [B, B]
            total = (score + level_score[:, None]).reshape(-1)
            parents = np.repeat(level, k)
            nodes = scored.add(ids[best].reshape(-1), total, parents)
            (chosen,), (level_score,) = top(total[None], k)
            level = [nodes[c] for c in chosen]
            hidden = out[chosen // k]
            seen = np.concatenate([seen[chosen // k], np.eye(k, dtype=bool)], axis=1)
        return scored


class Scored:
    """Every node that the expansion scored, in the order in which it was scored."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.parents: list[int] = []

    def add(self, tokens: Array, scores: Array, parents: Sequence[int] | Array) -> list[int]:
        """Append nodes; returns their numbers."""
        first = len(self.tokens)
        self.tokens += [int(t) for t in tokens]
        self.scores += [float(s) for s in scores]
        self.parents += [int(p) for p in parents]
        return list(range(first, len(self.tokens)))

    def best(self, count: int) -> Draft:
        """The `count` best nodes as a draft, in scoring order.

        A node's score never exceeds its parent's and ties go to the earlier node, so the parents
        of the best are among the best.
        """
        kept = sorted(top(np.array([self.scores], np.float32), count)[0][0].tolist())
        place = {node: i for i, node in enumerate(kept)}
        parents = [place[self.parents[n]] if self.parents[n] != ROOT else ROOT for n in kept]
        return Draft(tuple(self.tokens[n] for n in kept), tuple(parents))


def drawn(
    model: DraftModel, logits: Array, temp: float, random: np.random.Generator
) -> tuple[int, Array]:
    """A draft token drawn from logits [W], and that law f64 [V] over the target's vocabulary."""
    own = np.exp(log_softmax(logits.astype(np.float64) / temp))  # [W]
    law = np.zeros(model.target_vocabulary, np.float64)
    law[model.target_ids] = own
    return draw(own, random.random()), law


def chance_of(logits: Array, best: int) -> float:
    """The softmax of logits [W] at the greatest of them."""
    less = logits - logits[best]
    return 1.0 / float(np.exp(less, out=less).sum())


def log_softmax(logits: Array) -> Array:
    """Logarithms of the softmax over the last axis, f32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def top(scores: Array, count: int) -> tuple[Array, Array]:
    """Indices and values [B, count] of the largest per row of scores [B, W], largest first, ties by
    lower index."""
    order = np.stack([_largest(row, count) for row in -scores])
    return order, np.take_along_axis(scores, order, axis=-1)


def _largest(negated: Array, count: int) -> Array:
    """Where the `count` least are: those that may be among them are found first, since sorting a
    whole vocabulary takes as long as the head itself."""
    count = min(count, len(negated))
    bar = np.partition(negated, count - 1)[count - 1]
    found = np.flatnonzero(negated <= bar)
    if len(found) < count:  # not numbers, which come last
        found = np.arange(len(negated))
    return found[np.argsort(negated[found], kind="stable")[:count]]
