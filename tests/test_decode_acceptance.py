"""Both acceptance rules keep the target's law: exactly, by enumeration, and by sampling."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.acceptance import draw, match, reject, residual, without
from ggraph.decode.draft import ROOT, Draft
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
    """A chain of three drawn from q against rows of p: the first token's law is the target's."""
    random = np.random.default_rng(5)
    p, q = random.dirichlet(np.ones(V), 4), random.dirichlet(np.ones(V), 3)
    counts, rounds = np.zeros(V), 60_000
    for _ in range(rounds):
        tokens = tuple(draw(q[i], random.random()) for i in range(3))
        draft = Draft(tokens, (-1, 0, 1), {-1: q[0], 0: q[1], 1: q[2]})
        kept = reject(draft, p.__getitem__, _ignore, random.random, frozenset(), 9)
        counts[kept.tokens[0]] += 1
    assert ((counts - rounds * p[0]) ** 2 / (rounds * p[0])).sum() < 4 + 3.72 * np.sqrt(8) + 10


def test_ends_and_limits_stop_the_walk() -> None:
    best = np.eye(V)[[1, 2, 3, 4, 0, 0]]
    chain = Draft.chain([1, 2, 3])
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset({2}), 9)
    assert kept.tokens == (1, 2)
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset(), 1)
    assert kept.tokens == (1,)
    kept = match(chain, best, lambda x: int(x.argmax()), _ignore, frozenset(), 9)
    assert kept.tokens == (1, 2, 3, 4) and kept.nodes == (0, 1, 2)
