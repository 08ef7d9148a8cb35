"""Placement -> Splits: explicit Copy nodes, and the longest runs of work per device. Floor 6.

A tensor that a device reads from another one's memory becomes one Copy node `NAME@DEVICE` there,
made once per device; views are taken again over the copy. Results are never copied back: what
overwrites bytes must run where the bytes lie. The nodes are then reordered, within what the graph
and its overwrites allow, so that each device's runs are as long as they can be; on one device the
graph's own order is kept.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.plan import Placed, Placement, Split, Splits
from ggraph.tensor import Tensor, apply, line

COPY = "copy"  # name of the op that moves a tensor to attrs["device"]


def split(placement: Placement, *, cut_before: Iterable[str] = ()) -> Splits:
    """The splits of a placed graph, whose graph now holds the Copy nodes.

    `cut_before` names tensors at which a new split begins although the device stays. Raises
    PlaceError for a result that overwrites bytes of another device.
    """
    _check_overwrites(placement)
    graph, of = _with_copies(placement)
    graph, runs = _longest_runs(graph, of, frozenset(cut_before))
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


@dataclass(eq=False)
class _Copies:
    """The new tensors of each device's readers. `made` maps (old name, device) to the stand-in."""

    of: dict[str, Placed]
    wanted: frozenset[tuple[str, str]]  # (name, device) of everything read from afar
    new: dict[str, Tensor] = field(default_factory=dict)
    made: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def source(self, s: Tensor, device: str) -> Tensor:
        """What a reader on `device` takes in place of the old tensor `s`."""
        if self.of[s.root.name].device == device:
            return self.new[s.name]
        key = (s.name, device)
        if key not in self.made:
            self.made[key] = (
                self._again(s, device) if self._rebuilt(s, device) else self._copy(s, device)
            )
        return self.made[key]

    def _rebuilt(self, s: Tensor, device: str) -> bool:
        """Whether `s` is a view to be taken over a copy of what it looks at."""
        chain = _chain(s)
        return s.is_view and (
            not s.is_contiguous or any((v.name, device) in self.wanted for v in chain[1:])
        )

    def _again(self, s: Tensor, device: str) -> Tensor:
        assert s.spec is not None and s.spec.view_of is not None, line(s)
        sources = list(s.sources)
        viewed = s.spec.view_of
        sources[viewed] = self.source(sources[viewed], device)
        t = apply(s.op, *sources, name=f"{s.name}@{device}", **s.attrs)
        self.of[t.name] = Placed(device, f"follows %{t.root.name}")
        return t

    def _copy(self, s: Tensor, device: str) -> Tensor:
        t = apply(COPY, self.new[s.name], name=f"{s.name}@{device}", device=device)
        self.of[t.name] = Placed(device, f"copy from {self.of[s.root.name].device}")
        return t


def _chain(s: Tensor) -> list[Tensor]:
    """A view, what it views, and so on to the root."""
    found = [s]
    while found[-1].is_view:
        t = found[-1]
        assert t.spec is not None and t.spec.view_of is not None, line(t)
        found.append(t.sources[t.spec.view_of])
    return found


def _with_copies(placement: Placement) -> tuple[Graph, dict[str, Placed]]:
    graph, of = placement.graph, dict(placement.of)
    wanted = frozenset(
        (s.name, of[t.name].device)
        for t in graph.nodes
        for s in t.sources
        if of[s.root.name].device != of[t.name].device
    )
    if not wanted:
        return graph, of
    copies = _Copies(of, wanted)
    for t in graph:
        copies.new[t.name] = _renewed(t, copies)
    outputs = {t.name: copies.new[t.name] for t in graph.outputs}
    effects = [copies.new[t.name] for t in graph.updates.values() if not t.is_leaf]
    return Graph.of(outputs, also=effects, name=graph.name), of


def _renewed(t: Tensor, copies: _Copies) -> Tensor:
    if t.is_leaf:
        return t
    device = copies.of[t.root.name].device
    viewed = t.spec.view_of if t.spec else None
    sources = [
        copies.new[s.name] if i == viewed else copies.source(s, device)
        for i, s in enumerate(t.sources)
    ]
    if all(a is b for a, b in zip(sources, t.sources, strict=True)):
        return t
    return apply(t.op, *sources, name=t.name, **t.attrs)


def _is_copy(t: Tensor) -> bool:
    return t.op == COPY


def _before_copy(t: Tensor) -> Tensor:
    """The value itself: a copied one through its copy."""
    return t.root.sources[0].root if _is_copy(t.root) else t.root


def _predecessors(graph: Graph) -> dict[str, set[str]]:
    """For each node, the nodes that must come before it: producers, and readers of old bytes.

    Copies are left out: they are issued when a reader wants them, so that many offloaded weights
    do not lie in a device's memory at once.
    """
    readers: dict[str, set[str]] = {}
    before: dict[str, set[str]] = {}
    for t in _workers(graph):
        before[t.name] = {_before_copy(s).name for s in t.sources if not _before_copy(s).is_leaf}
        for s in t.sources:
            readers.setdefault(s.root.name, set()).add(t.name)
    for t in _workers(graph):
        if t.overwritten is not None:
            before[t.name] |= readers[t.overwritten.root.name] - {t.name}
    return before


def _workers(graph: Graph) -> list[Tensor]:
    return [t for t in graph.nodes if not _is_copy(t)]


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


def _longest_runs(
    graph: Graph, of: Mapping[str, Placed], cuts: frozenset[str]
) -> tuple[Graph, list[list[str]]]:
    """The graph in the order of its runs, and the runs. The first device is chosen so that there
    are fewest runs; after it, always the one with the longest next run."""
    begin = _Ready.of(graph, of)
    position = {n: i for i, n in enumerate(begin.names)}
    starts = [d for d, h in begin.heaps.items() if h]
    tries = [_runs(begin.copied(), d, position) for d in starts]
    best = min(tries, key=len, default=[])
    runs = _issue_copies(graph, [part for run in best for part in _cut(run, cuts)])
    return _reordered(graph, [n for r in runs for n in r]), runs


def _runs(ready: _Ready, device: str, position: Mapping[str, int]) -> list[list[str]]:
    runs = [ready.run(device, position)]
    while open_ := [d for d, h in ready.heaps.items() if h]:
        if len(open_) > 1:
            open_.sort(key=lambda d: -len(ready.copied().run(d, position)))
        runs.append(ready.run(open_[0], position))
    return runs


def _cut(run: list[str], cuts: frozenset[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for n in run:
        if n in cuts and parts[-1]:
            parts.append([])
        parts[-1].append(n)
    return parts


def _issue_copies(graph: Graph, runs: list[list[str]]) -> list[list[str]]:
    """Put each copy before its first reader, and before what overwrites the copied bytes."""
    by_name = {t.name: t for t in graph.nodes}
    copies: dict[str, list[str]] = {}
    for t in graph.nodes:
        if _is_copy(t):
            copies.setdefault(t.sources[0].root.name, []).append(t.name)
    issued: set[str] = set()
    found: list[list[str]] = []
    for run in runs:
        found.append([])
        for n in run:
            t = by_name[n]
            due = [s.root.name for s in t.sources if _is_copy(s.root)]
            due += copies.get(t.overwritten.root.name, []) if t.overwritten is not None else []
            found[-1] += [c for c in dict.fromkeys(due) if c not in issued]
            issued.update(due)
            found[-1].append(n)
    return found


def _reordered(graph: Graph, names: Sequence[str]) -> Graph:
    """The same graph with its nodes in the order of `names`; leaves and views as late as needed."""
    if [t.name for t in graph.nodes] == list(names):
        return graph
    by_name = {t.name: t for t in graph}
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
        put(by_name[name])
    for t in graph:
        put(t)
    return replace(graph, tensors=tuple(done.values()))


def _splits(graph: Graph, of: Mapping[str, Placed], runs: list[list[str]]) -> list[Split]:
    by_name = {t.name: t for t in graph.nodes}
    found: list[Split] = []
    for i, run in enumerate(runs):
        copies = tuple(n for n in run if _is_copy(by_name[n]))
        work = tuple(n for n in run if not _is_copy(by_name[n]))
        found.append(Split(i, of[work[0]].device, work, copies))
    return found
