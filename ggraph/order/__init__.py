"""Splits -> Schedule: what the host enqueues, on which stream, with the fewest events.

The list keeps the graph's order. Each node gets a stream (`streams`), each command its accesses
(`commands`), and what one actor needs of another becomes an event (`events`): only those that no
other ordering implies. With one stream and host-visible memory there is no event at all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ggraph.errors import PlanError
from ggraph.order.commands import commands
from ggraph.order.events import synchronised
from ggraph.order.steps import Ordering
from ggraph.order.streams import assign
from ggraph.order.timing import critical_path, estimate, speedup
from ggraph.order.values import carried, values
from ggraph.plan import Schedule, Split, Splits

__all__ = ["critical_path", "estimate", "order", "speedup"]


def order(
    splits: Splits,
    *,
    streams: int = 1,
    n_copies: int = 1,
    forced_sync: Iterable[str] = (),
    overlap: bool = False,
    on_stream: Mapping[str, int] | None = None,
) -> Schedule:
    """The schedule of one run.

    `streams` bounds the compute streams of each device; `on_stream` puts nodes, by
    name, on a stream of their device, as another engine's scheduler would. Inputs rotate over
    `n_copies` slots. `forced_sync` is upstream's flag: each named tensor begins a new split, and
    the host waits for the device after it. With `overlap` the host may enqueue run k+1 while run k
    is still computing; without it, a run ends with everything complete. Raises PlanError for
    outputs whose bytes are overwritten before the host can read them, for no stream at all or one
    that a device lacks, and for names in `on_stream` and `forced_sync` that no node has.
    """
    marked = frozenset(forced_sync)
    _check_names(splits, marked | frozenset(on_stream or ()))
    cut = _cut(splits, marked)
    lanes = assign(cut.placement, streams, on_stream or {})
    o = Ordering(cut, lanes, n_copies, overlap, marked)
    steps = commands(o)
    held = values(o.graph, cut.placement, n_copies, o.staged, o.beside.values.values())
    return Schedule(cut, held, synchronised(steps, o), carried(o.graph))


def _check_names(splits: Splits, names: frozenset[str]) -> None:
    graph = splits.placement.graph
    if unknown := names - {t.name for t in graph.nodes}:
        raise PlanError(f"graph {graph.name!r} has no node {', '.join(sorted(unknown))}")


def _cut(splits: Splits, marked: frozenset[str]) -> Splits:
    """Begin a new split at each marked tensor."""
    if not marked:
        return splits
    order_of = {t.name: i for i, t in enumerate(splits.placement.graph.nodes)}
    parts: list[Split] = []
    for s in splits.splits:
        copies = set(s.copies_in)
        members: list[list[str]] = [[]]
        for n in sorted((*s.copies_in, *s.nodes), key=order_of.__getitem__):
            if n in marked and members[-1]:
                members.append([])
            members[-1].append(n)
        for m in members:
            nodes = tuple(n for n in m if n not in copies)
            inside = tuple(n for n in m if n in copies)
            parts.append(Split(len(parts), s.device, nodes, inside))
    return replace(splits, splits=tuple(parts))
