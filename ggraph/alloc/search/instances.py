"""Packing problems as files: lifetimes under a partial order.

`Instance` is what the exchange format holds (see bench/instances/README.md): blocks with sizes and,
for each, the blocks that may not share its bytes. Interval files (minimalloc's CSV) are read too.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph.alloc.arena_blocks import make_blocks
from ggraph.alloc.bounds import live_table, lower_bound
from ggraph.alloc.conflicts import conflict_pairs
from ggraph.alloc.fit import NO_LIMIT, Ints, Packing
from ggraph.alloc.precedence import precedence
from ggraph.alloc.search.climb import Cliques
from ggraph.alloc.search.offline import cliques_of
from ggraph.device import DeviceSpec
from ggraph.errors import FormatError
from ggraph.graph import Graph
from ggraph.plan import (
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    MemoryMap,
    Placement,
    Plan,
    Region,
    Schedule,
    Splits,
    Value,
)

FORMAT = "concurrent-storage-allocation/1"
_DEVICE = DeviceSpec("d", "sim", alignment=1)


@dataclass(frozen=True, eq=False)
class Instance:
    """One packing problem; `cliques` holds sets of blocks that are live together, along time."""

    name: str
    names: tuple[str, ...]  # of the blocks
    packing: Packing
    birth: Ints  # [m], place of the first use in list order
    life: Ints  # [m], places from first to last use
    bound: int  # bytes that no packing can do without
    bound_method: str
    listed: Packing  # the same blocks where list order alone decides
    cliques: Cliques

    @property
    def no_reuse(self) -> int:
        """Bytes if no two blocks shared any."""
        return int(self.packing.size.sum())


def from_schedule(schedule: Schedule, device: str, name: str) -> Instance:
    """The packing problem of one device's arena, in-place choices taken as given.

    Raises FormatError for a device without blocks or a schedule too large to tabulate.
    """
    blocks = make_blocks(schedule, precedence(schedule))
    of = blocks.of_device(device)
    table = live_table(blocks, of) if of else None
    if table is None:
        raise FormatError(f"{name}: {len(of)} blocks on {device!r}, nothing to export")
    chosen = [blocks.blocks[i] for i in of]
    size = np.array([b.nbytes for b in chosen], dtype=np.int64)
    birth = np.array([(b.rows or (0,))[0] for b in chosen], dtype=np.int64)
    last = np.array([(b.rows or (0,))[-1] + 1 for b in chosen], dtype=np.int64)
    birth[[b.pinned for b in chosen]] = 0
    last[[b.pinned for b in chosen]] = len(schedule.commands)
    bound = lower_bound(blocks, of)
    return Instance(
        name,
        tuple(b.values[0] for b in chosen),
        Packing(size, *conflict_pairs(blocks, of)),
        birth,
        last - birth,
        bound.nbytes,
        bound.method,
        _intervals(size, birth, last),
        cliques_of(table),
    )


def _intervals(size: Ints, lower: Ints, upper: Ints) -> Packing:
    near = (lower[:, None] < upper) & (lower < upper[:, None])
    np.fill_diagonal(near, False)
    start = np.concatenate([[0], near.sum(axis=1).cumsum()])
    return Packing(size, start, np.nonzero(near)[1])


def from_csv(text: str, name: str) -> Instance:
    """An interval instance: columns id, lower, upper, size; lifetimes are half-open.

    Raises FormatError for missing columns, sizes below 1 and empty lifetimes.
    """
    rows = list(csv.DictReader(io.StringIO(text)))
    try:
        ids = tuple(r["id"] for r in rows)
        columns = [[int(r[k]) for r in rows] for k in ("lower", "upper", "size")]
        lower, upper, size = _in_64_bits(columns)
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise FormatError(f"{name}: expected columns id,lower,upper,size of integers: {e}") from e
    for i in np.flatnonzero((size < 1) | (lower >= upper)):
        raise FormatError(f"{name}: row {ids[i]}: size {size[i]} in [{lower[i]}, {upper[i]})")
    times = np.unique(lower)
    live = ((lower <= times[:, None]) & (times[:, None] < upper)).astype(np.int8)
    p = _intervals(size, lower, upper)
    bound = int((live @ size).max(initial=0))
    life = upper - lower
    return Instance(name, ids, p, lower, life, bound, "live bytes", p, cliques_of(live, life))


def _in_64_bits(columns: Sequence[Sequence[int]]) -> list[Ints]:
    """Columns as they are; OverflowError where one, or its sum, takes more than 62 bits: ends of
    lives and of blocks are found by adding and taking away."""
    for column in columns:
        if sum(map(abs, column)) >= NO_LIMIT:
            raise OverflowError("the numbers, or their sum, take more than 62 bits")
    return [np.array(column, dtype=np.int64) for column in columns]


def to_json(instance: Instance, *, alignment: int, about: str) -> str:
    """The exchange format, one block a line."""
    p = instance.packing
    head = {
        "format": FORMAT,
        "name": instance.name,
        "about": about,
        "alignment": alignment,
        "bound": instance.bound,
        "bound_method": instance.bound_method,
        "cliques": [c.tolist() for c in _members(instance)],
    }
    lines = [
        json.dumps(
            {
                "id": i,
                "name": name,
                "size": int(p.size[i]),
                "lower": int(instance.birth[i]),
                "upper": int(instance.birth[i] + instance.life[i]),
                "conflicts": [int(j) for j in p.near[p.start[i] : p.start[i + 1]] if j > i],
            }
        )
        for i, name in enumerate(instance.names)
    ]
    return json.dumps(head)[:-1] + ', "blocks": [\n' + ",\n".join(lines) + "\n]}\n"


def _members(instance: Instance) -> list[Ints]:
    """The blocks of each clique."""
    c = instance.cliques
    owner = np.repeat(np.arange(len(instance.names)), np.diff(c.start))
    return [owner[c.member == k] for k in range(c.count)]


def from_json(text: str) -> Instance:
    """Read the exchange format. Raises FormatError for another format or broken references."""
    try:
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise FormatError(f"expected format {FORMAT!r}, got {data.get('format')!r}")
        return _parsed(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        raise FormatError(f"not a {FORMAT} file: {e!r}") from e


def _parsed(data: Mapping[str, Any]) -> Instance:
    rows: list[dict[str, Any]] = data["blocks"]
    m = len(rows)
    lower, upper, size = _in_64_bits([[r[k] for r in rows] for k in ("lower", "upper", "size")])
    live = _table(data["cliques"], m)
    near = np.zeros((m, m), dtype=bool)
    for i, r in enumerate(rows):
        near[i, r["conflicts"]] = True
    near |= near.T
    start = np.concatenate([[0], near.sum(axis=1).cumsum()])
    p = Packing(size, start, np.nonzero(near)[1])
    names = tuple(str(r["name"]) for r in rows)
    bound, method = int(str(data["bound"])), str(data["bound_method"])
    listed = _intervals(size, lower, upper)
    found = cliques_of(live, upper - lower)
    return Instance(str(data["name"]), names, p, lower, upper - lower, bound, method, listed, found)


def _table(cliques: object, m: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int8]]":
    if not isinstance(cliques, Sequence):
        raise TypeError(f"cliques is a {type(cliques).__name__}")
    live = np.zeros((len(cliques), m), dtype=np.int8)
    for k, members in enumerate(cliques):
        live[k, members] = 1
    return live


def to_plan(instance: Instance, at: Ints) -> Plan:
    """A packing of interval lifetimes as a plan on one stream, so that `verify` can judge it.

    Each block is a value that is written when its life begins and read when it ends; of a moment's
    commands the reads come first (lives are half-open). Bytes of two blocks that live at once and
    overlap make some read find another value than its own.
    """
    size = instance.packing.size
    names = [f"{i}.{name}" for i, name in enumerate(instance.names)]  # names may repeat
    ends = [(int(t), 0, i) for i, t in enumerate(instance.birth + instance.life)]
    begins = [(int(t), 1, i) for i, t in enumerate(instance.birth)]
    spans = [(Access(name, 0, int(n)),) for name, n in zip(names, size, strict=True)]
    commands = [
        Command(Do.LAUNCH, Actor(_DEVICE.name), names[i], None, *_touch(spans[i], bool(born)))
        for _, born, i in sorted(ends + begins)
    ]
    values = {n: Value(n, _DEVICE.name, int(b)) for n, b in zip(names, size, strict=True)}
    schedule = Schedule(
        Splits(Placement(Graph(instance.name, (), (), {}), (_DEVICE,), {}), ()),
        values,
        tuple(commands),
    )
    regions = {
        n: Region("arena", (int(o),), int(b)) for n, o, b in zip(names, at, size, strict=True)
    }
    top = int((at + size).max(initial=0))
    buffers = {"arena": Buffer("arena", _DEVICE.name, top, _DEVICE.alignment)}
    return Plan(schedule, MemoryMap("offline", buffers, regions))


def _touch(span: tuple[Access, ...], born: bool) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What a command reads, and what it writes."""
    return ((), span) if born else (span, ())
