"""Both acceptance rules keep the target's law: exactly, by enumeration, and by sampling."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.acceptance import draw, match, reject, residual, without
from ggraph.decode.draft.tree import ROOT, Draft
from ggraph.tensor import Array

V = 5
LAWS = st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any)


def law(weights: list[int]) -> Array:
    return np.array(weights, np.float64) / sum(weights)


def emitted(p: Array, q: Array | None, children: tuple[int, ...]) -> Array:
    """The exact law of the token that one round of rejection emits, given the children."""
    out, alive = np.zeros(V), 1.0
    for token in children:
        chance = p[token] if q is None else (min(1.0, p[token] / q[token]) if q[token] else 0.0)
        out[token] += alive * chance
        alive *= 1.0 - chance
        if alive <= 0:
            return out
        p, q = residual(p, q, token), without(q, token)
    return out + alive * p


@given(LAWS, LAWS, st.integers(1, 3))
def test_rejection_keeps_the_law_for_children_drawn_without_replacement(
    target: list[int], draft: list[int], width: int
) -> None:
    p, q = law(target), law(draft)
    width = min(width, int((q > 0).sum()))
    total = np.zeros(V)
    for children in permutations(np.flatnonzero(q).tolist(), width):
        chance, left = 1.0, 1.0
        for c in children:
            chance *= q[c] / left if left > 1e-15 else 0.0
            left -= q[c]
        total += chance * emitted(p, q, children)
    assert np.abs(total - p).max() < 1e-12


@given(LAWS, st.permutations(range(V)), st.integers(0, V))
def test_rejection_keeps_the_law_for_certain_guesses(
    target: list[int], order: list[int], width: int
) -> None:
    p = law(target)
    assert np.abs(emitted(p, None, tuple(order[:width])) - p).max() < 1e-12


TREE = Draft((1, 3, 2, 0, 4), (ROOT, ROOT, 0, 0, 2))


def laws_of_rows() -> Array:
    """A different law for each of the six rows."""
    return np.random.default_rng(3).dirichlet(np.ones(V) * 0.7, len(TREE) + 1)


def expected_paths(rows: Array, limit: int) -> dict[tuple[int, ...], float]:
    """The law of the emitted tokens: walk down while the token was drafted."""
    found: dict[tuple[int, ...], float] = {}

    def walk(node: int, text: tuple[int, ...], chance: float) -> None:
        for token in range(V):
            grown, p = (*text, token), chance * rows[node + 1][token]
            below = [c for c in TREE.children(node) if TREE.tokens[c] == token]
            if below and len(grown) < limit:
                walk(below[0], grown, p)
            else:
                found[grown] = found.get(grown, 0.0) + p

    walk(ROOT, (), 1.0)
    return found


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_chi_square_over_a_tree(rule: str) -> None:
    """200,000 rounds; the statistic must stay below the 99.99 % point of its law."""
    rows, random = laws_of_rows(), np.random.default_rng(11)
    counts: Counter[tuple[int, ...]] = Counter()
    rounds = 200_000
    uniform = iter(random.random(rounds * 12)).__next__
    for _ in range(rounds):
        if rule == "match":
            kept = match(TREE, rows, lambda x: draw(x, uniform()), _ignore, frozenset(), 9)
        else:
            kept = reject(TREE, rows.__getitem__, _ignore, uniform, frozenset(), 9)
        counts[kept.tokens] += 1
    expected = expected_paths(rows, 9)
    assert set(counts) <= set(expected)
    big = {k: v * rounds for k, v in expected.items() if v * rounds >= 5}
    statistic = sum((counts[k] - e) ** 2 / e for k, e in big.items())
    degrees = len(big) - 1
    limit = degrees + 3.72 * np.sqrt(2 * degrees) + 10  # normal approximation, generous
    assert statistic < limit, (statistic, degrees)


def _ignore(token: int) -> None:
    """A sampler without memory."""


def test_chains_drawn_from_the_head_keep_the_law() -> None:
    """200,000 chains of three drawn from q: wherever a round gets to, its next token is p's."""
    random, rounds = np.random.default_rng(5), 200_000
    p, q = random.dirichlet(np.ones(V), 4), random.dirichlet(np.ones(V), 3)
    drawn = np.stack([random.choice(V, rounds, p=law) for law in q], axis=1).tolist()
    laws, uniform = {-1: q[0], 0: q[1], 1: q[2]}, iter(random.random(rounds * 8)).__next__
    counts = np.zeros((4, V))
    for tokens in drawn:
        draft = Draft(tuple(tokens), (-1, 0, 1), laws)
        kept = reject(draft, p.__getitem__, _ignore, uniform, frozenset(), 9)
        for depth, token in enumerate(kept.tokens):
            counts[depth, token] += 1
    assert counts[0].sum() == rounds
    assert counts[3].sum() > 1000
    for seen, law in zip(counts, p, strict=True):
        expected = seen.sum() * law
        assert ((seen - expected) ** 2 / expected).sum() < 4 + 3.72 * np.sqrt(8) + 10


def drawn_trees(q: Array, below: Array) -> Iterator[tuple[Draft, float]]:
    """Every tree of two children, each with two children, drawn without replacement, with its
    chance. `q` is the law of the root's children, `below[t]` that of the children of token t."""

    def pairs(law: Array) -> Iterator[tuple[tuple[int, int], float]]:
        for a, b in permutations(range(len(law)), 2):
            yield (a, b), law[a] * law[b] / (1 - law[a])

    for top, chance in pairs(q):
        for left, one in pairs(below[top[0]]):
            for right, two in pairs(below[top[1]]):
                laws = {ROOT: q, 0: below[top[0]], 1: below[top[1]]}
                draft = Draft((*top, *left, *right), (ROOT, ROOT, 0, 0, 1, 1), laws)
                yield draft, chance * one * two


def outcomes(
    draft: Draft, node: int, p: Callable[[int], Array]
) -> Iterator[tuple[int, int | None, float]]:
    """Every way in which one round at `node` ends: token, child it went down to, chance."""
    law, q, alive = p(node), draft.laws.get(node), 1.0
    for child in draft.children(node):
        token = draft.tokens[child]
        chance = law[token] if q is None else min(1.0, law[token] / q[token])
        yield token, child, alive * chance
        alive *= 1 - chance
        law, q = residual(law, q, token), without(q, token)
    for token in range(len(law)):
        yield token, None, alive * law[token]


def test_the_law_of_every_enumerated_tree_adds_up_to_the_target() -> None:
    """Summed over all trees that can be drawn: the first token has the target's law, and behind
    every accepted one the second and the third have theirs, to 1e-12."""
    random = np.random.default_rng(17)
    size = 4
    p0, q0 = random.dirichlet(np.ones(size), 2)
    p1, q1 = random.dirichlet(np.ones(size), size), random.dirichlet(np.ones(size), size)
    p2 = random.dirichlet(np.ones(size), (size, size))
    first, going_on = np.zeros(size), np.zeros(size)
    second, third = np.zeros((size, size)), np.zeros((size, size, size))
    further = np.zeros((size, size))
    total = 0.0
    for draft, weight in drawn_trees(q0, q1):
        total += weight

        def law(node: int, draft: Draft = draft) -> Array:
            path = tuple(draft.tokens[n] for n in draft.path(node))
            return [p0, p1, p2][len(path)][path]  # type: ignore[no-any-return]

        for a, child, chance in outcomes(draft, ROOT, law):
            first[a] += weight * chance
            if child is None:
                continue
            going_on[a] += weight * chance
            for b, grandchild, then in outcomes(draft, child, law):
                second[a, b] += weight * chance * then
                if grandchild is None:
                    continue
                further[a, b] += weight * chance * then
                for c, _, last in outcomes(draft, grandchild, law):
                    third[a, b, c] += weight * chance * then * last
    assert abs(total - 1) < 1e-12
    assert np.abs(first - p0).max() < 1e-12
    assert np.abs(second - going_on[:, None] * p1).max() < 1e-12
    assert np.abs(third - further[:, :, None] * p2).max() < 1e-12
    assert going_on.sum() > 0.5


def test_drawn_trees_keep_the_law() -> None:
    """200,000 rounds of stochastic rejection on trees drawn from the head's laws."""
    random, size, rounds = np.random.default_rng(23), 4, 200_000
    p0, q0 = random.dirichlet(np.ones(size), 2)
    p1, q1 = random.dirichlet(np.ones(size), size), random.dirichlet(np.ones(size), size)
    trees, weights = zip(*drawn_trees(q0, q1), strict=True)
    picks = random.choice(len(trees), rounds, p=np.array(weights) / sum(weights))
    uniform = iter(random.random(rounds * 8)).__next__
    first, second = np.zeros(size), np.zeros((size, size))
    for i in picks:
        draft = trees[i]
        laws = [p0, *(p1[t] for t in draft.tokens)]
        kept = reject(draft, laws.__getitem__, _ignore, uniform, frozenset(), 2)
        first[kept.tokens[0]] += 1
        if len(kept.tokens) > 1:
            second[kept.tokens] += 1
    pairs = [(first, p0), *zip(second, p1, strict=True)]
    assert second.sum() > rounds / 2
    for seen, law in pairs:
        expected = seen.sum() * law
        assert ((seen - expected) ** 2 / expected).sum() < 3 + 3.72 * np.sqrt(6) + 10


def test_ends_and_limits_stop_the_walk() -> None:
    best = np.eye(V)[[1, 2, 3, 4, 0, 0]]
    chain = Draft.chain([1, 2, 3])
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset({2}), 9)
    assert kept.tokens == (1, 2)
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset(), 1)
    assert kept.tokens == (1,)
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset(), 9)
    assert kept.tokens == (1, 2, 3, 4) and kept.nodes == (0, 1, 2)
