"""Drafts: a tree of guessed tokens, and the protocol of those who guess.

Index alignment, for text x0 x1 .. xn whose last token xn is not in the target's cache yet:

    node      root(xn)   0    1    2 ..       nodes are guesses; parents[i] < i, -1 is the root
    slot      n          n+1  n+2  n+3        cache row, in node order
    position  n          n + depth            all nodes of one depth share a position
    row       0          1    2    3          row of the verification step

A chain is a tree in which parents[i] = i - 1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ggraph.door import fit
from ggraph.errors import InputError
from ggraph.tensor import Array

ROOT = -1


class Guess(NamedTuple):
    """A token of a chain, with what its drafter thinks of it, or the law f64 [V] that it was drawn
    from; neither where that is not known."""

    token: int
    chance: float | None = None
    law: Array | None = None

    @property
    def best(self) -> float:
        """The chance of the likeliest token in its place; 1 where nothing is known."""
        known = 1.0 if self.chance is None else self.chance
        return known if self.law is None else float(self.law.max())


@dataclass(frozen=True)
class Draft:
    """Guessed tokens as a tree. `laws[parent]` is the law f64 [V] that the parent's children were
    drawn from, where they were drawn at random; guesses without a law count as certain. `chances`
    is what the drafter itself thinks of each token, its parent being right; empty where it does not
    say. No text depends on it."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: Mapping[int, Array] = field(default_factory=dict)
    chances: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        fit(self)
        if len(self.tokens) != len(self.parents):
            raise InputError(f"draft: {len(self.tokens)} tokens, {len(self.parents)} parents")
        if self.chances and len(self.chances) != len(self.tokens):
            raise InputError(f"draft: {len(self.tokens)} tokens, {len(self.chances)} chances")
        for i, p in enumerate(self.parents):
            if not ROOT <= p < i:
                raise InputError(f"draft: node {i} has parent {p}; expected {ROOT} to {i - 1}")

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def chain(tokens: Sequence[int], chances: Sequence[float] = ()) -> "Draft":
        """A draft without branches."""
        parents = tuple(range(-1, len(tokens) - 1))
        return Draft(tuple(tokens), parents, chances=tuple(chances))

    @staticmethod
    def guessed(found: Sequence[Guess]) -> "Draft":
        """A chain of guesses, with their laws, and their chances where all have one."""
        laws = {i - 1: g.law for i, g in enumerate(found) if g.law is not None}
        chances = [g.chance for g in found if g.chance is not None]
        parents = tuple(range(-1, len(found) - 1))
        told = tuple(chances) if len(chances) == len(found) else ()
        return Draft(tuple(g.token for g in found), parents, laws, told)

    def first(self, count: int) -> "Draft":
        """The draft's first `count` nodes; their parents are among them."""
        if count >= len(self):
            return self
        if count <= 0:
            return NOTHING
        laws = {p: law for p, law in self.laws.items() if p < count}
        return Draft(self.tokens[:count], self.parents[:count], laws, self.chances[:count])

    def pruned(self, kept: Collection[int]) -> "Draft":
        """The draft's nodes `kept`; their parents are among them."""
        nodes = sorted(kept)
        place = places(nodes)
        laws = {place[p]: law for p, law in self.laws.items() if p in place}
        chances = tuple(self.chances[n] for n in nodes) if self.chances else ()
        parents = tuple(place[self.parents[n]] for n in nodes)
        return Draft(tuple(self.tokens[n] for n in nodes), parents, laws, chances)

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has exactly the next node as its child."""
        return self.parents == tuple(range(-1, len(self) - 1))

    def depths(self) -> list[int]:
        """Distance of each node from the root; children of the root have depth 1."""
        depth: list[int] = []
        for p in self.parents:
            depth.append(1 if p == ROOT else depth[p] + 1)
        return depth

    def children(self, node: int) -> list[int]:
        """The nodes under `node`, in order."""
        return [i for i, p in enumerate(self.parents) if p == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, both included; empty for the root."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def visible(self) -> Array:
        """bool [N+1, N+1]: which rows of the verification step each row may see."""
        seen = np.eye(len(self) + 1, dtype=bool)
        seen[:, 0] = True
        for i, p in enumerate(self.parents):
            if p != ROOT:
                seen[i + 1] |= seen[p + 1]
        return seen


NOTHING = Draft()


def places(nodes: Sequence[int]) -> dict[int, int]:
    """Where each of these is in a draft that has no others, in this order; the root stays."""
    return {ROOT: ROOT, **{node: i for i, node in enumerate(nodes)}}


class Drafter(Protocol):
    """Guesses how a text goes on. Whatever it proposes, the text stays what it was without it."""

    name: str
    taps: tuple[int, ...]  # target layers whose inputs it wants to see

    def begin(self, first: int) -> None:
        """A new text starts with token `first`; forget the old one."""
        ...

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """The text went on with `tokens`.

        `features` f32 [len(tokens), A*G] holds, for each token, the taps of the position BEFORE
        it (the one whose logits chose it); None when the drafter has no taps.
        """
        ...

    def propose(self, limit: int) -> Draft:
        """A draft of at most `limit` nodes after the text; an empty one when nothing suggests
        itself. Must not change what later calls see."""
        ...
