"""Packing problems for the tests of the searches, and what makes a packing of them sound."""

from itertools import permutations

import numpy as np

from ggraph.alloc import fit, hb
from ggraph.alloc.fit import Ints, Packing
from ggraph.alloc.search import climb as climbing
from ggraph.alloc.search import offline


def intervals(seed: int, m: int = 24) -> tuple[Packing, climbing.Cliques, int]:
    """Blocks that live in random stretches of time, and their live-bytes bound."""
    r = np.random.default_rng(seed)
    first = r.integers(0, 30, m)
    last = first + r.integers(1, 12, m)
    size = r.integers(1, 40, m) * 32
    near = (first[:, None] < last) & (first < last[:, None])
    np.fill_diagonal(near, False)
    start = np.concatenate([[0], near.sum(axis=1).cumsum()])
    live = np.array([(first <= t) & (t < last) for t in range(42)]).astype(np.int8)
    p = Packing(size, start, np.nonzero(near)[1])
    return p, offline.cliques_of(live), int((live @ size).max())


def sound(p: Packing, at: Ints) -> bool:
    owner = np.repeat(np.arange(len(p)), np.diff(p.start))
    below = at[p.near] + p.size[p.near] <= at[owner]
    above = at[owner] + p.size[owner] <= at[p.near]
    return bool((below | above).all() and (at >= 0).all())


def of_all_trials(p: Packing, birth: Ints, life: Ints) -> tuple[str, Ints, Ints]:
    """The smallest of all packings that `hb` knows, the first of equal ones."""
    found = []
    for name, keys in hb.orders(p, birth, life).items():
        order = np.lexsort(keys[::-1])
        for rule in ("best", "first"):
            total, at = fit.packed(p, order, best=rule == "best")
            found.append((total, f"{name}, {rule} fit", at, order))
    return min(found, key=lambda f: f[0])[1:]


def crowded(seed: int, m: int = 6) -> tuple[Packing, np.ndarray, int, int]:
    """A few blocks in little time: problem, live table, bound, and the true optimum."""
    r = np.random.default_rng(seed)
    first = r.integers(0, 6, m)
    last = first + r.integers(1, 4, m)
    size = r.integers(1, 7, m)
    near = (first[:, None] < last) & (first < last[:, None])
    np.fill_diagonal(near, False)
    live = np.array([(first <= t) & (t < last) for t in range(9)]).astype(np.int8)
    p = Packing(size, np.concatenate([[0], near.sum(axis=1).cumsum()]), np.nonzero(near)[1])
    best = min(fit.packed(p, np.array(o))[0] for o in permutations(range(m)))
    return p, live, int((live @ size).max()), best


def stacked(p: Packing, bound: int, work: int) -> climbing.Goal:
    """A goal that begins with everything on top of one another."""
    stack = np.concatenate([[0], np.cumsum(p.size)[:-1]])
    return climbing.Goal(stack, int(p.size.sum()), bound, work)
