"""What the allocator's tests share: hand-made schedules, random ones, and a brute-force judge."""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx

from ggraph.alloc.ggml import INPLACE_OPS
from ggraph.device import HOST, DeviceSpec
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Command,
    Do,
    MemoryMap,
    Placement,
    Schedule,
    Splits,
    Value,
)

GOLDEN = Path(__file__).parent / "golden" / "ggml_alloc_offsets.jsonl.gz"
HUGE = (1 << 38) + 5  # bytes of now and then a value, where a device has room for it
HOST_DOES = {Do.HOST_WRITE, Do.HOST_READ, Do.HOST_SYNC, Do.HOST_FREE}


def schedule(
    devices: Sequence[DeviceSpec], values: Sequence[Value], commands: Sequence[Command]
) -> Schedule:
    """A schedule of which only devices, values and commands matter."""
    placement = Placement(Graph("g", (), (), {}), tuple(devices), {})
    return Schedule(Splits(placement, ()), {v.name: v for v in values}, tuple(commands))


def act(
    do: Do, actor: Actor = HOST_ACTOR, reads: Sequence[Value] = (), writes: Sequence[Value] = ()
) -> Command:
    """A command over whole values."""

    def whole(vs: Sequence[Value]) -> tuple[Access, ...]:
        return tuple(Access(v.name, 0, v.nbytes) for v in vs)

    return Command(do, actor, do.value, None, whole(reads), whole(writes))


def random_schedule(r: random.Random) -> Schedule:
    """Anything a schedule may contain, sensible or not: order is often missing on purpose."""
    devices = [
        DeviceSpec(
            f"d{k}",
            "sim",
            alignment=r.choice((1, 16, 64)),
            streams=r.randint(1, 3),
            max_buffer_bytes=r.choice((1 << 40, 512)),
        )
        for k in range(r.randint(1, 2))
    ]
    actors = [Actor(d.name, s) for d in devices for s in range(d.streams)]
    wide = {d.name for d in devices if d.max_buffer_bytes > HUGE}
    values: list[Value] = []
    commands: list[Command] = []
    events = [f"e{k}" for k in range(3)]
    for i in range(r.randint(3, 22)):
        actor = r.choice(actors)
        kind = r.random()
        if kind < 0.6:
            commands.append(_launch(r, i, actor, values, actor.device in wide))
        elif kind < 0.8:
            do = r.choice((Do.RECORD, Do.RECORD, Do.WAIT))
            commands.append(Command(do, actor, do.value, event=r.choice(events)))
        elif kind < 0.9:
            event, waits = r.choice([(r.choice(events), None), (None, actor), (None, None)])
            commands.append(Command(Do.HOST_SYNC, HOST_ACTOR, "sync", event=event, waits_for=waits))
        else:
            do = r.choice((Do.HOST_WRITE, Do.HOST_READ, Do.HOST_FREE))
            some = [_fresh(r, i, r.choice([HOST, actor.device]), values)]
            commands.append(
                act(do, HOST_ACTOR, *((some, ()) if do is Do.HOST_READ else ((), some)))
            )
    if r.random() < 0.7:  # a run that ends complete, as most do
        commands.append(Command(Do.HOST_SYNC, HOST_ACTOR, "end"))
    return schedule(devices, values, commands)


def _fresh(r: random.Random, i: int, device: str, values: list[Value]) -> Value:
    """An old value of the device, or a new one."""
    old = [v for v in values if v.device == device]
    if old and r.random() < 0.5:
        return r.choice(old)
    v = Value(
        f"v{i}",
        device,
        r.choice((0, 1, 64, 100, 256)),
        initial=r.random() < 0.05,
        kept=r.random() < 0.05,
        slots=2 if r.random() < 0.05 else 1,
        external=r.random() < 0.05,
    )
    values.append(v)
    return v


def _launch(r: random.Random, i: int, actor: Actor, values: list[Value], wide: bool) -> Command:
    here = [v for v in values if v.device == actor.device]
    reads = r.sample(here, min(len(here), r.randint(0, 3)))
    same = r.choice(reads).name if reads and r.random() < 0.1 else None
    sizes = {v.name: v for v in values}
    most = HUGE if wide else 256
    nbytes = sizes[same].nbytes if same else r.choice((0, 1, 64, 64, 100, 256, 256, most))
    over = tuple(v.name for v in reads) if r.random() < 0.6 else ()
    made = Value(f"v{i}", actor.device, nbytes, same, () if same else over)
    values.append(made)
    return act(Do.LAUNCH, actor, reads, [made])


def reachability(s: Schedule) -> dict[int, set[int]]:
    """What follows each command of two consecutive runs, by graph search over single rules."""
    n = len(s.commands)
    rows = list(s.commands) * 2
    who = [HOST_ACTOR if c.do in HOST_DOES else c.actor for c in rows]
    g: nx.DiGraph[int] = nx.DiGraph()
    g.add_nodes_from(range(2 * n))
    for i, c in enumerate(rows):
        for j in range(i + 1, 2 * n):
            late = rows[j]
            syncs = late.do is Do.HOST_SYNC and late.event is None
            synced = syncs and late.waits_for in (None, who[i])
            if who[i] == who[j] or c.do in HOST_DOES or synced:
                g.add_edge(i, j)
    for j, c in enumerate(rows):
        if c.do is Do.WAIT or (c.do is Do.HOST_SYNC and c.event is not None):
            records = [i for i in range(j) if rows[i].do is Do.RECORD and rows[i].event == c.event]
            if records:
                g.add_edge(records[-1], j)
    return {i: nx.descendants(g, i) for i in g}


def judge(s: Schedule, m: MemoryMap) -> int:
    """Assert that sharing is sound; the number of pairs of values that share bytes."""
    _judge_places(s, m)
    after = reachability(s)
    n = len(s.commands)
    used = {
        v: [i for i, c in enumerate(s.commands) if any(a.value == v for a in (*c.reads, *c.writes))]
        for v in s.values
    }
    shared = 0
    for a, b in combinations(s.values, 2):
        if not _overlap(m, a, b) or root(s, a) == root(s, b):
            continue
        for v in (s.values[a], s.values[b]):
            assert not (v.initial or v.kept or v.slots > 1), f"{v} shares bytes: {a} {b}"
        shared += 1

        def precedes(x: str, y: str, shift: int = 0) -> bool:
            return all(
                j + shift in after[i] or (i == j + shift and _in_place(s, m, i, x, y))
                for i in used[x]
                for j in used[y]
            )

        forth = precedes(a, b) and precedes(b, a, n)
        back = precedes(b, a) and precedes(a, b, n)
        assert forth or back, f"{a} {m.regions[a]} and {b} {m.regions[b]} race\n{list(s)}"
    return shared


def _judge_places(s: Schedule, m: MemoryMap) -> None:
    limits = {d.name: d.max_buffer_bytes for d in s.splits.placement.devices}
    align = {d.name: d.alignment for d in s.splits.placement.devices}
    for name, v in s.values.items():
        region, slots = m.regions[name], max(v.slots, s.values[root(s, name)].slots)
        buffer = m.buffers[region.buffer]
        assert buffer.device == v.device and region.nbytes == v.nbytes
        assert len(region.offsets) >= slots
        assert all(o % align.get(v.device, 64) == 0 for o in region.offsets), region
        assert max(region.offsets) + v.nbytes <= buffer.nbytes, (region, buffer)
        assert buffer.external or buffer.nbytes <= limits.get(v.device, 1 << 62)
        for x, y in combinations(region.offsets, 2):
            assert abs(x - y) >= v.nbytes, region
        assert region.buffer == m.regions[root(s, name)].buffer
        assert region.offset == m.regions[root(s, name)].offset


def root(s: Schedule, name: str) -> str:
    while (over := s.values[name].same_as) is not None:
        name = over
    return name


def _overlap(m: MemoryMap, a: str, b: str) -> bool:
    x, y = m.regions[a], m.regions[b]
    if x.buffer != y.buffer or not (x.nbytes and y.nbytes):
        return False
    return any(p < q + y.nbytes and q < p + x.nbytes for p in x.offsets for q in y.offsets)


def _in_place(s: Schedule, m: MemoryMap, i: int, old: str, new: str) -> bool:
    """Command i may read `old` and write `new` on the same bytes: it was said to tolerate that."""
    writes = {a.value for a in s.commands[i].writes}
    allowed = {x for v in writes for x in s.values[v].may_replace}
    same_place = m.regions[old].offsets == m.regions[new].offsets
    chain = {root(s, x) for x in allowed}
    return same_place and root(s, new) in {root(s, w) for w in writes} and root(s, old) in chain


def golden() -> Iterator[dict[str, Any]]:
    """The recorded random graphs of the real allocator."""
    with gzip.open(GOLDEN, "rt") as lines:
        yield from map(json.loads, lines)


def golden_schedule(d: dict[str, Any]) -> Schedule:
    """One recorded graph on one stream; results may also replace what a whole view shows."""
    ts = d["tensors"]
    device = DeviceSpec("cpu", "cpu", alignment=d["alignment"])
    where = Actor("cpu")

    def owner(t: dict[str, Any]) -> dict[str, Any]:
        return t if t["view_src"] is None else ts[t["view_src"]]

    def over(t: dict[str, Any]) -> tuple[str, ...]:
        sources = [ts[k] for k in t["src"]] if t["op"] in INPLACE_OPS else []
        same = (
            x for x in sources if (x["ne"], x["nb"], x["type"]) == (t["ne"], t["nb"], t["type"])
        )
        whole = (x for x in same if x["nbytes"] == owner(x)["nbytes"] and not x["weight"])
        return tuple(dict.fromkeys(owner(x)["name"] for x in whole if not owner(x)["output"]))

    values = {
        t["name"]: Value(t["name"], "cpu", t["nbytes"], None, over(t), t["weight"])
        for t in ts
        if t["view_src"] is None
    }

    def of(names: Sequence[str]) -> list[Value]:
        return [values[k] for k in dict.fromkeys(names)]

    inputs = [ts[k]["name"] for k in d["leafs"] if not ts[k]["weight"]]
    commands = [act(Do.HOST_WRITE, HOST_ACTOR, (), of([k])) for k in inputs]
    for k in d["nodes"]:
        if ts[k]["view_src"] is None:
            reads = of([owner(ts[j])["name"] for j in ts[k]["src"]])
            commands.append(act(Do.LAUNCH, where, reads, of([ts[k]["name"]])))
    commands.append(Command(Do.HOST_SYNC, HOST_ACTOR, "end"))
    wanted = [t["name"] for t in ts if t["output"] and t["view_src"] is None]
    commands.append(act(Do.HOST_READ, HOST_ACTOR, of(wanted)))
    return schedule([device], list(values.values()), commands)
