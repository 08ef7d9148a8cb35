"""EAGLE drafters: a chain, or a dynamic tree, from a head that reads target features.

Legend: N true rows, K chain length, B branching (top_k), W draft vocabulary, E head width.

Index alignment (P = last position whose features are known, xP+1 already chosen):

    row        slot     feature           token    its logits guess
    true       0..P     taps of 0..P      x1..xP+1 x2..xP+2
    draft 1    P+1      hidden of row P   guess 1  guess 2
    draft 2    P+2      hidden of draft 1 guess 2  guess 3

What is hidden stays where the head runs (`hidden.py`).

The cache holds true rows only: draft rows are written behind them and forgotten, so after a
rejection the head is in the state of one that never drafted. With a `window`, the cache begins anew
with the last true rows where more of them wait: reading all of a long prompt, or of what was
written while nobody asked, would take the head longer than the drafts of a short answer save.
Sources: Li et al. 2024 (arXiv 2406.16858) for the tree, 2025 (arXiv 2503.01840) for the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.decode.draft.features import FeatureDrafter
from ggraph.decode.draft.hidden import NEXT_ROW, ROOT_ROW, below
from ggraph.decode.draft.runner import Brings, DraftRunner
from ggraph.decode.draft.tree import ROOT, Draft, Guess, places
from ggraph.decode.rows import ROW_BUCKETS, Rows
from ggraph.decode.sampler import SamplerConfig
from ggraph.door import fit
from ggraph.errors import InputError
from ggraph.tensor import Array

# Both by `scripts/choose_reading.py`. Steps that are unrolled into one plan; longer chains go step
# by step. A draft of the usual length has 7, and planning all lengths up to 16 takes 2 to 3 s.
LONGEST_LOOP = 8
PART = 16  # rows that are only read at once, with a window: few plans, none is padded
# True rows that a head reads where drafts must pay for themselves. Behind 32, 128 and all rows of a
# prompt 45, 60 and 68 % of first guesses are right (docs/log/2026-11-22-the-head-starved.md).
WINDOW = 128


@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2's tree: `total_tokens` nodes with the root counted, `depth` expansions of `top_k`."""

    total_tokens: int = 16
    depth: int = 4
    top_k: int = 4

    def __post_init__(self) -> None:
        fit(self)
        scored = self.top_k + self.depth * self.top_k**2
        if self.top_k < 1 or self.depth < 0:
            raise InputError(
                f"tree of depth {self.depth}, top_k {self.top_k}: expected at least depth 0, "
                "top_k 1"
            )
        if not 2 <= self.total_tokens <= scored + 1:
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


class EagleDrafter(FeatureDrafter):
    """Drafts guess by guess: a chain, or a tree when `tree` is given. `goes_on`, told how sure the
    head is of each guess so far, says whether another is wanted.

    Guesses that are drawn by a `law` carry theirs (`Drawing`), for stochastic rejection; nothing
    else may depend on them then, so they tell no chances, and where they end goes by the laws
    alone. The graph makes a chain's guesses, unless the host `reads_logits` and makes them.
    Of more than `window` true rows that wait (16 at least), the head reads the last.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        tree: TreeShape | None = None,
        p_min: float = 0.0,
        law: SamplerConfig | None = None,
        window: int | None = None,
        goes_on: Callable[[Sequence[float]], bool] | None = None,
        reads_logits: bool = False,
        name: str = "eagle3",
    ) -> None:
        if window is not None and window < 1:
            raise InputError(f"a window of {window}: expected rows")
        if tree is not None and tree.top_k > len(runner.model.target_ids):
            raise InputError(
                f"tree of top_k {tree.top_k}: the head knows {len(runner.model.target_ids)} tokens"
            )
        super().__init__(runner, name, p_min, law if tree is None else None)
        if tree is not None:
            self.p_min = 0.0  # as a law, chains alone have it
        self.tree, self.goes_on, self.reads_logits = tree, goes_on, reads_logits
        self._law = None if self.drawing is None else self.drawing.config
        self._count = 1 if tree is None else tree.top_k  # guesses that are asked of a row
        self._brings = Brings(0 if reads_logits else self._count)
        if self._law is not None:
            self._brings = Brings(self._law.top_k, logits=True)
        self.window = None if window is None else max(window, PART)  # so many may wait
        self._last = NOTHING  # behind the last true row

    @property
    def levels(self) -> int:
        """Guesses from the root of a tree to its deepest node."""
        return 0 if self.tree is None else self.tree.depth + 1

    def warm(self, past: int, longest: int) -> None:
        """Make the plans of reading so much text, and of rounds behind it with up to `longest`
        guesses."""
        runner, brings = self.runner, self._brings
        past, most = min(past, self.window or past), ROW_BUCKETS[-1]
        if self.window is None:
            parts, usual = [min(most, past - 1 - i) for i in range(0, past - 1, most)], longest + 1
        else:
            parts, usual = [PART], PART
        for i, rows in enumerate(parts):
            runner.ready(rows, 0, min(i * most + rows, past), fed_back=False)
        for rows in range(usual + 1):  # the first guess, and what a round kept
            runner.ready(max(1, rows), 1, past + rows, fed_back=False, brings=brings)
        if self.tree is None:
            self._warm_chains(past, longest - 1)
        elif self._is_one_plan(self.tree.depth):
            runner.treed(self._count, self.tree.depth, self.tree.total_tokens - 1, past)
        else:
            k = self._count
            for level in range(self.tree.depth):
                runner.ready(k, k, past + (level + 1) * k, fed_back=True, brings=brings)

    def _warm_chains(self, past: int, most: int) -> None:
        """Make the plans of up to `most` steps behind a guess."""
        for steps in range(1, most + 1):
            if self._is_one_plan(steps):
                self.runner.chained(steps, past, self._law)
            else:
                self.runner.ready(1, 1, past + steps, fed_back=True, brings=self._brings)

    def read(self) -> None:
        """Read the prompt's rows and make the first guess: the first draft need not wait."""
        self._catch_up(1 if self.window is None else PART)

    def propose(self, limit: int) -> Draft:
        """Run the true rows that are waiting, then draft behind them."""
        self._catch_up(ROW_BUCKETS[-1] if self.window is None else PART)
        if limit < 1:
            return Draft()
        return self._chain(limit) if self.tree is None else self._tree(self.tree, limit)

    def _catch_up(self, most: int) -> None:
        """True rows through encoder and decoder, up to `most` in the step of the last row, whose
        output is kept."""
        if not self._tokens:
            return
        tokens, features = self._waiting()
        runner = self.runner
        done = self._read_parts(tokens, features, most)
        left = len(tokens) - done
        slots = range(runner.past, runner.past + left)
        self._last = self._step(Rows(tokens[done:], slots, slots), features[done:], fed_back=False)
        runner.past += left

    def _step(self, rows: Rows, features: Array, *, fed_back: bool) -> "Said":
        """What the head says behind the last of these rows."""
        return self._ask(rows, [len(rows.tokens) - 1], features, fed_back=fed_back)

    def _ask(self, rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool) -> "Said":
        """What the head says behind the wanted rows."""
        runner, k = self.runner, self._count
        if self._law is not None:
            most = self._law.top_k
            found = runner.candidates(rows, wanted, features, most, fed_back=fed_back)
            return Said(NOTHING.best, NO_ROWS, found)
        if not self.reads_logits:
            return Said(*runner.guess(rows, wanted, features, k, fed_back=fed_back), NO_ROWS)
        logits = runner.step(rows, wanted, features, fed_back=fed_back)
        return Said(*likeliest(logits, k), logits)

    def _waiting(self) -> tuple[list[int], Array]:
        """The true rows that wait, of which none waits any more; the last `window` of them, where
        there are more, with which the cache begins anew."""
        runner, skipped = self.runner, len(self._tokens) - (self.window or len(self._tokens))
        if skipped > 0:
            self._drop(skipped)
            runner.offset += runner.past + skipped
            runner.past = 0
        tokens, features = self._tokens[:], self._features()
        self._drop(len(tokens))
        return tokens, features

    def _read_parts(self, tokens: Sequence[int], features: Array, last: int) -> int:
        """Read rows in parts until at most `last` are left, and one at least; how many."""
        done, runner = 0, self.runner
        while (left := len(tokens) - done) > last:
            rows = min(left - 1, ROW_BUCKETS[-1]) if self.window is None else PART
            part, slots = slice(done, done + rows), range(runner.past, runner.past + rows)
            runner.read(Rows(tokens[part], slots, slots), features[part])
            runner.past += rows
            done += rows
        return done

    def _is_one_plan(self, steps: int) -> bool:
        """Whether so many steps behind a guess need nothing of the host between them."""
        runner, plain = self.runner, self.p_min == 0 and not self.reads_logits
        looped = runner.unrolls and runner.model.sliding_window is None
        return looped and plain and 1 <= steps <= LONGEST_LOOP

    def _chain(self, limit: int) -> Draft:
        numbers, past = self._numbers(limit), self.runner.past
        found = [self._guess(self._last, numbers[0])]
        if self._is_one_plan(limit - 1):
            return Draft.guessed([*found, *self._others(found[0].token, numbers[1:])])
        while found[-1].best >= self.p_min:
            if len(found) == limit or not self._wants_more(found):
                return Draft.guessed(found)
            slot, behind = [past + len(found) - 1], NEXT_ROW if len(found) > 1 else ROOT_ROW
            said = self._step(Rows([found[-1].token], slot, slot), behind, fed_back=True)
            found.append(self._guess(said, numbers[len(found)]))
        return Draft.guessed(found[:-1])

    def _numbers(self, count: int) -> Array:
        """What the next tokens of the text are drawn with f64 [count], where they are drawn."""
        place = self.runner.past + self.runner.offset
        return np.zeros(count) if self.drawing is None else self.drawing.numbers(place, count)

    def _guess(self, said: "Said", number: float) -> Guess:
        """What is guessed behind the first of the rows."""
        if self.drawing is not None:
            token, law = self.drawing.token(said.rows[0], number)
            return Guess(token, law=law)
        token = int(self.runner.model.target_ids[int(said.best[0, 0])])
        return Guess(token, float(said.chance[0, 0]))

    def _others(self, token: int, numbers: Array) -> list[Guess]:
        """As many guesses behind a token as there are numbers, of one plan."""
        if self.drawing is None:
            return [Guess(t) for t in self.runner.chain(token, len(numbers))]
        tokens, found = self.runner.drawn(token, self.drawing.config, numbers)
        return [Guess(t, law=self.drawing.law(f)) for t, f in zip(tokens, found, strict=True)]

    def _wants_more(self, found: Sequence[Guess]) -> bool:
        if self.goes_on is None or self.drawing is not None:
            return True
        return self.goes_on([g.chance for g in found if g.chance is not None])

    def _tree(self, shape: TreeShape, limit: int) -> Draft:
        runner, said, k = self.runner, self._last, shape.top_k
        at, grown = runner.past, Expansion(shape, limit, runner.model.target_ids)
        parents = grown.add(said.best, said.chance)
        if len(parents) and self._is_one_plan(shape.depth):
            tree = runner.tree(said.best, said.chance, shape.depth, shape.total_tokens - 1)
            return tree.draft(grown.count)
        base, seen = at, np.zeros((1, 0), bool)  # [B, S]: draft slots that each row may see
        behind = np.repeat(ROOT_ROW, k, axis=0)
        while len(parents):
            seen = np.concatenate([seen[parents], np.eye(k, dtype=bool)], axis=1)
            slots = range(base + seen.shape[1] - k, base + seen.shape[1])
            rows = Rows(grown.tokens, [at] * k, slots, base, seen)
            said = self._ask(rows, range(k), behind, fed_back=True)
            parents, at = grown.add(said.best, said.chance), at + 1
            behind = below(parents)
        return grown.draft()


@dataclass(frozen=True, slots=True)
class Said:
    """A head's output behind M rows: its K best draft tokens integers [M, K], the best first, and
    their chances f32 [M, K]; and the `rows` as they were brought back where the host makes what
    follows of them, logits f32 [M, W] or the greatest, CANDIDATE [M, k]."""

    best: Array
    chance: Array
    rows: Array


NO_ROWS = np.zeros((1, 0), np.float32)
NOTHING = Said(NO_ROWS.astype(np.int32), NO_ROWS, NO_ROWS)


class Expansion:
    """EAGLE-2's tree of at most `limit` nodes as it grows, whoever reads its rows: level by level,
    the best of all nodes that were scored. A node's score is the product of the chances down to it,
    in float32. `ids` i64 [W] are the target's tokens. `grown` does the same as one plan."""

    def __init__(self, shape: TreeShape, limit: int, ids: Array) -> None:
        self.branches, self._ids = shape.top_k, ids
        self.count = min(shape.total_tokens - 1, limit)
        self._left = max(0, min(shape.depth, limit - 1))  # levels to be read
        self._scored, self._level = Scored(), [ROOT]
        self._score = np.ones(1, np.float32)  # [B]

    @property
    def tokens(self) -> list[int]:
        """The nodes of the level that is to be read."""
        return [self._scored.tokens[n] for n in self._level]

    def add(self, best: Array, chance: Array) -> Array:
        """Score the best children of the last level's nodes, draft tokens [B, k] and their chances
        f32 [B, k]; the best of these are the next level. The row that each lies below; none where
        nothing is to be read."""
        k = self.branches
        total = (chance * self._score[:, None]).reshape(-1)
        parents = np.repeat(self._level, k)
        nodes = self._scored.add(self._ids[best].reshape(-1), total, parents)
        chosen = np.arange(k) if len(total) == k else top(total, k)  # all of so few, as they come
        self._score = total[chosen]
        self._level = [nodes[c] for c in chosen]
        self._left -= 1
        below: Array = chosen // k
        return below if self._left >= 0 else below[:0]

    def draft(self) -> Draft:
        """The best nodes so far."""
        return self._scored.best(min(self.count, len(self._scored.tokens)))


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
        kept = sorted(top(np.array(self.scores, np.float32), count).tolist())
        place = places(kept)
        parents = tuple(place[self.parents[n]] for n in kept)
        return Draft(tuple(self.tokens[n] for n in kept), parents)


def likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` greatest of logits [B, W], and the softmax there f32 [B, count]."""
    best = np.stack([top(row, count) for row in logits])
    greatest = np.take_along_axis(logits, best[:, :1], axis=-1)
    shares = np.exp(logits - greatest)
    chances = np.take_along_axis(shares, best, axis=-1) / shares.sum(axis=-1, keepdims=True)
    return best, chances


def top(scores: Array, count: int) -> Array:
    """Where the `count` largest of scores [W] are, largest first, as `ops.top_k` has them: of
    equals the lowest index, and what is no number as the least. Those that may be among them are
    found first, since sorting a whole vocabulary takes as long as the head itself."""
    count, negated = min(count, len(scores)), -scores
    bar = np.partition(negated, count - 1)[count - 1]
    if bar < np.inf:
        found = np.flatnonzero(negated <= bar)
    else:
        found, negated = np.arange(len(scores)), np.where(np.isnan(scores), np.inf, negated)
    return found[np.argsort(negated[found], kind="stable")[:count]]
