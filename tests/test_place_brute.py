"""Homes of leaves, and of the ops that these draw, against a reading of docs/scheduler.md without
passes; and ops between neighbours against the bytes that `split` then copies.

Legend: T token rows, E width, X experts, U experts per token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1

from ggraph import ops
from ggraph.device import DeviceSpec
from ggraph.dtype import I32
from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.place import Pin, place
from ggraph.split import split
from ggraph.tensor import Kind, Tensor, input, state, weight

T, E = 4, 8
KEPT = (Kind.WEIGHT, Kind.STATE)


@dataclass
class World:
    """What one call of `place` is given."""

    graph: Graph
    devices: list[DeviceSpec]
    pins: dict[str, str]  # leaves, by whole name
    layers: dict[str, int] | None

    def call(self) -> dict[str, str]:
        pins = [Pin(n, d, whole=True) for n, d in self.pins.items()]
        of = place(self.graph, self.devices, pins, layers=self.layers).of
        return {n: p.device for n, p in of.items()}


def some_graph(draw: st.DrawFn) -> Graph:
    """Products, shared scales, tables of rows, experts and caches, in numbered layers or none."""
    x, ids = input("x", (T, E)), input("ids", (T,), I32)
    picks = input("picks", (T, 2), I32)
    made = [x]
    shared = weight("shared", (E,))
    for i in range(draw(st.integers(1, 6))):
        layer = draw(st.sampled_from(["", f"blk.{i // 2}."]))
        kind = draw(
            st.sampled_from(["linear", "fork", "shared", "cache", "experts", "part", "add"])
        )
        h, own = draw(st.sampled_from(made)), draw(st.sampled_from(["", layer]))
        if kind in ("linear", "fork"):
            for k in "ab"[: 1 + (kind == "fork")]:
                made.append(ops.mul_mat(weight(f"{own}w{i}{k}", (E, E)), h, name=f"{layer}n{i}{k}"))
        elif kind == "shared":
            made.append(ops.mul(h, shared, name=f"{layer}n{i}"))
        elif kind == "cache":
            cache = state(f"{own}s{i}", (draw(st.sampled_from([T, 3 * T])), E))
            new = ops.set_rows(cache, h, ids, name=f"{layer}set{i}")
            made.append(ops.scale(ops.rows(new, 0, T), 2.0, name=f"{layer}n{i}"))
        elif kind == "experts":
            w = weight(f"{own}w{i}", (3, E, E))
            y = ops.mul_mat_id(w, h.reshape(T, 1, E), picks, name=f"{layer}e{i}")
            made.append(ops.scale(ops.columns(y.reshape(T, 2 * E), 0, E), 2.0, name=f"{layer}n{i}"))
        elif kind == "part":
            table = weight(f"{own}w{i}", (9 * T, E))
            made.append(ops.get_rows(table, ids, name=f"{layer}n{i}"))
        else:
            made.append(ops.add(h, draw(st.sampled_from(made)), name=f"{layer}n{i}"))
    return Graph.of({"y": ops.add(made[-1], made[0])})


@st.composite
def worlds(draw: st.DrawFn) -> World:
    graph = some_graph(draw)
    every = sorted({t.op for t in graph.nodes})
    near = []
    for spec in (SIM0, SIM1)[: draw(st.integers(1, 2))]:
        lacks = draw(st.sets(st.sampled_from(every), max_size=1))
        near.append(
            replace(
                spec,
                ops=frozenset(every) - lacks,
                memory_bytes=draw(st.sampled_from([0, 256, 288, 512, 768, 1024, 1 << 20])),
                offload_rows=draw(st.sampled_from([0, 0, 1, T, T + 1])),
                host_visible=draw(st.sampled_from([False, False, True])),
            )
        )
    cpu = replace(CPU, memory_bytes=draw(st.sampled_from([1 << 20, 1 << 20, 1024])))
    devices = [*near, cpu] if draw(st.integers(0, 5)) else [cpu, *near]
    names = [d.name for d in devices]
    leaves = [t.name for t in graph if t.is_leaf]
    pins = draw(st.dictionaries(st.sampled_from(leaves), st.sampled_from(names), max_size=2))
    layers = draw(st.none() | st.dictionaries(st.sampled_from(names), st.integers(0, 2)))
    return World(graph, devices, pins, layers)


# The documents, read anew.


def fallback(devices: Sequence[DeviceSpec]) -> str:
    return ([d for d in devices if d.host_visible] or list(devices))[-1].name


def readers(graph: Graph, leaf: Tensor) -> list[Tensor]:
    """Ops that read any value of the leaf's bytes."""
    return [t for t in graph.nodes if any(s.storage is leaf for s in t.sources)]


def number(name: str) -> int | None:
    found = re.search(r"(^|\.)blk\.(\d+)(\.|$)", name)
    return int(found[2]) if found else None


def layer_of(graph: Graph, leaf: Tensor) -> int | None:
    """By its own name, else by those that are nearest."""
    near = [leaf] + [x for r in readers(graph, leaf) for x in (r, *r.sources)]
    return next((n for t in near if (n := number(t.name)) is not None), None)


def as_one(w: World, leaf: Tensor) -> list[Tensor]:
    """The weights that must go where `leaf` goes: what one op reads, or ops of a kind that read the
    same beside them. A weight goes by its first reader."""

    def launch(x: Tensor) -> object:
        t = readers(w.graph, x)[0]
        beside = [s.name for s in t.sources if s.storage.kind is not Kind.WEIGHT]
        return (t.op, *beside) if beside else t.name

    weights = [t for t in w.graph.leaves(Kind.WEIGHT) if t.name not in w.pins]
    if leaf.kind is not Kind.WEIGHT:
        return [leaf]
    return [t for t in weights if launch(t) == launch(leaf)]


def homes(w: World) -> dict[str, str] | None:
    """Where each leaf is; None where some device cannot hold what is its."""
    room = {d.name: d.memory_bytes for d in w.devices}
    of: dict[str, str] = {}
    full: set[str] = set()
    current = 0
    first = {t.name: i for i, t in reversed(list(enumerate(w.graph.nodes)))}
    leaves = [t for t in w.graph if t.is_leaf]
    for t in sorted(leaves, key=lambda t: first[readers(w.graph, t)[0].name]):
        if t.name in of:
            continue
        group = [t]
        if t.name in w.pins:
            home = w.pins[t.name]
        elif t.kind is Kind.INPUT:
            home = fallback(w.devices)
        elif w.layers:
            known = layer_of(w.graph, t)
            current = current if known is None else known
            ends = [d for d, n in w.layers.items() for _ in range(n)]
            home = ends[current] if current < len(ends) else fallback(w.devices)
        else:
            group = as_one(w, t)
            home = first_with_room(w, group, room, full)
        for x in group:
            of[x.name] = home
            room[home] -= x.nbytes
        if room[home] < 0:
            return None
    return of


def first_with_room(w: World, group: list[Tensor], room: dict[str, int], full: set[str]) -> str:
    """The first that runs all readers and is not full; once full, a device takes no more. Where
    there is none, the last with room; where there is none, the fallback, which then refuses."""
    nbytes = sum(x.nbytes for x in group)
    for d in w.devices:
        if all(d.supports(r) for x in group for r in readers(w.graph, x)) and d.name not in full:
            if nbytes <= room[d.name]:
                return d.name
            full.add(d.name)
    left = [d.name for d in w.devices if d.name not in full and nbytes <= room[d.name]]
    return left[-1] if left else fallback(w.devices)


def rows_of(t: Tensor) -> int:
    return t.sources[2].shape[0] if t.op == "mul_mat_id" else prod(t.shape[:-1])


def drawn(w: World, of: dict[str, str]) -> dict[str, str]:
    """Ops that the largest weight or state draws, and those that another device takes from it."""
    spec = {d.name: d for d in w.devices}
    found: dict[str, str] = {}
    for t in w.graph.nodes:
        kept = [s for s in t.sources if s.storage.kind in KEPT]
        if t.op == "set_rows":
            found[t.name] = of[t.storage.name]
            continue
        if not kept:
            continue
        best = max(kept, key=lambda s: s.nbytes)
        leaf = best.storage
        others = [s.nbytes for s in t.sources if s.storage is not leaf]
        is_small = bool(others) and best.nbytes < max(others)
        if is_small and len(readers(w.graph, leaf)) > 1:
            continue
        home = of[leaf.name]
        reads_whole = t.op in ("mul_mat", "mul")
        if leaf.kind is Kind.WEIGHT and spec[home].host_visible:
            offered = t.op == "mul_mat_id" or (reads_whole and leaf.name not in w.pins)
            above = w.devices[: w.devices.index(spec[home])] if offered else []
            takers = [d for d in above if d.supports(t) and 0 < d.offload_rows <= rows_of(t)]
            if takers:
                home = takers[0].name
        if spec[home].supports(t):
            found[t.name] = home
    return found


@given(worlds())
def test_leaves_and_what_they_draw_are_where_the_documents_say(w: World) -> None:
    spec = {d.name: d for d in w.devices}
    of = homes(w)
    if w.layers and not any(number(t.name) is not None for t in w.graph):
        loose = [t for t in w.graph if t.is_leaf and t.kind in KEPT and t.name not in w.pins]
        if loose:
            with pytest.raises(PlaceError, match=r"no tensor of .* is called blk"):
                w.call()
            return
    for t in w.graph.nodes:  # nothing can write the state where it lies
        if t.overwritten is not None and of and not spec[of[t.storage.name]].supports(t):
            with pytest.raises(PlaceError, match="cannot run"):
                w.call()
            return
    if of is None:
        event("does not fit")
        with pytest.raises(PlaceError, match="does not fit"):
            w.call()
        return
    got = w.call()
    assert {n: got[n] for n in of} == of
    wanted = drawn(w, of)
    assert {n: got[n] for n in wanted} == wanted
    assert all(spec[got[t.name]].supports(t) for t in w.graph.nodes)


# Ops between neighbours.


@dataclass
class Loose:
    """All is pinned but the op `op`; `here` is where its neighbours alone would put it."""

    graph: Graph
    op: Tensor
    homes: dict[str, str]
    devices: list[DeviceSpec]


def window(draw: st.DrawFn, t: Tensor) -> Tensor:
    """Some of a value, with gaps or without."""
    kind = draw(st.sampled_from(["all", "all", "top", "left", "bottom"]))
    if kind == "left":
        return ops.columns(t, 0, t.shape[1] // 2)
    half = t.shape[0] // 2
    return t if kind == "all" else ops.rows(t, half if kind == "bottom" else 0, half)


@st.composite
def loose_ops(draw: st.DrawFn) -> Loose:
    """One op that reads up to three values, of one or more rows, and is read by some others."""
    made = [input(f"x{i}", (draw(st.sampled_from([4, 8, 16])), E)) for i in range(3)]
    made = [*made, *(ops.scale(x, 2.0, name=f"h{i}") for i, x in enumerate(made))]
    picked = [window(draw, draw(st.sampled_from(made))) for _ in range(draw(st.integers(1, 3)))]
    wide = [s for s in picked if s.shape[1] == picked[0].shape[1]]
    op = wide[0]
    for s in wide[1:2]:
        op = ops.concat([op, s], axis=0)
    op = ops.neg(op) if len(wide) == 1 else op
    op = op.named("op")
    readers = [
        ops.scale(window(draw, op), 2.0, name=f"r{i}") for i in range(draw(st.integers(1, 3)))
    ]
    beside = [
        ops.scale(window(draw, draw(st.sampled_from(made))), 3.0, name=f"b{i}")
        for i in range(draw(st.integers(0, 2)))
    ]
    graph = Graph.of({f"y{i}": t for i, t in enumerate([*readers, *beside])})
    op = next(t for t in graph.nodes if t.name == "op")
    devices = [SIM0, SIM1, CPU]
    if draw(st.integers(0, 3)) == 0:
        lacking = draw(st.integers(0, 1))
        every = frozenset(t.op for t in graph.nodes)
        devices[lacking] = replace(devices[lacking], ops=every - {op.op})
    names = [d.name for d in devices]
    cannot = {d.name for d in devices if not d.supports(op)}
    homes = {}
    for t in graph:
        if not t.is_view and t is not op:
            free = [n for n in names if t.is_leaf or t.op != op.op or n not in cannot]
            homes[t.name] = draw(st.sampled_from(free))
    return Loose(graph, op, homes, devices)


def copied(w: Loose, device: str) -> int:
    """Bytes of all copies that `split` makes if the op runs on `device`."""
    pins = [Pin(n, d, whole=True) for n, d in (w.homes | {"op": device}).items()]
    graph = split(place(w.graph, w.devices, pins)).placement.graph
    return sum(t.nbytes for t in graph.nodes if t.op == "copy")


@given(loose_ops())
def test_an_op_between_pinned_neighbours_runs_where_the_fewest_bytes_are_copied(w: Loose) -> None:
    pins = [Pin(n, d, whole=True) for n, d in w.homes.items()]
    got = place(w.graph, w.devices, pins).of["op"]
    costs = {d.name: copied(w, d.name) for d in w.devices if d.supports(w.op)}
    assert costs[got.device] == min(costs.values()), (got, costs)
    moved = re.fullmatch(r"upgrade from (\w+): (\d+) fewer bytes cross", got.cause)
    assert moved is None or costs[moved[1]] - costs[got.device] == int(moved[2]) > 0
