"""Placement -> Splits: explicit Copy nodes, and the longest runs of work per device.

A tensor that a device reads from another one's memory becomes one Copy node `NAME@DEVICE` there,
made once per device; views are taken again over the copy. Results are never copied back: what
overwrites bytes must run where the bytes lie. The nodes are then reordered, within what the graph
and its overwrites allow, so that each device's runs are as long as they can be; on one device the
graph's own order is kept.
"""

from collections.abc import Mapping
from dataclasses import replace

from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.plan import Placed, Placement, Split, Splits
from ggraph.split.copies import is_copy, with_copies
from ggraph.split.runs import longest_runs
from ggraph.tensor import line

__all__ = ["split"]


def split(placement: Placement) -> Splits:
    """The splits of a placed graph, whose graph now holds the Copy nodes.

    Raises PlaceError for a result that overwrites bytes of another device, and for graphs that have
    Copy nodes already.
    """
    _check_overwrites(placement)
    _check_copies(placement)
    graph, of = with_copies(placement)
    graph, runs = longest_runs(graph, of)
    placed = replace(placement, graph=graph, of={t.name: of[t.name] for t in graph})
    return Splits(placed, tuple(_splits(graph, of, runs)))


def _check_overwrites(placement: Placement) -> None:
    of = placement.of
    for t in placement.graph.nodes:
        old = t.overwritten
        if old is not None and of[old.root.name].device != of[t.name].device:
            raise PlaceError(
                f"{line(t)} runs on {of[t.name].device} but overwrites %{old.root.name} on "
                f"{of[old.root.name].device}: the write would be lost"
            )


def _check_copies(placement: Placement) -> None:
    for t in placement.graph.nodes:
        if is_copy(t):
            raise PlaceError(f"{line(t)}: planning makes the copies; give a pin, or use dup")


def _splits(graph: Graph, of: Mapping[str, Placed], runs: list[list[str]]) -> list[Split]:
    found: list[Split] = []
    for i, run in enumerate(runs):
        copies = tuple(n for n in run if is_copy(graph[n]))
        work = tuple(n for n in run if not is_copy(graph[n]))
        found.append(Split(i, of[work[0]].device, work, copies))
    return found
