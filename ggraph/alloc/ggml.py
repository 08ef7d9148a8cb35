"""ggml's graph allocator on a neutral node list, offset for offset.

It exists to compare with and to reproduce upstream's plans and their races: it trusts list order
and knows no streams. `ggraph.alloc.listing` turns schedules into node lists. Rules A9 to A20 and
A23 are those of docs/ggml_allocator.md; the byte level (A1 to A8) is `ggraph.alloc.dyn`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ggraph.alloc.dyn import Address, DynAllocator, align_up
from ggraph.errors import AllocError

# A15: ops whose kernels promise to tolerate dst = src.
_INPLACE = (
    "FILL SCALE DIAG_MASK_ZERO DIAG_MASK_INF ADD ADD_ID ADD1 SUB MUL DIV SQR SQRT LOG UNARY ROPE "
    "ROPE_BACK SILU_BACK RMS_NORM RMS_NORM_BACK CLAMP SOFT_MAX SOFT_MAX_BACK"
)
INPLACE_OPS = frozenset(_INPLACE.split())


@dataclass(frozen=True)
class Node:
    """One ggml tensor as the allocator sees it.

    `nbytes` is the buffer type's allocation size (padding included), `sources` index the same
    list (a tensor once per slot), `view_of` is the root that owns a view's bytes, `layout` stands
    for type, extents and strides: equal layouts compare equal. `external` tensors have data.
    """

    name: str
    op: str
    nbytes: int
    sources: tuple[int, ...] = ()
    view_of: int | None = None
    layout: Hashable = None
    is_input: bool = False
    is_output: bool = False
    external: bool = False
    buffer: int = 0


@dataclass(frozen=True)
class NodeList:
    """`tensors`, and which of them are graph nodes (in execution order) and which leafs."""

    tensors: tuple[Node, ...]
    nodes: tuple[int, ...]
    leafs: tuple[int, ...]


NOWHERE = Address(0, 0)


@dataclass(frozen=True)
class Spot:
    """The answer for one tensor (A20): buffer -1 for views and external tensors."""

    buffer: int = -1
    at: Address = NOWHERE
    in_place_of: int | None = None


@dataclass
class _State:
    """Per tensor (A9). `own` = a block of this planner belongs to it now."""

    children: int = 0
    views: int = 0
    own: bool = False
    buffer: int = -1
    at: Address = NOWHERE
    in_place_of: int | None = None


class _Planner:
    """One run over a node list (A10 to A19)."""

    def __init__(self, graph: NodeList, buffers: Sequence[DynAllocator]) -> None:
        self.graph, self.dyn = graph, buffers
        self.state = [_State() for _ in graph.tensors]

    def run(self) -> None:
        """A10: leafs; then count and place inputs; then place and release node by node."""
        tensors = self.graph.tensors
        for i in self.graph.leafs:
            self._place(i, tensors[i].buffer)
        for i in self.graph.nodes:
            self._count(i)
        for i in self.graph.nodes:
            node = tensors[i]
            for s in node.sources:
                self._place(s, node.buffer)
            self._place(i, node.buffer)
            for s in node.sources:
                self._release(s)

    def _count(self, i: int) -> None:
        node = self.graph.tensors[i]
        # A23: a view whose op is NONE only stretches a lifetime, it does not count as a view.
        if node.view_of is not None and node.op != "NONE":
            self.state[node.view_of].views += 1
        if node.is_input:
            self._place(i, node.buffer)
        for s in node.sources:
            self.state[s].children += 1  # once per slot
            if self.graph.tensors[s].is_input:
                self._place(s, node.buffer)

    def _place(self, i: int, buffer: int) -> None:
        node, state = self.graph.tensors[i], self.state[i]
        if node.external or state.own or node.view_of is not None:  # A11
            return
        state.own = True
        if node.op in INPLACE_OPS and self._put_in_place(i):
            return
        state.buffer = buffer
        state.at = self.dyn[buffer].alloc(node.nbytes, node.name)

    def _put_in_place(self, i: int) -> bool:
        """A16: over the first source, in slot order, that this node is the only user of."""
        node, state = self.graph.tensors[i], self.state[i]
        for s in node.sources:
            parent, old = self.graph.tensors[s], self.state[s]
            # A17: a view never owns bytes, so a view parent is refused here.
            if not old.own or parent.is_output or parent.layout != node.layout:
                continue
            if old.children == 1 and old.views == 0:
                # A19: the parent's buffer is kept even where the node asked for another.
                state.buffer, state.at, state.in_place_of = old.buffer, old.at, s
                old.own = False
                self._free_tail(parent, node, state)
                return True
        return False

    def _free_tail(self, parent: Node, node: Node, state: _State) -> None:
        """A18: what the parent had beyond the child's aligned size is free at once."""
        dyn = self.dyn[state.buffer]
        kept, had = (align_up(n.nbytes, dyn.alignment) for n in (node, parent))
        if kept > had:
            raise AllocError(
                f"%{node.name} ({kept} bytes) cannot be in place of %{parent.name} ({had} bytes)"
            )
        if kept < had:
            tail = Address(state.at.chunk, state.at.offset + kept)
            dyn.free(tail, had - kept, parent.name)

    def _release(self, s: int) -> None:
        """A12: after a use of tensor s."""
        state, root = self.state[s], self.graph.tensors[s].view_of
        state.children -= 1
        if state.children or state.views:
            return
        if root is None:
            self._free(s)
            return
        self.state[root].views -= 1
        if not self.state[root].views and not self.state[root].children:
            self._free(root)

    def _free(self, i: int) -> None:
        node, state = self.graph.tensors[i], self.state[i]
        if state.own and not node.is_output:  # A13
            self.dyn[state.buffer].free(state.at, node.nbytes, node.name)
            state.own = False

    def spot(self, i: int) -> Spot:
        """Where tensor i lies (A20)."""
        node, state = self.graph.tensors[i], self.state[i]
        if node.external or node.view_of is not None:
            return Spot()
        return Spot(state.buffer, state.at, state.in_place_of)


def plan_list(graph: NodeList, buffers: Sequence[DynAllocator]) -> tuple[Spot, ...]:
    """A spot for each tensor of one node list in `buffers`, which are empty before.

    Raises AllocError for a tensor that names no such buffer, or a size out of range.
    """
    for node in graph.tensors:
        if not 0 <= node.buffer < len(buffers):
            raise AllocError(f"%{node.name}: buffer {node.buffer} of {len(buffers)}")
    planner = _Planner(graph, buffers)
    planner.run()
    return tuple(planner.spot(i) for i in range(len(graph.tensors)))
