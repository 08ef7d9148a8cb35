"""Lower bounds: bytes that no plan of a given order can do without.

On one queue lifetimes are intervals and the bound is the largest number of bytes live at once. In
a partial order it is the heaviest set of blocks of which no two are ordered, a maximum-weight
antichain; by Dilworth's theorem for weights that is a minimum flow, computed here where the number
of blocks allows, and bounded from below by what is live at each command otherwise.

In-place choices are taken as given: blocks, not values, are counted.
Legend: m = blocks asked about, n = commands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.alloc.arena_blocks import Blocks
from ggraph.alloc.precedence import Ints
from ggraph.lazy import lazy

if TYPE_CHECKING:
    import networkx as nx
else:
    nx = lazy("networkx")

Bytes = np.ndarray[Any, np.dtype[np.int8]]
MAX_TABLE = 1 << 25  # cells
EXACT_BLOCKS = 160  # beyond this the flow takes seconds


@dataclass(frozen=True)
class Bound:
    """At least `nbytes` are needed; `method` says how that is known."""

    nbytes: int
    method: str  # "live bytes" or "antichain"


def live_windows(blocks: Blocks, of: Sequence[int]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """For each actor its commands, and [m] from and up to which of them blocks hold their bytes.

    A block is live at command c when some access of it is c or precedes c and some access is c or
    follows c: on each actor that is a stretch of commands. Two blocks live at one command are never
    ordered, so they may not share bytes.
    """
    order, s = blocks.order, blocks.spans.of(np.asarray(of, dtype=np.int64))
    pinned = np.array([blocks.blocks[i].pinned for i in of], dtype=bool)
    for actor, rows in enumerate(order.rows_of):
        learns = order.count_before(actor, s.first).min(axis=1)
        begin = np.minimum(learns, np.searchsorted(rows, s.first[:, actor] - 1))
        end = np.searchsorted(rows, np.maximum(s.reach, s.last)[:, actor])
        begin[pinned], end[pinned] = 0, len(rows)
        yield rows, begin, np.maximum(begin, end)


def live_bytes(blocks: Blocks, of: Sequence[int]) -> int:
    """Largest number of bytes live at one command; pinned blocks are live even without any."""
    size = np.array([blocks.blocks[i].nbytes for i in of], dtype=np.int64)
    most = sum(blocks.blocks[i].nbytes for i in of if blocks.blocks[i].pinned)
    for rows, begin, end in live_windows(blocks, of):
        change = np.zeros(len(rows) + 1, dtype=np.int64)
        np.add.at(change, begin, size)
        np.subtract.at(change, end, size)
        most = max(most, int(np.cumsum(change).max()))
    return most


def live_table(blocks: Blocks, of: Sequence[int]) -> Bytes | None:
    """[n, m] 0 or 1: which blocks are live at which command; None where the table is too large."""
    if blocks.order.n * len(of) > MAX_TABLE:
        return None
    table = np.zeros((blocks.order.n, len(of)), dtype=np.int8)
    for rows, begin, end in live_windows(blocks, of):
        place = np.arange(len(rows))[:, None]
        table[rows] = (begin <= place) & (place < end)
    return table


def antichain_bytes(blocks: Blocks, of: Sequence[int]) -> int:
    """Weight of the heaviest set of pairwise unordered blocks (pinned ones always count).

    Weights minus the largest flow through the order's pairs, each block passing on at most its own
    size and receiving as much.
    """
    pinned = sum(blocks.blocks[i].nbytes for i in of if blocks.blocks[i].pinned)
    free = [i for i in of if not blocks.blocks[i].pinned and blocks.blocks[i].rows]
    s = blocks.spans
    g: nx.DiGraph[object] = nx.DiGraph()
    g.add_nodes_from(("source", "sink"))
    for i in free:
        g.add_edge("source", ("out", i), capacity=blocks.blocks[i].nbytes)
        g.add_edge(("in", i), "sink", capacity=blocks.blocks[i].nbytes)
        for j in free:
            if i != j and (s.last[i] <= s.meet[j]).all():
                g.add_edge(("out", i), ("in", j))
    total = sum(blocks.blocks[i].nbytes for i in free)
    return int(pinned + total - nx.maximum_flow_value(g, "source", "sink"))


def lower_bound(blocks: Blocks, of: Sequence[int]) -> Bound:
    """The best bound that is affordable for the chosen blocks (all on one device)."""
    live = live_bytes(blocks, of)
    actors = {blocks.order.actor_of[r] for i in of for r in blocks.blocks[i].rows}
    if len(actors) < 2 or len(of) > EXACT_BLOCKS:
        return Bound(live, "live bytes")
    return Bound(max(live, antichain_bytes(blocks, of)), "antichain")
