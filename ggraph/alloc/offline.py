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
from ggraph.alloc.canon import KEYS, Floats, Room, State, solve
from ggraph.alloc.fit import Ints, Packing, extent

STEPS_PER_SECOND = 200_000_000  # inner steps of the nominal machine
FIRST_SLICE = 2_000_000  # steps of the first tree searches; later ones get more
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
    return Room(p.size, p.start, p.near, begin, end, cliques.start, cliques.member, every, every)


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

    def order(self) -> Ints:
        """The next order to try: a static key, corrected by blame, then also by chance."""
        base = self.keys[self.round % len(self.keys)]
        score = base - 0.5 * self.blame / max(self.blame.max(), 1e-9)
        if self.round >= len(self.keys):
            score = score + 0.1 * self.rng.random(len(self.p))
        return np.argsort(score, kind="stable").astype(np.int64)

    def attempt(self, height: int, work: int) -> tuple[Ints | None, int]:
        """Offsets below `height` if a search of `work` steps finds them, and the steps used."""
        order = self.order()
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        blank = np.full(len(self.p), -1, dtype=np.int64)
        left = np.array([work], dtype=np.int64)
        state = State(blank, blank * 0, self.total.copy(), np.zeros(len(self.p)), left)
        room = self.room._replace(order=order, rank=rank)
        done = solve(room, state, 0, len(self.total), 0, -1, height)
        self.blame = 0.9 * self.blame + state.blame / max(state.blame.max(), 1.0)
        self.round += 1
        return (state.at if done else None), work - int(left[0])


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
    reaching it ends the search. Where the blocks need several buffers nothing is searched.
    """
    best, top = at, int(extent(at, p.size, p.limit))
    if top <= bound or top > p.limit:
        return best
    work = int(seconds * STEPS_PER_SECOND)
    share = work if cliques is None else work // 5
    height, found = anneal(p, order, bound, share, seed)
    if height < top:
        best, top = found, height
    if cliques is None or len(p) >= KEYS:
        return best
    return _climb(_Tree(p, cliques, seed), best, top, bound, work - share)


def _climb(tree: _Tree, best: Ints, top: int, bound: int, work: int) -> Ints:
    """Ask the tree search for lower and lower heights until the work is spent."""
    while top > bound and work > 0:
        aim = AIMS[tree.round % len(AIMS)]
        height = min(bound + int(aim * (top - bound)), top - 1)
        piece = min(work, FIRST_SLICE * (1 + tree.round // 16))
        found, used = tree.attempt(height, piece)
        work -= max(used, 1)
        if found is not None:
            best, top = found, int((found + tree.p.size).max())
    return best
