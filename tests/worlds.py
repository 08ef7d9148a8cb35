"""Small graphs, devices and memory maps that the planning tests share. No test is in here.

Legend: T token rows, E embedding width, C cache rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import F32, I32
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.place import Pin, place
from ggraph.plan import Buffer, MemoryMap, Plan, Region, Schedule
from ggraph.split import split
from ggraph.tensor import Array, Kind, Tensor, input, state, weight

T, E, C = 3, 8, 8
CPU = DeviceSpec("cpu", "cpu", host_visible=True)
SIM0, SIM1 = sim_spec("sim0"), sim_spec("sim1")
SIM2 = sim_spec("sim2", peer_bytes_per_s=0.0)  # reaches others through the host only


def linear(x: Tensor, name: str) -> Tensor:
    """x [T, E] times a weight [E, E]."""
    return ops.mul_mat(weight(f"{name}.weight", (E, E)), x, name=name)


def layer(h: Tensor, slots: Tensor, i: int) -> Tensor:
    """A layer with three branches and a cache: h [T, E] -> [T, E]."""
    blk = f"blk.{i}"
    n = ops.rms_norm(h, eps=1e-5, name=f"{blk}.norm")
    q, k = linear(n, f"{blk}.q"), linear(n, f"{blk}.k")
    cache = state(f"cache.{i}", (C, E))
    written = ops.set_rows(cache, k, slots, name=f"{blk}.cached")  # [C, E]
    seen = ops.rows(written, 0, T, name=f"{blk}.seen")  # [T, E]
    mixed = ops.add(ops.mul(seen, q), linear(n, f"{blk}.v"), name=f"{blk}.mix")
    return ops.add(ops.scale(mixed, 0.5), h, name=f"{blk}.out")


def tiny(layers: int = 2) -> Graph:
    """A small decoder: input x [T, E] and slots [T], output y [T, E]."""
    h, slots = input("x", (T, E)), input("slots", (T,), I32)
    for i in range(layers):
        h = layer(h, slots, i)
    return Graph.of({"y": linear(h, "head")}, name="tiny")


def schedule_of(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    pins: Sequence[str | Pin] = (),
    layers: Mapping[str, int] | None = None,
    **options: object,
) -> Schedule:
    """Place, split and order."""
    return order(split(place(graph, devices, pins, layers=layers)), **options)  # type: ignore[arg-type]


def no_reuse(schedule: Schedule) -> Plan:
    """A plan in which every value has bytes of its own, unless it overwrites another."""
    sizes: dict[str, int] = {}
    regions: dict[str, Region] = {}
    buffers: dict[str, Buffer] = {}
    for v in schedule.values.values():
        if v.same_as:
            regions[v.name] = regions[v.same_as]
            continue
        room = v.name if v.external else f"arena.{v.device}"
        begin = sizes.get(room, 0)
        step = -(-v.nbytes // 128) * 128
        regions[v.name] = Region(room, tuple(begin + i * step for i in range(v.slots)), v.nbytes)
        sizes[room] = begin + step * v.slots
        buffers[room] = Buffer(room, v.device, sizes[room], 128, v.external)
    return Plan(schedule, MemoryMap("flat", buffers, regions))


def weights(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Random values of all weights of a graph, the same for the same names."""
    found = {}
    for t in graph.leaves(Kind.WEIGHT):
        rng = np.random.default_rng([seed, *t.name.encode()])
        found[t.name] = rng.standard_normal(t.shape).astype(np.float32)
    return found


def feeds(graph: Graph, runs: int, seed: int = 0) -> list[dict[str, Array]]:
    """Random inputs for some runs; integers are distinct rows of a cache."""
    rng = np.random.default_rng(seed)
    found: list[dict[str, Array]] = []
    for _ in range(runs):
        found.append({})
        for t in graph.leaves(Kind.INPUT):
            if t.dtype is F32:
                found[-1][t.name] = rng.standard_normal(t.shape).astype(np.float32)
            else:
                found[-1][t.name] = rng.permutation(C)[: t.size].astype(t.dtype.np)
    return found
