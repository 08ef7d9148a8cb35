"""The order of the passes, as one literal list. Knows every pass, and no device.

    graph -rewrite-> graph -place-> placement -split-> splits -order-> schedule
          -fit-> schedule -allocate-> memory map -verify-> verified plan

Only this file may try again: when memory does not fit, `REMEDIES` lists what is tried, in order,
and each attempt leaves a line in the plan's log with its price in bytes, waits and time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from ggraph.alloc import (
    MODES,
    allocate,
    fitting_edges,
    lower_bounds,
    peak_bytes,
    rooms,
)
from ggraph.device import DeviceSpec
from ggraph.door import checked, fit
from ggraph.env import uncollected
from ggraph.errors import AllocError, GgraphError, GraphError, InputError, PlaceError, PlanError
from ggraph.face import unscoped
from ggraph.graph import Graph
from ggraph.lines import note_lines
from ggraph.order import critical_path, order
from ggraph.orderings import wait_count, with_orderings
from ggraph.place import Pin, place_pinned
from ggraph.place.pins import Pinned, match
from ggraph.plan import MemoryMap, Placement, Plan, Schedule, Splits, VerifiedPlan
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.tensor import line
from ggraph.verify import proved
from ggraph.verify.rounding import roundings

OURS = frozenset("@#")  # in names of copies, staging values, scratch and arenas


@dataclass(frozen=True)
class Options:
    """How to plan. The defaults are what `Session` uses."""

    pins: tuple[str | Pin, ...] = ()  # "regex=device", as llama.cpp's -ot
    layers: Mapping[str, int] = field(default_factory=dict)  # layers per device, in order
    streams: int = 1  # compute streams per device, at most what the device has
    copies: int = 1  # rotating slots of every input
    overlap: bool = False  # the next run may be enqueued while this one still computes
    memory: str = "hb"  # allocator mode: "hb", "offline" or "ggml"
    offline_seconds: float = 0.2  # bound on the search of mode "offline"
    capacity: Mapping[str, int] = field(default_factory=dict)  # arena bytes per device
    spare_waits: int = 16  # orderings between streams that may be added to make memory fit
    forced_sync: tuple[str, ...] = ()  # upstream's flag: the host waits after these tensors
    rewrites: bool = True
    exact: bool = False  # nothing may be rounded that the graph does not round itself
    strict: bool = False  # an op without a kernel is refused, not computed in NumPy

    def __post_init__(self) -> None:
        """InputError for what is no such option: `streams=0`, `pins="w=cpu"`, `layers=3`."""
        fit(self)
        if self.memory not in MODES:
            known = ", ".join(MODES)
            raise InputError(f"Options.memory: expected one of {known}, got {self.memory!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value < inf:  # nor NaN
                raise InputError(f"Options.{name}: expected {least} or more, got {value}")


_LEAST: Mapping[str, int] = {"streams": 1, "copies": 1, "offline_seconds": 0, "spare_waits": 0}


@dataclass(frozen=True, eq=False)
class Planning:
    """What the passes have made so far: a field for each, None until its turn.

    `trading` allows the pass `fit` to add orderings; `error` is why memory could not be laid out.
    """

    graph: Graph
    devices: tuple[DeviceSpec, ...]
    options: Options
    log: tuple[str, ...] = ()
    trading: bool = False
    error: AllocError | None = None
    pinned: Pinned = field(default_factory=dict)  # of `graph`; made with `rewrite`
    rewrite: Graph | None = None
    place: Placement | None = None
    split: Splits | None = None
    order: Schedule | None = None
    fit: Schedule | None = None  # with the orderings that its memory limit asked for
    allocate: MemoryMap | None = None
    verify: VerifiedPlan | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule that memory is laid out for."""
        return _made(self.fit)

    @property
    def plan(self) -> Plan:
        """What is to be verified."""
        return Plan(self.schedule, _made(self.allocate), self.log)


Noun = TypeVar("Noun")
Pass = Callable[[Planning], Planning]


def _made(noun: Noun | None) -> Noun:
    assert noun is not None, "a pass was asked for before the one that it builds on"
    return noun


def _rewrite(p: Planning) -> Planning:
    o, graph = p.options, p.graph
    pinned = match(graph, p.devices, o.pins)
    if o.rewrites:
        homes = {name: pin.device for name, pin in pinned.items()}
        graph = rewrite(graph, p.devices, exact=o.exact, homes=homes)
    return replace(p, pinned=pinned, rewrite=graph)


def _place(p: Planning) -> Planning:
    placed = place_pinned(_made(p.rewrite), p.devices, p.pinned, p.options.layers)
    slow = placed.without_kernel()
    if slow and p.options.strict:
        raise PlaceError(f"strict, and without a kernel: {'; '.join(map(line, slow))}")
    log = (*p.log, in_numpy(placed)) if slow else p.log
    return replace(p, place=placed, log=log)


def in_numpy(placed: Placement) -> str:
    """Which ops run without a kernel, with the bytes they move; nothing where all have one."""
    slow, moved = placed.without_kernel(), dict[str, list[int]]()
    for t in slow:
        moved.setdefault(t.op, []).append(t.nbytes + sum(s.nbytes for s in t.sources))
    rows = [f"{op} ({len(n)} times, {sum(n)} bytes)" for op, n in sorted(moved.items())]
    return f"without a kernel, in NumPy: {', '.join(rows)}" if rows else ""


def _split(p: Planning) -> Planning:
    return replace(p, split=split(_made(p.place)))


def _order(p: Planning) -> Planning:
    return replace(p, order=ordered(_made(p.split), p.options))


def ordered(splits: Splits, o: Options) -> Schedule:
    """The schedule of `splits` by the options."""
    return order(
        splits,
        streams=o.streams,
        n_copies=o.copies,
        forced_sync=frozenset(o.forced_sync),
        overlap=o.overlap,
    )


def _fit(p: Planning) -> Planning:
    """Few orderings with which each device's arenas fit; none for a device they cannot help."""
    schedule, spare, log = _made(p.order), p.options.spare_waits, p.log
    for device, room in rooms(schedule, p.options.capacity).items() if p.trading else ():
        edges = fitting_edges(schedule, device, room)
        if edges is not None and 0 < len(edges) <= spare:
            new = with_orderings(schedule, edges)
            log = (*log, _bought(schedule, new, device, edges))
            schedule, spare = new, spare - len(edges)
    return replace(p, fit=schedule, log=log)


def _bought(old: Schedule, new: Schedule, device: str, edges: Sequence[tuple[int, int]]) -> str:
    """What the orderings that make `new` of `old` save and cost."""
    commands = old.commands
    was, now = peak_bytes(old)[device], peak_bytes(new)[device]
    pairs = "; ".join(f"{commands[i].label!r} before {commands[j].label!r}" for i, j in edges)
    return (
        f"fit: {len(edges)} orderings save {was - now} bytes of {device} ({was} -> {now}), "
        f"{_path(old)} -> {_path(new)}: {pairs}"
    )


def _allocate(p: Planning) -> Planning:
    o = p.options
    memory = allocate(
        p.schedule,
        mode=o.memory,
        capacity=o.capacity or None,
        offline_seconds=o.offline_seconds,
    )
    return replace(p, allocate=memory)


def _verify(p: Planning) -> Planning:
    verified = proved(p.plan)
    if not (p.options.overlap or verified.certificate.ends_complete):
        raise PlanError("a run of this plan ends while its work goes on, and overlap is off")
    own = p.graph.named.keys()
    found = roundings(verified.plan) if p.options.exact else ()
    more = [a for a in found if a.device or not own >= {*a.tensors}]
    if more:
        raise PlanError(f"the plan is to be exact and rounds: {'; '.join(map(str, more))}")
    return replace(p, verify=verified)


PASSES: tuple[tuple[str, Pass], ...] = (  # each under the name of its field in `Planning`
    ("rewrite", _rewrite),
    ("place", _place),
    ("split", _split),
    ("order", _order),
    ("fit", _fit),
    ("allocate", _allocate),
    ("verify", _verify),
)


def _searching(o: Options) -> Options:
    return replace(o, memory="offline", offline_seconds=max(2.0, o.offline_seconds))


# Title, the change of options, the first pass that must run again, whether orderings may be added.
Remedy = tuple[str, Callable[[Options], Options], str, bool]
REMEDIES: tuple[Remedy, ...] = (
    ("search offsets for longer", _searching, "allocate", False),
    ("add orderings between streams", lambda o: o, "fit", True),
    ("one stream per device", lambda o: replace(o, streams=1), "order", True),
    ("runs apart", lambda o: replace(o, overlap=False), "order", True),
    ("one slot per input", lambda o: replace(o, copies=1), "order", True),
)


@checked
def make_plan(
    graph: Graph, devices: Sequence[DeviceSpec], options: Options | None = None
) -> VerifiedPlan:
    """A verified plan of `graph` on `devices` (priority order, the fallback last).

    Raises PlaceError, AllocError (after the remedies have failed too; it states the bytes that no
    plan can do without) or PlanError with the verifier's counter-example. With `python -X
    tracemalloc=20` an error has notes with the lines that made the tensors which it names.
    """
    try:
        return _planned(graph, devices, options)
    except GgraphError as error:
        note_lines(error, graph)
        raise


def _planned(graph: Graph, devices: Sequence[DeviceSpec], options: Options | None) -> VerifiedPlan:
    with uncollected():
        planning = run_passes(begin(graph, devices, options))
        for remedy in REMEDIES:
            if planning.error is None:
                break
            planning = _again(planning, remedy)
    if planning.error is not None:
        raise _unplanned(planning, planning.error)
    return _made(planning.verify)


def begin(graph: Graph, devices: Sequence[DeviceSpec], options: Options | None) -> Planning:
    """What the passes begin with.

    Raises PlaceError without a device, GraphError for a tensor that
    has a name of ours.
    """
    if not devices:
        raise PlaceError("a plan needs at least one device, got none")
    held = {*graph}
    for sources in (graph.outputs, graph.updates.values(), *[t.sources for t in graph]):
        for s in sources if not held.issuperset(sources) else ():
            if s not in held:
                raise GraphError(f"%{s.name} is not in graph {graph.name!r}: make it by Graph.of")
    for t in graph:
        if not OURS.isdisjoint(t.name):
            raise GraphError(f"{line(t)}: names with @ or # are the plan's own; choose another")
    return Planning(graph, tuple(devices), options or Options())


def run_passes(planning: Planning) -> Planning:
    """Run what is missing of the list; the log gains one line per pass with its milliseconds.

    Ends early, with `error` set, where memory cannot be laid out.
    """
    for title, step in PASSES:
        if getattr(planning, title) is not None:
            continue
        begun, known = time.perf_counter(), len(planning.log)
        try:
            with unscoped():
                done = step(planning)
        except AllocError as error:
            return replace(planning, error=error)
        took = f"{title}: {(time.perf_counter() - begun) * 1e3:.1f} ms"
        planning = replace(done, log=(*planning.log, took, *done.log[known:]))
    return planning


def _again(planning: Planning, remedy: Remedy) -> Planning:
    """The passes from `remedy`'s first one on, with its options; `planning` where that is vain."""
    title, change, first, trading = remedy
    options = change(planning.options)
    if (options, trading) == (planning.options, planning.trading):
        return planning
    path = "" if planning.fit is None else f" ({_path(planning.fit)})"
    note = f"pipeline: {planning.error}{path}; trying: {title}"
    if first == "allocate" and (short := _shortage(planning)):
        note = f"{note}; skipped, since {short}"
        return replace(planning, options=options, log=(*planning.log, note))
    again = replace(_before(planning, first), options=options, trading=trading, error=None)
    return run_passes(replace(again, log=(*planning.log, note)))


def _before(planning: Planning, first: str) -> Planning:
    """What was made before the pass `first`."""
    if first == "order":
        planning = replace(planning, order=None)
    if first in ("order", "fit"):
        planning = replace(planning, fit=None)
    return replace(planning, allocate=None, verify=None)


def _shortage(planning: Planning) -> str:
    """Why no layout of the present order can fit, or nothing."""
    if planning.fit is None:
        return ""
    room = rooms(planning.schedule, planning.options.capacity)
    for device, bound in lower_bounds(planning.schedule).items():
        if device in room and bound.nbytes > room[device]:
            return (
                f"{device} has {room[device]} bytes and no plan of this order needs less than "
                f"{bound.nbytes} ({bound.method})"
            )
    return ""


def _unplanned(planning: Planning, error: AllocError) -> AllocError:
    """The last error, with the bound that makes the limit impossible or what is not known."""
    short = _shortage(planning) or "no bound excludes the limit, but no plan was found"
    return AllocError(f"{error}; {short}{_placed_there(planning)}")


def _placed_there(planning: Planning) -> str:
    """The six largest values on the device that the bound says is too small, else on those with a
    limit; nothing before memory is laid out."""
    if planning.fit is None:
        return ""
    schedule = planning.schedule
    values, room = schedule.values.values(), rooms(schedule, planning.options.capacity)
    bounds = lower_bounds(schedule)
    short = [d for d, n in room.items() if d in bounds and bounds[d].nbytes > n]
    found = ""
    for device in short or [d for d in planning.options.capacity if d in room]:
        there = [v for v in values if v.device == device and not v.external and v.same_as is None]
        there.sort(key=lambda v: -v.nbytes)
        rows = ", ".join(f"%{v.name} {v.nbytes}" for v in there[:6])
        found += f"; placed on {device}: {len(there)} values, the largest {rows}"
    return found


def _path(schedule: Schedule) -> str:
    """`6 waits, critical path 12.3 us`."""
    seconds, _ = critical_path(schedule)
    return f"{wait_count(schedule)} waits, critical path {seconds * 1e6:.1f} us"


def run_passes_until(planning: Planning, title: str) -> Planning:
    """Run the passes before the one called `title`."""
    with unscoped():
        for name, step in PASSES:
            if name == title:
                break
            planning = step(planning)
    return planning
