"""Where ops run: drawn by what they read, then by their neighbours."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from math import prod

from ggraph.device import DeviceSpec
from ggraph.errors import PlaceError
from ggraph.place.work import Work
from ggraph.tensor import Kind, Tensor, line


def decided(work: Work) -> None:
    """Ops that are pinned, that overwrite, or that a weight or state draws to its home."""
    for t in work.graph.nodes:
        pin, old = work.pinned.get(t.name), t.overwritten
        if old is not None and t.storage.is_leaf:
            home = work.of[t.storage.name].device
            work.require(t, home, f"it overwrites %{old.name} there")
            work.put(t, home, f"overwrites %{old.name}")
        elif pin:
            work.require(t, pin.device, f"pin {pin}")
            work.put(t, pin.device, f"pin {pin}")
        else:
            _drawn(work, t)


def _drawn(work: Work, t: Tensor) -> None:
    """Put `t` at the home of its largest weight or state, or offload it for a large batch."""
    leaf = _deciding(work, t)
    if leaf is None:
        return
    home = work.spec(work.of[leaf.name].device)
    taker = _taker(work, t, leaf, home)
    if taker is not None:
        work.put(t, taker.name, f"offload of {_rows(t)} rows from {home.name}")
    elif work.able(home, t):
        work.put(t, home.name, f"{leaf.kind.value}'s home of %{leaf.name}")


def _deciding(work: Work, t: Tensor) -> Tensor | None:
    """The largest weight or state that `t` reads, unless it is small and shared (such as rotary
    frequencies, which would draw every layer to one device)."""
    outer = (Kind.WEIGHT, Kind.STATE)
    kept = [s for s, r in zip(t.sources, t.roots, strict=True) if r.storage.kind in outer]
    if not kept:
        return None
    best = max(kept, key=lambda s: s.nbytes)
    leaf = best.storage
    others = max((s.nbytes for s in t.sources if s.storage is not leaf), default=0)
    return None if len(work.users[leaf.name]) > 1 and best.nbytes < others else leaf


def _rows(t: Tensor) -> int:
    """Rows of the result; where each row picks slices, those that share a choice count once."""
    if t.spec is not None and t.spec.picks is not None:
        return prod(t.sources[t.spec.picks[1]].shape[:-1])
    return prod(t.shape[:-1])


def _taker(work: Work, t: Tensor, leaf: Tensor, home: DeviceSpec) -> DeviceSpec | None:
    """A faster device that wants this much work on a host weight, which must be read whole, or by
    slices that can be copied alone."""
    if leaf.kind is not Kind.WEIGHT or not home.host_visible or t.spec is None:
        return None
    picked = t.spec.picks is not None and t.sources[t.spec.picks[0]] is leaf
    if not picked and (leaf.name in work.pinned or t.spec.cost(t).bytes < leaf.nbytes):
        return None
    higher = work.devices[: work.devices.index(home)]
    fits = (d for d in higher if work.able(d, t) and 0 < d.offload_rows <= _rows(t))
    return next(fits, None)


def expand(work: Work) -> None:
    """Sweeps over the undecided ops: from sources, then from readers, first without the inputs,
    which lie on the fallback only because the host writes there."""
    inputs = {t.name for t in work.graph.leaves(Kind.INPUT) if t.name not in work.pinned}
    nodes = work.graph.nodes
    place_of = {t.name: i for i, t in enumerate(work.graph)}
    for avoided in (inputs, set[str]()):
        for t in (t for t in nodes if t.name not in work.of):
            pairs = zip(t.sources, t.roots, strict=True)
            near = [(place_of[root.name], s) for s, root in pairs if root.name not in avoided]
            near.sort(key=lambda found: found[0])
            _take(work, t, [s for _, s in near], "expansion from source")
        for t in reversed([t for t in nodes if t.name not in work.of]):
            _take(work, t, work.readers[t.name][::-1], "expansion from reader")
    for t in (t for t in nodes if t.name not in work.of):
        _fall_back(work, t)


def _take(work: Work, t: Tensor, near: list[Tensor], cause: str) -> None:
    """Give `t` the device of the largest neighbour that can run it; of equals, the last."""
    best: tuple[int, str, str] | None = None
    for n in near:
        device = work.at(n)
        if device is None or not work.able(work.spec(device), t):
            continue
        nbytes = _copied(n).nbytes
        if best is None or nbytes >= best[0]:
            best = (nbytes, device, n.name)
    if best:
        work.put(t, best[1], f"{cause} %{best[2]}")


def _fall_back(work: Work, t: Tensor) -> None:
    known = (work.fallback, *work.devices)
    able = [d for d in known if work.able(d, t)] or [d for d in known if d.supports(t)]
    if not able:
        asked = ", ".join(d.name for d in work.devices)
        raise PlaceError(f"no device can run {line(t)}; asked: {asked}")
    work.put(t, able[0].name, "fallback, first device that can run it")


def improve(work: Work) -> None:
    """Move ops that only expansion placed, if fewer bytes then cross between devices."""
    if len(work.devices) == 1:
        return
    loose = [
        t
        for t in work.graph.nodes
        if work.of[t.name].cause.startswith(("expansion", "fallback")) and t.overwritten is None
    ]
    asked = _Asked(work)
    for t in (*loose, *reversed(loose)):
        here = work.of[t.name].device
        costs = {d.name: asked.crossing(t, d.name) for d in work.devices if work.able(d, t)}
        best = min(costs, key=lambda d: costs[d], default=here)
        if costs and costs[best] < costs[here]:
            saved = costs[here] - costs[best]
            asked.count(t, -1)
            work.put(t, best, f"upgrade from {here}: {saved} fewer bytes cross")
            asked.count(t, 1)


class _Asked:
    """What the ops on a device read of a root, and how many of them: counted, so that one op of
    many that read the same is not held against all others."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._of: defaultdict[tuple[str, str], Counter[Tensor]] = defaultdict(Counter)
        for t in work.graph.nodes:
            self.count(t, 1)

    def count(self, t: Tensor, by: int) -> None:
        """Add an op where it is, or take it away."""
        for root, asked in _asks(t).items():
            counts = self._of[root.name, self.work.of[t.name].device]
            for s in asked:
                counts[s] += by
                if not counts[s]:
                    del counts[s]

    def crossing(self, t: Tensor, device: str) -> int:
        """Bytes copied because `t` runs on `device`: of its sources what no other reader there
        needs anyway, and of the result what is read elsewhere, once per device."""
        work, nbytes = self.work, 0
        is_here = work.of[t.name].device == device
        for root, own in _asks(t).items():
            if work.at(root) != device:
                there = self._of[root.name, device]
                others = {s for s, n in there.items() if n > (is_here and s in own)}
                nbytes += _brought(others | own) - _brought(others)
        elsewhere = (d.name for d in work.devices if d.name != device)
        return nbytes + sum(_brought(self._of[t.name, d].keys()) for d in elsewhere)


def _asks(t: Tensor) -> dict[Tensor, set[Tensor]]:
    """By root, what an op reads, and what a copy of it would bring."""
    found: dict[Tensor, set[Tensor]] = {}
    for s in t.sources:
        found.setdefault(s.root, set()).update((s, _copied(s)))
    return found


def _brought(asked: AbstractSet[Tensor]) -> int:
    """Bytes of the copies that `split` makes for readers on another device, of all that they ask
    of one root: windows on what is copied anyway cost nothing."""
    return sum(s.nbytes for s in asked if not any(v in asked for v in _above(s)))


def _above(s: Tensor) -> Iterator[Tensor]:
    """What a view looks at, and so on to the root."""
    while s.viewed is not None:
        s = s.viewed
        yield s


def _copied(s: Tensor) -> Tensor:
    """What a copy of `s` brings: of a window with gaps what it looks at, as `split` takes it."""
    while s.viewed is not None and not s.is_contiguous:
        s = s.viewed
    return s


def feed(work: Work) -> None:
    """Inputs that the host cannot write in place go to a device that reads them, the first in the
    list: it would have had a copy, by way of the fallback."""
    if work.fallback.host_visible:
        return
    for t in work.graph.leaves(Kind.INPUT):
        there = {work.of[r.name].device for r in work.readers[t.name]}
        if there and t.name not in work.pinned and work.fallback.name not in there:
            first = next(d.name for d in work.devices if d.name in there)
            work.put(t, first, "input, copied from the host to who reads it")


def follow(work: Work) -> None:
    """Views lie with what they look at; results that overwrite one lie with what they overwrite."""
    for t in work.graph:
        root = t.view_src
        if root is not None:
            work.put(t, work.of[root.name].device, f"follows %{root.name}")
        elif t.overwritten is not None and not t.storage.is_leaf:
            home = work.of[t.storage.name].device
            work.require(t, home, f"it overwrites %{t.overwritten.name} there")
            work.put(t, home, f"overwrites %{t.overwritten.name}")
