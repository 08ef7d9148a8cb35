"""A stateful machine for reservations: reserve, grow, replay, estimate, in any order."""

import random
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ggraph.alloc.ggml import BufferType, ListPlan, Node, NodeList, plan_list
from ggraph.alloc.search.reserve import GraphAllocator

SIZES = (0, 1, 32, 96, 100, 1000, 1 << 36)
KINDS: tuple[tuple[BufferType, ...], ...] = (
    (BufferType("cpu", 32),),
    (BufferType("small", 8, 256),),
    (BufferType("cpu", 32), BufferType("gpu", 128)),
    (BufferType("cpu", 32), BufferType("cpu", 32)),
)


def graph_of(r: random.Random, buffers: int) -> NodeList:
    """Two leafs and a few nodes; sources at random, so that lifetimes differ."""
    sizes = SIZES if r.random() < 0.2 else SIZES[:-1]
    first = [r.choice(sizes) for _ in range(2)]
    tensors = [Node(f"x{i}", "NONE", n, layout=n, is_input=True) for i, n in enumerate(first)]
    for i in range(r.randint(1, 6)):
        sources = tuple(r.randrange(len(tensors)) for _ in range(r.randint(1, 2)))
        op, size = r.choice(("MUL_MAT", "ADD")), r.choice(sizes)
        tensors.append(Node(f"n{i}", op, size, sources, layout=size, buffer=r.randrange(buffers)))
    return NodeList(tuple(tensors), tuple(range(2, len(tensors))), (0, 1))


class Reservation(RuleBasedStateMachine):
    """What was promised holds: every tensor of the last plan lies in bytes that are reserved."""

    @initialize(types=st.sampled_from(KINDS), r=st.randoms(use_true_random=False))
    def begin(self, types: tuple[BufferType, ...], r: random.Random) -> None:
        self.r, self.types = r, types
        self.allocator = GraphAllocator(types)
        self.graph: NodeList | None = None
        self.plan: ListPlan | None = None

    def draw(self) -> NodeList:
        """Half of the time the graph of before with other sizes, so that plans are replayed."""
        if self.graph is None or self.r.random() < 0.5:
            return graph_of(self.r, len(self.types))
        sizes = [self.r.choice((t.nbytes, t.nbytes, t.nbytes // 2)) for t in self.graph.tensors]
        changed = zip(self.graph.tensors, sizes, strict=True)
        tensors = tuple(replace(t, nbytes=n, layout=n) for t, n in changed)
        return NodeList(tensors, self.graph.nodes, self.graph.leafs)

    @rule()
    def reserve(self) -> None:
        graph, before = self.draw(), list(self.allocator.reserved)
        grown = self.allocator.grown
        self.plan, self.graph = self.allocator.reserve(graph), graph
        assert not self.allocator.needs_realloc(graph)
        changed = sum(a != b for a, b in zip(before, self.allocator.reserved, strict=False))
        assert self.allocator.grown >= grown + changed, "each change was counted as a growth"

    @rule()
    def allocate(self) -> None:
        graph = self.draw()
        fits = not self.allocator.needs_realloc(graph)
        before, grown = list(self.allocator.reserved), self.allocator.grown
        found = self.allocator.allocate(graph)
        if fits:
            assert self.plan is not None and found is not None
            assert self.allocator.grown == grown and self.allocator.reserved == before
            assert [s.at for s in found.spots] == [s.at for s in self.plan.spots]
        elif len(self.types) > 1:
            assert found is None and self.allocator.reserved == before, "the caller must reserve"
        else:
            self.plan, self.graph = found, graph

    @rule()
    def estimate(self) -> None:
        """Tells what a reservation would take, and takes nothing."""
        graph, before = self.draw(), list(self.allocator.reserved)
        sizes = self.allocator.estimate(graph)
        assert sizes == plan_list(graph, self.types).sizes and self.allocator.reserved == before
        fresh = GraphAllocator(self.types)
        fresh.reserve(graph)
        assert [fresh.buffer_size(k) for k in range(len(self.types))] == list(sizes)

    @invariant()
    def every_tensor_lies_in_reserved_bytes(self) -> None:
        if self.plan is None or self.graph is None:
            return
        first = {t.name: k for k, t in reversed(list(enumerate(self.types)))}
        for spot in self.plan.spots:
            if spot.buffer >= 0 and spot.size_max:
                chunks = self.allocator.reserved[first[self.types[spot.buffer].name]]
                assert spot.at.offset + spot.size_max <= chunks[spot.at.chunk]


TestReservation = Reservation.TestCase
