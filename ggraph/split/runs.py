"""The longest runs of work per device, within what the graph allows."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggraph.graph import Graph
from ggraph.plan import Placed
from ggraph.split.copies import is_copy
from ggraph.tensor import Tensor


def _before_copy(root: Tensor) -> Tensor:
    """The value itself: a copied one through its copy."""
    return root.roots[0] if is_copy(root) else root


def _predecessors(graph: Graph) -> dict[str, set[str]]:
    """For each node, the nodes that must come before it: producers, and readers of old bytes.

    Copies are left out: they are issued when a reader wants them, so that many offloaded weights
    do not lie in a device's memory at once.
    """
    readers: dict[str, set[str]] = {}
    before: dict[str, set[str]] = {}
    for t in _workers(graph):
        read = map(_before_copy, t.roots)
        before[t.name] = {v.name for v in read if v.spec is not None}
        for root in t.roots:
            readers.setdefault(root.name, set()).add(t.name)
    for t in _workers(graph):
        if (old := t.overwritten) is not None:
            before[t.name] |= readers[old.root.name] - {t.name}
    return before


def _workers(graph: Graph) -> list[Tensor]:
    return [t for t in graph.nodes if not is_copy(t)]


@dataclass(eq=False)
class _Ready:
    """Nodes whose predecessors are done, per device, as heaps of positions in the graph's order."""

    names: Sequence[str]
    device: Mapping[str, str]
    missing: dict[str, int]
    users: dict[str, list[str]]
    heaps: dict[str, list[int]]

    @staticmethod
    def of(graph: Graph, placed: Mapping[str, Placed]) -> "_Ready":
        before = _predecessors(graph)
        names = [t.name for t in _workers(graph)]
        users: dict[str, list[str]] = {n: [] for n in names}
        for n in names:
            for b in before[n]:
                users[b].append(n)
        device = {n: placed[n].device for n in names}
        heaps: dict[str, list[int]] = {d: [] for d in device.values()}
        for i, n in enumerate(names):
            if not before[n]:
                heaps[device[n]].append(i)
        return _Ready(names, device, {n: len(before[n]) for n in names}, users, heaps)

    def copied(self) -> "_Ready":
        heaps = {d: list(h) for d, h in self.heaps.items()}
        return replace(self, missing=dict(self.missing), heaps=heaps)

    def run(self, device: str, position: Mapping[str, int]) -> list[str]:
        """Take everything that `device` can do by itself, earliest first."""
        taken: list[str] = []
        heap = self.heaps[device]
        while heap:
            name = self.names[heapq.heappop(heap)]
            taken.append(name)
            for u in self.users[name]:
                self.missing[u] -= 1
                if not self.missing[u]:
                    heapq.heappush(self.heaps[self.device[u]], position[u])
        return taken


def longest_runs(graph: Graph, of: Mapping[str, Placed]) -> tuple[Graph, list[list[str]]]:
    """The graph in the order of its runs, and the runs. The first device is chosen so that there
    are fewest runs; after it, always the one with the longest next run."""
    begin = _Ready.of(graph, of)
    position = {n: i for i, n in enumerate(begin.names)}
    starts = [d for d, h in begin.heaps.items() if h]
    tries = [_runs(begin.copied(), d, position) for d in starts]
    best = min(tries, key=len, default=[])
    runs = _issue_copies(graph, best)
    return _reordered(graph, [n for r in runs for n in r]), runs


def _runs(ready: _Ready, device: str, position: Mapping[str, int]) -> list[list[str]]:
    runs = [ready.run(device, position)]
    while open_ := [d for d, h in ready.heaps.items() if h]:
        if len(open_) > 1:
            open_.sort(key=lambda d: -len(ready.copied().run(d, position)))
        runs.append(ready.run(open_[0], position))
    return runs


def _issue_copies(graph: Graph, runs: list[list[str]]) -> list[list[str]]:
    """Put each copy before its first reader, and before what overwrites the copied bytes."""
    copies: dict[str, list[str]] = {}
    for t in graph.nodes:
        if is_copy(t):
            copies.setdefault(t.sources[0].root.name, []).append(t.name)
    made = {n for names in copies.values() for n in names}
    issued: set[str] = set()
    found: list[list[str]] = []
    for run in runs:
        found.append([])
        for n in run:
            t = graph[n]
            due = [root.name for root in t.roots if root.name in made]
            old = t.overwritten
            due += copies.get(old.root.name, []) if old is not None else []
            found[-1] += [c for c in dict.fromkeys(due) if c not in issued]
            issued.update(due)
            found[-1].append(n)
    return found


def _reordered(graph: Graph, names: Sequence[str]) -> Graph:
    """The same graph with its nodes in the order of `names`; leaves and views as late as needed."""
    if [t.name for t in graph.nodes] == list(names):
        return graph
    done: dict[str, Tensor] = {}

    def put(t: Tensor) -> None:
        stack = [t]
        while stack:
            missing = [s for s in stack[-1].sources if s.name not in done]
            if missing:
                stack += missing
            else:
                top = stack.pop()
                done[top.name] = top

    for name in names:
        put(graph[name])
    for t in graph:
        put(t)
    return replace(graph, tensors=tuple(done.values()))
