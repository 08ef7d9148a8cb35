"""`offline` mode: search for a smaller arena, by annealing, then by tree search.

Annealing brings the height down quickly; then tree searches are asked for a packing at the lower
bound and at heights between it and the best (climb.py). Work is counted, not timed: equal input
gives an equal result.

Legend: m = blocks, c = cliques.
"""

import numpy as np

from ggraph.alloc.bounds import Bytes
from ggraph.alloc.fit import Ints, Packing, extent
from ggraph.alloc.search.anneal import anneal
from ggraph.alloc.search.climb import Cliques, Goal, climb

STEPS_PER_SECOND = 200_000_000  # inner steps of the nominal machine
EPOCH = 5 * STEPS_PER_SECOND  # a longer annealing goes on where a shorter one ended
SHARE = 5  # one part of so many of the first epoch is spent on annealing where cliques are known


def cliques_of(live: Bytes, life: Ints | None = None) -> Cliques:
    """Cliques from `live` [c, m] (0 or 1): which blocks are live together, along time.

    A set that its neighbour contains says nothing new and is left out; a block that is never
    live is a clique of its own. `life` [m] is the length of each life (default: its rows).
    """
    if life is None:
        life = np.maximum(live.sum(axis=0, dtype=np.int64), 1)
    never = np.flatnonzero(~live.any(axis=0))
    live = np.concatenate([live, (never[:, None] == np.arange(live.shape[1])).astype(live.dtype)])
    keep: list[int] = []
    for c in range(len(live)):
        while keep and not (live[keep[-1]] > live[c]).any():
            keep.pop()
        if not keep or (live[c] > live[keep[-1]]).any():
            keep.append(c)
    block, clique = np.nonzero(live[keep].T)
    start = np.searchsorted(block, np.arange(live.shape[1] + 1))
    return Cliques(len(keep), start.astype(np.int64), clique.astype(np.int64), life)


def search(
    p: Packing, order: Ints, at: Ints, bound: int, cliques: Cliques | None, seconds: float
) -> Ints:
    """Offsets no worse than `at` after at most `seconds` of nominal work.

    `order` is a good placement order to start from, `bound` a height that cannot be beaten;
    reaching it ends the search. With cliques a search of a whole epoch or more is never worse
    than a shorter one of that kind; without, than one that ended with an earlier epoch. Where
    the blocks need several buffers nothing is searched.
    """
    goal = Goal(at, int(extent(at, p.size, p.limit)), bound, int(seconds * STEPS_PER_SECOND))
    if goal.top > p.limit:
        return at
    if cliques is None:
        _anneal_in_epochs(p, order, goal)
    elif goal.is_open:
        _anneal(p, order, goal, min(goal.work, EPOCH) // SHARE, 0)
        climb(p, cliques, goal)
    return goal.at


def _anneal(p: Packing, order: Ints, goal: Goal, work: int, seed: int) -> None:
    """Spend `work` of the goal's on annealing from `order`."""
    height, found = anneal(p, order, goal.bound, work, seed)
    goal.work -= work
    if height < goal.top:
        goal.at, goal.top = found, height


def _anneal_in_epochs(p: Packing, order: Ints, goal: Goal) -> None:
    """Spend it all: each epoch is twice as long as the one before and begins with the best."""
    piece, seed = EPOCH, 0
    while goal.is_open:
        _anneal(p, order, goal, min(goal.work, piece), seed)
        order, piece, seed = np.argsort(goal.at, kind="stable"), 2 * piece, seed + 1
