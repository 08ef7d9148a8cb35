"""Copy nodes for what a device reads from another one's memory.

Of a weight in the host's memory whose readers name the slices that they want (an MoE layer's
experts), only those slices are copied, where that is expected to save more than it costs: the
indices must reach the host first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ggraph.graph import Graph, over
from ggraph.ops.copies import copy
from ggraph.plan import Placed, Placement
from ggraph.tensor import Kind, Tensor, apply, line

COPY = "copy"  # name of the op that moves a tensor to attrs["device"]
STALL = 8.0  # price of the host's look at the indices, in launches: a copy, a wait, an idle queue


def is_copy(t: Tensor) -> bool:
    """Whether `t` moves bytes between devices."""
    return t.spec is not None and t.spec.name == COPY


@dataclass(eq=False)
class _Copies:
    """The new tensors of each device's readers. `made` maps (old name, device) to the stand-in."""

    of: dict[str, Placed]
    wanted: frozenset[tuple[str, str]]  # (name, device), see _wanted
    picked: Mapping[tuple[str, str], Tensor]  # of those, what a part suffices of -> its indices
    new: dict[str, Tensor] = field(default_factory=dict)
    made: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def source(self, s: Tensor, device: str) -> Tensor:
        """What a reader on `device` takes in place of the old tensor `s`."""
        if self.of[s.root.name].device == device:
            return self.new[s.name]
        key = (s.name, device)
        if key not in self.made:
            self.made[key] = (
                self._again(s, device) if self._is_shown(s, device) else self._copy(s, device)
            )
        return self.made[key]

    def _is_shown(self, s: Tensor, device: str) -> bool:
        """Whether `s` is a view of what is copied anyway: to be taken again over the copy."""
        return any((v.name, device) in self.wanted for v in _chain(s)[1:])

    def _again(self, s: Tensor, device: str) -> Tensor:
        assert s.spec is not None and s.spec.view_of is not None, line(s)
        sources = list(s.sources)
        viewed = s.spec.view_of
        sources[viewed] = self.source(sources[viewed], device)
        t = apply(s.op, *sources, name=f"{s.name}@{device}", **s.attrs)
        self.of[t.name] = Placed(device, f"follows %{t.root.name}")
        return t

    def _copy(self, s: Tensor, device: str) -> Tensor:
        ids = self.picked.get((s.name, device))
        used = None if ids is None else self.new[ids.name]
        t = copy(self.new[s.name], device, used=used, name=f"{s.name}@{device}")
        part = f", slices in %{ids.name} only" if ids is not None else ""
        self.of[t.name] = Placed(device, f"copy from {self.of[s.root.name].device}{part}")
        return t


def _chain(s: Tensor) -> list[Tensor]:
    """A view, what it views, and so on to the root."""
    found = [s]
    while (viewed := found[-1].viewed) is not None:
        found.append(viewed)
    return found


def with_copies(placement: Placement) -> tuple[Graph, dict[str, Placed]]:
    """The graph with its Copy nodes, and where everything is now."""
    graph, of = placement.graph, dict(placement.of)
    wanted = frozenset(_wanted(placement))
    if not wanted:
        return graph, of
    copies = _Copies(of, wanted, _picked(placement, wanted))
    for t in graph:
        copies.new[t.name] = _renewed(t, copies)
    outputs = {t.name: copies.new[t.name] for t in graph.outputs}
    effects = [copies.new[t.name] for t in graph.updates.values() if not t.is_leaf]
    return Graph.of(outputs, also=effects, name=graph.name), of


def _wanted(placement: Placement) -> Iterator[tuple[str, str]]:
    """(name, device) of everything that is read from afar, and of what windows with gaps among it
    look at: a copy has no gaps, so that is what is copied."""
    of = placement.of
    for t in placement.graph.nodes:
        device = of[t.name].device
        for s, root in zip(t.sources, t.roots, strict=True):
            if of[root.name].device != device:
                yield s.name, device
                for v, viewed in pairwise(_chain(s)):
                    if v.is_contiguous:
                        break
                    yield viewed.name, device


def _picked(
    placement: Placement, wanted: frozenset[tuple[str, str]]
) -> dict[tuple[str, str], Tensor]:
    """Weights of which a device wants some slices only, and the indices that all readers share.

    Who reads through a view reads the whole of what is copied for it.
    """
    asked: dict[tuple[str, str], dict[str, Tensor | None]] = {}
    for t in placement.graph.nodes:
        for k, s in enumerate(t.sources):
            if s.root.kind is not Kind.WEIGHT:
                continue
            for v in _chain(s):
                if (key := (v.name, placement.of[t.name].device)) in wanted:
                    ids = _indices(t, k) if v is s else None
                    asked.setdefault(key, {})[ids.name if ids is not None else ""] = ids
    found: dict[tuple[str, str], Tensor] = {}
    for (name, device), by in asked.items():
        (ids, *others) = by.values()
        if ids is not None and not others and _saves(placement, name, device, ids):
            found[name, device] = ids
    return found


def _indices(t: Tensor, source: int) -> Tensor | None:
    """The indices by which `t` picks from its source number `source`; None if it reads it whole."""
    if t.spec is None or t.spec.picks is None or t.spec.picks[0] != source:
        return None
    ids = t.sources[t.spec.picks[1]]
    return ids if ids.is_contiguous and t.sources[source].is_leaf else None


def _saves(placement: Placement, name: str, device: str, ids: Tensor) -> bool:
    """Whether the slices that stay, of independent even choices, outweigh the host's look."""
    weight, target = placement.graph[name], placement.device_called(device)
    if not placement.device(name).host_visible or weight.shape[0] < 2:
        return False
    stay = (1 - 1 / weight.shape[0]) ** ids.size
    return stay * weight.nbytes / target.link_bytes_per_s > STALL * target.launch_s


def _renewed(t: Tensor, copies: _Copies) -> Tensor:
    if t.is_leaf:
        return t
    device = copies.of[t.root.name].device
    viewed = t.spec.view_of if t.spec else None
    sources = [
        copies.new[s.name] if i == viewed else copies.source(s, device)
        for i, s in enumerate(t.sources)
    ]
    return over(t, tuple(sources))
