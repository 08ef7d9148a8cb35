"""`offline` mode: search for a smaller arena, by annealing and by canonical tree search. Floor 6.

Annealing brings the height down quickly; then the tree search is asked again and again for a
packing at the lower bound, and at heights between it and the best, each time for a little work
and with the blocks that caused dead ends moved to the front. Work is counted, not timed: equal
input and seed give an equal result.

Legend: m = blocks, c = cliques.
"""

from dataclasses import dataclass

import numpy as np

from ggraph.alloc.anneal import anneal
from ggraph.alloc.bounds import Bytes
from ggraph.alloc.canon import Floats, Room, begun, solve
from ggraph.alloc.fit import Ints, Packing, extent

STEPS_PER_SECOND = 200_000_000  # inner steps of the nominal machine
EPOCH = 5 * STEPS_PER_SECOND  # a longer search goes on where a shorter one ended
LONG, SHORT = 10_000_000, 4_000_000  # steps of the first tree searches of either kind
SHARE = 2  # one search of so many is a long one
CYCLE = 12  # long searches until every key has met every aim; then they get twice the steps
AIMS = (0.0, 0.3, 0.6, 0.9)  # where between bound and best the next search aims


@dataclass(frozen=True, eq=False)
class Cliques:
    """Sets of pairwise conflicting blocks along time: block b is in member[start[b]:start[b+1]]."""

    count: int
    start: Ints  # [m + 1]
    member: Ints


def cliques_of(live: Bytes) -> Cliques:
    """Cliques from `live` [c, m] (0 or 1): which blocks are live together, along time.

    A set that its neighbour contains says nothing new and is left out; a block that is never
    live is a clique of its own.
    """
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
    return Cliques(len(keep), start.astype(np.int64), clique.astype(np.int64))


def room_of(p: Packing, cliques: Cliques) -> Room:
    """The tree search's view of `p`, with stretches that overlap wherever two blocks conflict."""
    m = len(p)
    first = cliques.member[cliques.start[:-1]]
    last = cliques.member[cliques.start[1:] - 1] + 1
    begin, end = first.copy(), last.copy()
    owner = np.repeat(np.arange(m), np.diff(p.start))
    np.maximum.at(end, owner, first[p.near] + 1)  # reach every conflicting block's first clique
    every = np.arange(m, dtype=np.int64)
    return Room(p.size, p.start, p.near, begin, end, cliques.start, cliques.member, every)


def _keys(p: Packing, room: Room, total: Ints) -> list[Floats]:
    """Three static orders [m] in 0..1, smaller first: by contention, width and area."""
    width = np.diff(room.member_start)
    area = width * p.size
    load = np.array([total[room.begin[b] : room.end[b]].max() for b in range(len(p))])
    found = []
    for by in ((load, width, area), (load, area, width), (width, area, load)):
        rank = np.empty(len(p))
        rank[np.lexsort([-k for k in reversed(by)])] = np.arange(len(p)) / len(p)
        found.append(rank)
    return found


class _Tree:
    """Repeated tree searches over one packing."""

    def __init__(self, p: Packing, cliques: Cliques, seed: int) -> None:
        self.p, self.room = p, room_of(p, cliques)
        self.rng = np.random.default_rng(seed)
        owner = np.repeat(np.arange(len(p)), np.diff(cliques.start))
        self.total = np.zeros(cliques.count, dtype=np.int64)
        np.add.at(self.total, cliques.member, p.size[owner])
        self.keys = _keys(p, self.room, self.total)
        self.blame = np.zeros(len(p))
        self.round = 0

    def next(self, bound: int, top: int) -> tuple[Ints, int, int]:
        """The next order to try, the height to ask for, and the steps that it is worth.

        Long searches follow a static key, short ones a key corrected by blame and by chance.
        """
        longs, others = -(-self.round // SHARE), self.round - self.round // SHARE - 1
        is_long = self.round % SHARE == 0
        k = longs if is_long else others
        score = self.keys[k % len(self.keys)]
        aim = AIMS[k // len(self.keys) % len(AIMS) if is_long else k % len(AIMS)]
        if not is_long:
            score = score - 0.5 * self.blame / max(self.blame.max(), 1e-9)
            score = score + (0.1 * self.rng.random(len(self.p)) if k >= len(self.keys) else 0.0)
        steps = LONG << k // CYCLE if is_long else SHORT * (1 + k // 16)
        height = min(bound + int(aim * (top - bound)), top - 1)
        return np.argsort(score, kind="stable").astype(np.int64), height, steps

    def attempt(self, order: Ints, height: int, work: int) -> tuple[Ints | None, int]:
        """Offsets below `height` if a search of `work` steps finds them, and the steps used."""
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        room = self.room._replace(rank=rank)
        state = begun(room, self.total, work)
        done = solve(room, state, order, 0, len(self.total), 0, -1, height)
        self.blame = 0.9 * self.blame + state.blame / max(state.blame.max(), 1.0)
        self.round += 1
        return (state.at if done else None), work - int(state.work[0])


def search(
    p: Packing,
    order: Ints,
    at: Ints,
    bound: int,
    cliques: Cliques | None,
    seconds: float,
    seed: int,
) -> Ints:
    """Offsets no worse than `at` after at most `seconds` of nominal work.

    `order` is a good placement order to start from, `bound` a height that cannot be beaten;
    reaching it ends the search. Each epoch is twice as long as the one before and begins with the
    best so far, so a search is never worse than one that ended with an earlier epoch. Where the
    blocks need several buffers nothing is searched.
    """
    best, top = at, int(extent(at, p.size, p.limit))
    if top > p.limit:
        return best
    work, piece = int(seconds * STEPS_PER_SECOND), EPOCH
    tree = _Tree(p, cliques, seed) if cliques is not None and top > bound else None
    while top > bound and work > 0:
        now = min(work, piece)
        height, found = anneal(p, order, bound, now if tree is None else now // 5, seed)
        if height < top:
            best, top = found, height
        if tree is not None:
            best, top = _climb(tree, best, top, bound, now - now // 5)
        work, piece, seed = work - now, 2 * piece, seed + 1
        order = np.argsort(best, kind="stable")
    return best


def _climb(tree: _Tree, best: Ints, top: int, bound: int, work: int) -> tuple[Ints, int]:
    """Ask the tree search for lower and lower heights until the work is spent."""
    while top > bound and work > 0:
        order, height, steps = tree.next(bound, top)
        found, used = tree.attempt(order, height, min(work, steps))
        work -= max(used, 1)
        if found is not None:
            best, top = found, int((found + tree.p.size).max())
    return best, top
