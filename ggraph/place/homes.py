"""Homes of inputs, weights and states, within the devices' capacity."""

import re
from collections.abc import Mapping, Sequence

from ggraph.errors import PlaceError
from ggraph.place.work import Work
from ggraph.tensor import Kind, Tensor

_LAYER = re.compile(r"(?:^|\.)blk\.(\d{1,18})(?:\.|$)")  # Python reads no number of 5000 digits
Table = list[tuple[str, int]]  # devices, each with the first layer that is beyond it


def layer_table(work: Work, layers: Mapping[str, int]) -> Table | None:
    """Up to which layer each device goes, as `layers` says; None when it says nothing."""
    if not layers:
        return None
    table: Table = []
    known = [d.name for d in work.devices]
    for device, count in layers.items():
        if device not in known:
            raise PlaceError(f"layers {device}={count}: known devices are {', '.join(known)}")
        if count < 0:
            raise PlaceError(f"layers {device}={count}: expected 0 or more layers")
        table.append((device, count + (table[-1][1] if table else 0)))
    numbered = any(_LAYER.search(t.name) for t in work.graph)
    if not numbered and (homeless := _homeless(work)):
        raise PlaceError(
            f"layers {dict(layers)}: no tensor of {work.graph.name!r} is called blk.N.*, so that "
            f"nothing says which layer {', '.join(homeless[:4])} belongs to; call them so, or pin "
            "them"
        )
    return table


def _homeless(work: Work) -> list[str]:
    """Weights and states that no pin holds."""
    kept = (*work.graph.leaves(Kind.WEIGHT), *work.graph.leaves(Kind.STATE))
    return [t.name for t in kept if t.name not in work.pinned]


def _by_first_use(work: Work) -> list[Tensor]:
    """The leaves in the order in which the graph's ops first read them."""
    first = {t.name: i for i, t in reversed(list(enumerate(work.graph.nodes)))}

    def use(leaf: Tensor) -> int:
        readers = work.users[leaf.name]  # in the graph's order
        return first[readers[0].name] if readers else len(first)

    return sorted((t for t in work.graph if t.is_leaf), key=use)


def _layer(work: Work, leaf: Tensor) -> int | None:
    """The layer of a leaf by its own name, else by those of its readers and their sources."""
    nearby = [leaf, *(x for r in work.users[leaf.name] for x in (r, *r.sources))]
    return next((int(m[1]) for x in nearby if (m := _LAYER.search(x.name))), None)


def _together(work: Work) -> dict[str, list[Tensor]]:
    """For each weight that no pin holds those that one launch may read with it, itself among them.

    That are weights of one op, or of ops of one kind that read the same beside them, as Q, K and V
    of one x: a plan of other rows makes one op of these, and finds the weights where this one put
    them. A weight that has several such readers goes by the first.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    found: dict[str, list[Tensor]] = {}
    for t in work.graph.nodes:
        held = [root.storage for root in t.roots]
        weights = [leaf for leaf in held if leaf.kind is Kind.WEIGHT]
        if not weights:
            continue
        of = zip(t.sources, held, strict=True)
        beside = [s.name for s, leaf in of if leaf.kind is not Kind.WEIGHT]
        group = groups.setdefault((t.op, *beside) if beside else (t.name,), [])
        for leaf in weights:
            if leaf.name not in found and leaf.name not in work.pinned:
                group.append(leaf)
                found[leaf.name] = group
    return found


def leaves(work: Work, table: Table | None) -> None:
    """A home for every input, weight and state, within the devices' capacity."""
    room = {d.name: d.memory_bytes for d in work.devices}
    closed: set[str] = set()
    together = _together(work)
    layer = 0
    for t in _by_first_use(work):
        if t.name in work.of:  # it came with an earlier one
            continue
        pin, group = work.pinned.get(t.name), [t]
        if pin:
            device, cause = pin.device, f"pin {pin}"
        elif t.kind is Kind.INPUT:
            device, cause = work.fallback.name, "input, written by the host"
        elif table is not None:
            found = _layer(work, t)
            layer = layer if found is None else found
            device = next((d for d, end in table if layer < end), work.fallback.name)
            cause = f"{t.kind.value}'s home, layer split"
        else:
            group = together.get(t.name, group)
            device = _with_room(work, group, room, closed)
            cause = f"{t.kind.value}'s home, first device with room"
        for leaf in group:
            room[device] -= leaf.nbytes
            work.put(leaf, device, cause)
        if room[device] < 0:
            raise _full(work, t, device)


def _with_room(
    work: Work, group: Sequence[Tensor], room: Mapping[str, int], closed: set[str]
) -> str:
    """The first open device that can run all readers and has room for all of the group. A full
    device is closed, so that later small leaves do not tear the layers apart."""
    readers, nbytes = [r for t in group for r in work.users[t.name]], sum(t.nbytes for t in group)
    able = [d.name for d in work.devices if all(map(d.supports, readers))]
    for name in [d for d in able if d not in closed]:
        if room[name] >= nbytes:
            return name
        closed.add(name)
    left = [d.name for d in work.devices if room[d.name] >= nbytes and d.name not in closed]
    return left[-1] if left else work.fallback.name


def _full(work: Work, t: Tensor, device: str) -> PlaceError:
    there = [x for x in work.graph if x.name in work.of and work.of[x.name].device == device]
    largest = sorted(there, key=lambda x: -x.nbytes)[:8]
    rows = ", ".join(f"%{x.name} {x.nbytes}" for x in largest)
    return PlaceError(
        f"{device}: %{t.name} does not fit: capacity {work.spec(device).memory_bytes} bytes, "
        f"{sum(x.nbytes for x in there)} asked for by {len(there)} tensors; largest: {rows}"
    )
