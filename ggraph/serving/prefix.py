"""What the cache holds of earlier texts: a radix tree of tokens, each with the slot of its row.

A row of the cache depends on the tokens up to its own and on nothing else, so that it serves every
text that begins with them. An edge holds a run of tokens; a partial match splits it, so that the
longest match is found down to the token and nothing is copied. Nodes on the path of a text that is
running are `held`; of the others the leaf that was used longest ago goes first, from its end.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Optional

from ggraph.errors import InputError


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens behind those of its parent. `users` hold it or something below it; one that
    is `offered` has its entry among those that may be forgotten."""

    tokens: list[int]
    slots: list[int]
    parent: Optional["Node"]
    used: int = 0
    users: int = 0
    offered: bool = False
    children: dict[int, "Node"] = field(default_factory=dict)


class PrefixTree:
    """Texts that the cache still holds. It owns the slots that it was given until `evict`. A node
    whose end is about to go is `forgotten`."""

    def __init__(self, forgotten: Callable[[Node], object] = lambda node: None) -> None:
        self.root, self._forgotten = Node([], [], None), forgotten
        self.held_count = self.size = 0  # tokens in nodes that are held; in all
        self.version = 0  # grows whenever something is added
        self._clock = count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # a heap, of one entry a node

    @property
    def evictable(self) -> int:
        """Tokens that nobody holds."""
        return self.size - self.held_count

    def match(self, tokens: Sequence[int]) -> tuple[Node, list[int]]:
        """The longest beginning of `tokens` that is there: its node, and all its slots."""
        path = self._down(self.root, tokens)
        return path[-1], [slot for node in path for slot in node.slots]

    def insert(
        self, node: Node, tokens: Sequence[int], slots: Sequence[int]
    ) -> tuple[Node, list[int], list[int]]:
        """Add tokens with their slots below `node`: the node where they end, the slots that now
        stand for them, and those of `slots` that are spare, since the tree had these tokens."""
        if len(tokens) != len(slots):
            raise InputError(f"{len(tokens)} tokens with {len(slots)} slots")
        path = self._down(node, tokens)
        kept = [slot for passed in path[1:] for slot in passed.slots]
        node, at = path[-1], len(kept)
        spare = list(slots[:at])
        if at < len(tokens):
            new = Node(list(tokens[at:]), list(slots[at:]), node, next(self._clock))
            node.children[tokens[at]] = new
            kept += new.slots
            self.size += len(new.tokens)
            self.version += 1
            node = new
        self._offer(node)
        return node, kept, spare

    def hold(self, node: Node) -> None:
        """Keep the path down to `node`."""
        while node.parent is not None:
            self.held_count += len(node.tokens) if not node.users else 0
            node.users += 1
            node = node.parent

    def release(self, node: Node) -> None:
        """Undo one `hold`. InputError where there was none."""
        at = node
        while at.parent is not None:
            if not at.users:
                raise InputError("a prefix is released that nobody holds")
            at.users -= 1
            self.held_count -= len(at.tokens) if not at.users else 0
            at = at.parent
        self._offer(node)

    def evict(self, wanted: int) -> list[int]:
        """Forget `wanted` tokens, or as many as nobody holds: their slots."""
        freed: list[int] = []
        while self._leaves and len(freed) < wanted:
            used, _, node = heapq.heappop(self._leaves)
            node.offered = False
            if node.users or node.children:
                continue  # it is offered again when that ends
            if node.used != used:
                self._offer(node)
                continue
            self._forgotten(node)
            kept = max(0, len(node.tokens) - (wanted - len(freed)))
            freed += node.slots[kept:]
            self.size -= len(node.tokens) - kept
            first = node.tokens[0]
            del node.tokens[kept:], node.slots[kept:]
            parent = node.parent
            assert parent is not None, "the root is never offered"
            if not kept:
                del parent.children[first]
                node.parent = None
                self._offer(parent)
            else:
                self._offer(node)
        return freed

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def _down(self, node: Node, tokens: Sequence[int]) -> list[Node]:
        """A node and those below it that tokens lead through, which are used now; the last is split
        where they part."""
        path, at, now = [node], 0, next(self._clock)
        while at < len(tokens) and (child := path[-1].children.get(tokens[at])) is not None:
            same = alike(child.tokens, tokens, at)
            path.append(self._split(child, same) if same < len(child.tokens) else child)
            path[-1].used, at = now, at + same
        return path

    def _offer(self, node: Node) -> None:
        """Note a node that may be forgotten."""
        fit = node.parent is not None and not node.users and not node.children
        if fit and not node.offered:
            node.offered = True
            heapq.heappush(self._leaves, (node.used, next(self._clock), node))

    def _split(self, node: Node, at: int) -> Node:
        """The first `at` tokens of a node as a node of their own; the node keeps the rest, and
        with it those who hold it."""
        upper = Node(node.tokens[:at], node.slots[:at], node.parent, node.used, node.users)
        assert node.parent is not None, "the root has no tokens to split"
        node.parent.children[upper.tokens[0]] = upper
        del node.tokens[:at], node.slots[:at]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper


def alike(run: Sequence[int], tokens: Sequence[int], at: int = 0) -> int:
    """How many tokens from `at` on are those of `run`."""
    most = min(len(run), len(tokens) - at)
    if run[:most] == list(tokens[at : at + most]):
        return most
    return next(i for i in range(most) if run[i] != tokens[at + i])
