"""Local search over the order of ties, judged by short tree searches: half of `offline`.

Whether the tree search (canon.py) finds a packing at once or never depends on which of two blocks
that could lie on the same level is tried first. So short searches are made with orders that differ
a little: positions of blocks that were part of dead ends are changed, and what got at least as
far as the order before is kept. A climb that no longer gets further begins anew, from another key.
Climbs aim at the lower bound and at heights between it and the best, in turn.

Legend: m = blocks, c = cliques, score [m] = place in the order, in 0..1 (a smaller one goes first).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ggraph.alloc.fit import Ints, Packing
from ggraph.alloc.search.canon import Floats, Room, begun, solve

NODES = 1000  # of one short search; as many as there are blocks where those are more
FIRST = 20  # times as many for a climb's first search
PATIENCE = 16  # short searches without progress before a climb ends
AIMS = (0.0, 0.3, 0.6, 0.9)  # where between bound and best a climb aims
KEYS = ("load life area", "load area life", "life load area", "load width bulk",
        "load bulk width", "life area load", "bulk load width")  # fmt: skip
LAP = len(AIMS) * len(KEYS)  # climbs until every key has met every aim
NOISE, LEVELS = 0.1, 20  # of the keys after the first lap; a load is then one of so many levels
MOVES = 4  # positions that change at once, at most


@dataclass(frozen=True, eq=False)
class Cliques:
    """Sets of pairwise conflicting blocks along time: block b is in member[start[b]:start[b+1]]."""

    count: int
    start: Ints  # [m + 1]
    member: Ints
    life: Ints  # [m], length of each life, in any unit


@dataclass
class Goal:
    """What a search has found, and what it may still spend."""

    at: Ints  # [m], the best packing
    top: int  # its height
    bound: int  # a height that cannot be beaten
    work: int  # inner steps that are left

    @property
    def is_open(self) -> bool:
        """Whether there is something to win and something to spend."""
        return self.top > self.bound and self.work > 0


class Trial(NamedTuple):
    """One short search: offsets [m] if it succeeded, how far it got, and where it failed."""

    at: Ints | None
    used: int
    placed: int
    blame: Floats  # [m]


def room_of(p: Packing, cliques: Cliques) -> Room:
    """The tree search's view of `p`, with stretches that overlap wherever two blocks conflict."""
    m = len(p)
    first = cliques.member[cliques.start[:-1]]
    last = cliques.member[cliques.start[1:] - 1] + 1
    begin, end = first.copy(), last.copy()
    owner = np.repeat(np.arange(m), np.diff(p.start))
    np.maximum.at(end, owner, first[p.near] + 1)  # reach every conflicting block's first clique
    every, weight = np.arange(m, dtype=np.int64), p.size * np.diff(cliques.start)
    start, member = cliques.start, cliques.member
    return Room(p.size, p.start, p.near, begin, end, start, member, every, weight)


class Tree:
    """Tree searches over one packing, in orders to be given."""

    def __init__(self, p: Packing, cliques: Cliques) -> None:
        self.p, self.room = p, room_of(p, cliques)
        owner = np.repeat(np.arange(len(p)), np.diff(cliques.start))
        self.total = np.zeros(cliques.count, dtype=np.int64)
        np.add.at(self.total, cliques.member, p.size[owner])
        ends = zip(self.room.begin, self.room.end, strict=True)
        load = np.array([self.total[begin:end].max() for begin, end in ends], dtype=np.float64)
        life, width = cliques.life.astype(np.float64), np.diff(cliques.start).astype(np.float64)
        area, bulk = life * p.size, width * p.size
        self.traits = {"load": load, "life": life, "area": area, "width": width, "bulk": bulk}

    def key(self, climb: int, rng: "np.random.Generator") -> Floats:
        """The score with which a climb begins: largest first by three traits, later with noise."""
        columns = [self.traits[name].copy() for name in KEYS[climb % len(KEYS)].split()]
        if climb >= LAP:
            for column in columns:
                column *= np.exp(NOISE * rng.standard_normal(len(column)))
            columns[0] = np.floor(LEVELS * columns[0] / columns[0].max())
        score = np.empty(len(self.p))
        score[np.lexsort([-c for c in reversed(columns)])] = np.linspace(0.0, 1.0, len(self.p))
        return score

    def shaken(self, score: Floats, blame: Floats, rng: "np.random.Generator") -> Floats:
        """A score in which a few blocks at or beside dead ends have other places."""
        p, new = self.p, score.copy()
        chance = np.cumsum(blame + 1e-3)
        for _ in range(1 + rng.integers(MOVES)):
            b = int(np.searchsorted(chance, rng.random() * chance[-1]))
            near = p.near[p.start[b] : p.start[b + 1]]
            if len(near) and rng.integers(3) == 0:
                b = int(rng.choice(near))
                near = p.near[p.start[b] : p.start[b + 1]]
            if len(near) and rng.integers(2):
                other = int(rng.choice(near))
                new[b], new[other] = new[other], new[b]
            else:
                new[b] = rng.random()
        return new

    def attempt(self, score: Sequence[float] | Floats, height: int, work: int, nodes: int) -> Trial:
        """One search below `height`, of at most `work` inner steps and `nodes` nodes."""
        order = np.argsort(score, kind="stable").astype(np.int64)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        state = begun(self.room._replace(rank=rank), self.total, work, nodes)
        room = self.room._replace(rank=rank)
        done = solve(room, state, order, 0, len(self.total), 0, -1, height)
        used, placed = work - int(state.work[0]), int(state.placed[1])
        return Trial(state.at if done else None, used, placed, state.blame)


def climb_once(tree: Tree, goal: Goal, climb: int, rng: "np.random.Generator") -> None:
    """One climb: until `goal` is reached, its work is spent, or nothing gets further."""
    patience, nodes = PATIENCE << climb // LAP, max(NODES, len(tree.p))
    aim, idle, factor = AIMS[climb % len(AIMS)], 0, FIRST
    score, now = tree.key(climb, rng), Trial(None, 0, -1, np.zeros(len(tree.p)))
    trial = score
    while goal.is_open and idle <= patience:
        height = min(goal.bound + int(aim * (goal.top - goal.bound)), goal.top - 1)
        got = tree.attempt(trial, height, goal.work, factor * nodes)
        factor = 1
        goal.work -= max(got.used, 1)
        idle = 0 if got.placed > now.placed else idle + 1
        if got.placed >= now.placed:
            score, now = trial, got
        if got.at is not None:  # the next aim is lower: begin from what was good for this one
            goal.at, goal.top = got.at, int((got.at + tree.p.size).max())
            idle, now = 0, now._replace(placed=-1)
        trial = tree.shaken(score, now.blame, rng)


def climb(p: Packing, cliques: Cliques, goal: Goal) -> None:
    """Lower `goal` until its bound is reached or its work is spent.

    What comes does not depend on how much work is left: more of it is never worse.
    """
    tree, rng, climbs = Tree(p, cliques), np.random.default_rng(0), 0
    while goal.is_open:
        climb_once(tree, goal, climbs, rng)
        climbs += 1
