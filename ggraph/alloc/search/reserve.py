"""Reservations that outlive one graph, as upstream keeps them (A20 to A22).

Planning is `ggraph.alloc.ggml`; this file remembers what was reserved and says when a new graph
needs more. Rule numbers are those of docs/ggml_allocator.md.
"""

from dataclasses import dataclass, field
from itertools import zip_longest

from ggraph.alloc.ggml import BufferType, ListPlan, NodeList, Spot, plan_list


@dataclass
class GraphAllocator:
    """Keeps the reservation between graphs, as upstream's object does (A20 to A22).

    `reserved` holds the chunk sizes of the buffers that would really exist, `current` the plan.
    """

    types: tuple[BufferType, ...]
    reserved: list[tuple[int, ...]] = field(default_factory=list)
    current: ListPlan | None = None
    graph: NodeList | None = None
    grown: int = 0  # how often a buffer had to be allocated anew

    def reserve(self, graph: NodeList) -> ListPlan:
        """Plan `graph` and grow every buffer of which a chunk is too small (A21)."""
        plan = plan_list(graph, self.types)
        self.reserved = self.reserved or [()] * len(self.types)
        for k, need in enumerate(plan.chunk_sizes):
            have = self.reserved[k]
            if any(n > h for n, h in zip_longest(need, have, fillvalue=0)):
                self.reserved[k] = need
                self.grown += 1
        self.current, self.graph = plan, graph
        return plan

    def estimate(self, graph: NodeList) -> tuple[int, ...]:
        """Bytes per buffer that `reserve` would ask for; nothing changes (A21)."""
        return plan_list(graph, self.types).sizes

    def buffer_size(self, index: int) -> int:
        """Reserved bytes of one buffer; 0 for a repeated type (A21)."""
        return sum(self.reserved[index]) if self.reserved else 0

    def needs_realloc(self, graph: NodeList) -> bool:
        """A22: counts and sizes are compared, topology, ops and flags are not."""
        if self.current is None or self.graph is None:
            return True
        old = self.graph
        if (len(old.nodes), len(old.leafs)) != (len(graph.nodes), len(graph.leafs)):
            return True
        for i, j in zip(graph.nodes, old.nodes, strict=True):
            if self._outgrew(graph, i, j):
                return True
            slots = zip(graph.tensors[i].sources, old.tensors[j].sources, strict=False)
            if any(self._outgrew(graph, s, o) for s, o in slots):
                return True
            if any(self._outgrew(graph, s, None) for s in _beyond(graph, old, i, j)):
                return True
        return False

    def _outgrew(self, graph: NodeList, i: int, old: int | None) -> bool:
        """Whether tensor i no longer fits the spot that its predecessor had."""
        node = graph.tensors[i]
        if node.external or node.view_of is not None:
            return False
        spot = Spot() if old is None or self.current is None else self.current.spots[old]
        return spot.buffer < 0 or node.nbytes > spot.size_max

    def allocate(self, graph: NodeList) -> ListPlan | None:
        """The plan for `graph`, reserving anew where that is allowed.

        A22: with several buffers a graph that does not fit gives None: the caller must `reserve`.
        """
        if self.current is None or self.graph is None or self.needs_realloc(graph):
            return self.reserve(graph) if len(self.types) == 1 else None
        return _replayed(graph, self.graph, self.current)


def _replayed(graph: NodeList, old: NodeList, plan: ListPlan) -> ListPlan:
    """Old offsets for the new graph, node by node, as upstream replays them."""
    spots: dict[int, Spot] = {}
    for i, j in zip((*graph.leafs, *graph.nodes), (*old.leafs, *old.nodes), strict=True):
        spots.setdefault(i, plan.spots[j])
        for s, o in zip(graph.tensors[i].sources, old.tensors[j].sources, strict=False):
            spots.setdefault(s, plan.spots[o])
    found = (spots.get(i, Spot()) for i in range(len(graph.tensors)))
    return ListPlan(tuple(found), plan.chunk_sizes)


def _beyond(graph: NodeList, old: NodeList, i: int, j: int) -> tuple[int, ...]:
    """Sources of node i in slots that node j of the old graph did not have."""
    return graph.tensors[i].sources[len(old.tensors[j].sources) :]
