"""The order of the passes, as one literal list. Floor 7: knows every pass, and no device.

    graph -rewrite-> graph -place-> placement -split-> splits -order-> schedule
          -fit-> schedule -allocate-> memory map -verify-> verified plan

Only this file may try again: when memory does not fit, `REMEDIES` lists what is tried, in order,
and each attempt leaves a line in the plan's log with its price in bytes, waits and time.
`trade_table` shows the same exchange the other way: what concurrency costs in memory.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ggraph.alloc import (
    MODES,
    allocate,
    fitting_edges,
    lower_bounds,
    ordering_offers,
    peak_bytes,
    rooms,
)
from ggraph.device import DeviceSpec
from ggraph.errors import AllocError, GraphError, InputError, PlaceError
from ggraph.graph import Graph
from ggraph.order import critical_path, order
from ggraph.place import place
from ggraph.plan import MemoryMap, Plan, Schedule, VerifiedPlan
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.tensor import line
from ggraph.trade import wait_count, with_orderings
from ggraph.verify import verify

OURS = frozenset("@#")  # in names of copies, staging values, scratch and arenas


@dataclass(frozen=True)
class Options:
    """How to plan. The defaults are what `Session` uses."""

    pins: tuple[str, ...] = ()  # "regex=device", as llama.cpp's -ot
    layers: Mapping[str, int] = field(default_factory=dict)  # layers per device, in order
    streams: int = 1  # compute streams per device, at most what the device has
    copies: int = 1  # rotating slots of every input
    overlap: bool = False  # the next run may be enqueued while this one still computes
    memory: str = "hb"  # allocator mode: "hb", "offline" or "ggml"
    offline_seconds: float = 0.2  # bound on the search of mode "offline"
    capacity: Mapping[str, int] = field(default_factory=dict)  # bytes per device, below its own
    spare_waits: int = 16  # orderings between streams that may be added to make memory fit
    forced_sync: tuple[str, ...] = ()  # upstream's flag: the host waits after these tensors
    rewrites: bool = True

    def __post_init__(self) -> None:
        """InputError for what is no such option: `streams=0`, `pins="w=cpu"`, `layers=3`."""
        for name, (least, holds) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, holds) or not value >= least:
                raise InputError(f"Options({name}={value!r}): expected {_KIND[holds]} from {least}")
        for name in ("pins", "forced_sync"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(v, str) for v in _several(value)):
                raise InputError(f"Options({name}={value!r}): expected several strings")
        for name in ("layers", "capacity"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(map(_is_count, value.values())):
                raise InputError(f"Options({name}={value!r}): expected a number by device")
        for name in ("overlap", "rewrites"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Options({name}={getattr(self, name)!r}): expected True or False")


_KIND: Mapping[Any, str] = {int: "a whole number", int | float: "a number"}
_LIMITS: Mapping[str, tuple[int, Any]] = {
    "streams": (1, int),
    "copies": (1, int),
    "offline_seconds": (0, int | float),
    "spare_waits": (0, int),
}


def _several(value: object) -> Iterable[object]:
    return value if isinstance(value, Iterable) else (None,)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class Draft:
    """What the passes have made so far; each pass reads the last noun and adds its own.

    `trading` allows the pass `fit` to add orderings; `error` is why memory could not be laid out.
    """

    graph: Graph
    devices: tuple[DeviceSpec, ...]
    options: Options
    made: Mapping[str, Any] = field(default_factory=dict)  # pass name -> its result
    log: tuple[str, ...] = ()
    trading: bool = False
    error: AllocError | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule that memory is laid out for."""
        schedule: Schedule = self.made["fit"].schedule
        return schedule


@dataclass(frozen=True, eq=False)
class Fitted:
    """A schedule with the orderings that its memory limit asked for, and what they cost."""

    schedule: Schedule
    notes: tuple[str, ...] = ()


Pass = Callable[[Draft], Any]


def _rewrite(d: Draft) -> Graph:
    return rewrite(d.graph, d.devices) if d.options.rewrites else d.graph


def _place(d: Draft) -> Any:
    return place(d.made["rewrite"], d.devices, d.options.pins, layers=d.options.layers)


def _split(d: Draft) -> Any:
    return split(d.made["place"])


def _order(d: Draft) -> Schedule:
    o = d.options
    return order(
        d.made["split"],
        streams=o.streams,
        n_copies=o.copies,
        forced_sync=frozenset(o.forced_sync),
        overlap=o.overlap,
    )


def _fit(d: Draft) -> Fitted:
    """Few orderings with which each device's arenas fit; none for a device they cannot help."""
    fitted, spare = Fitted(d.made["order"]), d.options.spare_waits
    for device, room in rooms(fitted.schedule, d.options.capacity).items() if d.trading else ():
        edges = fitting_edges(fitted.schedule, device, room)
        if edges is not None and 0 < len(edges) <= spare:
            fitted = _bought(fitted, device, edges)
            spare -= len(edges)
    return fitted


def _bought(fitted: Fitted, device: str, edges: Sequence[tuple[int, int]]) -> Fitted:
    old, commands = fitted.schedule, fitted.schedule.commands
    new = with_orderings(old, edges)
    was, now = peak_bytes(old)[device], peak_bytes(new)[device]
    pairs = "; ".join(f"{commands[i].label!r} before {commands[j].label!r}" for i, j in edges)
    note = (
        f"fit: {len(edges)} orderings save {was - now} bytes of {device} ({was} -> {now}), "
        f"{_path(old)} -> {_path(new)}: {pairs}"
    )
    return Fitted(new, (*fitted.notes, note))


def _allocate(d: Draft) -> MemoryMap:
    o = d.options
    return allocate(
        d.schedule,
        mode=o.memory,
        capacity=o.capacity or None,
        offline_seconds=o.offline_seconds,
    )


def _verify(d: Draft) -> VerifiedPlan:
    return verify(Plan(d.schedule, d.made["allocate"], d.log))


PASSES: tuple[tuple[str, Pass], ...] = (
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


def make_plan(
    graph: Graph, devices: Sequence[DeviceSpec], options: Options | None = None
) -> VerifiedPlan:
    """A verified plan of `graph` on `devices` (priority order, the fallback last).

    Raises PlaceError, AllocError (after the remedies have failed too; it states the bytes that no
    plan can do without) or PlanError with the verifier's counter-example.
    """
    draft = run_passes(first_draft(graph, devices, options))
    for remedy in REMEDIES:
        if draft.error is None:
            break
        draft = _again(draft, remedy)
    if draft.error is not None:
        raise _unplanned(draft, draft.error)
    verified: VerifiedPlan = draft.made["verify"]
    return verified


def first_draft(graph: Graph, devices: Sequence[DeviceSpec], options: Options | None) -> Draft:
    """What the passes begin with.

    Raises PlaceError without a device, AllocError for an unknown mode, GraphError for a tensor that
    has a name of ours.
    """
    if not devices:
        raise PlaceError("a plan needs at least one device, got none")
    for t in graph:
        if not OURS.isdisjoint(t.name):
            raise GraphError(f"{line(t)}: names with @ or # are the plan's own; choose another")
    chosen = options or Options()
    if chosen.memory not in MODES:
        known = ", ".join(MODES)
        raise AllocError(f"unknown allocator mode {chosen.memory!r}; known: {known}")
    return Draft(graph, tuple(devices), chosen)


def run_passes(draft: Draft) -> Draft:
    """Run what is missing of the list; the log gains one line per pass with its milliseconds.

    Ends early, with `error` set, where memory cannot be laid out.
    """
    for title, step in PASSES:
        if title in draft.made:
            continue
        begun = time.perf_counter()
        try:
            result = step(draft)
        except AllocError as error:
            return replace(draft, error=error)
        took_ms = (time.perf_counter() - begun) * 1e3
        notes = result.notes if isinstance(result, Fitted) else ()
        log = (*draft.log, f"{title}: {took_ms:.1f} ms", *notes)
        draft = replace(draft, made={**draft.made, title: result}, log=log)
    return draft


def _again(draft: Draft, remedy: Remedy) -> Draft:
    """The passes from `remedy`'s first one on, with its options; or the draft where it is vain."""
    title, change, begin, trading = remedy
    options = change(draft.options)
    if (options, trading) == (draft.options, draft.trading):
        return draft
    failed = f"pipeline: {draft.error} ({_path(draft.schedule)})" if "fit" in draft.made else ""
    note = f"{failed or f'pipeline: {draft.error}'}; trying: {title}"
    if begin == "allocate" and (short := _shortage(draft)):
        note = f"{note}; skipped, since {short}"
        return replace(draft, options=options, log=(*draft.log, note))
    kept = [name for name, _ in PASSES]
    made = {n: draft.made[n] for n in kept[: kept.index(begin)] if n in draft.made}
    log = (*draft.log, note)
    return run_passes(
        replace(draft, options=options, made=made, log=log, trading=trading, error=None)
    )


def _shortage(draft: Draft) -> str:
    """Why no layout of the present order can fit, or nothing."""
    if "fit" not in draft.made:
        return ""
    room = rooms(draft.schedule, draft.options.capacity)
    for device, bound in lower_bounds(draft.schedule).items():
        if device in room and bound.nbytes > room[device]:
            return (
                f"{device} has {room[device]} bytes and no plan of this order needs less than "
                f"{bound.nbytes} ({bound.method})"
            )
    return ""


def _unplanned(draft: Draft, error: AllocError) -> AllocError:
    """The last error, with the bound that makes the limit impossible or what is not known."""
    short = _shortage(draft) or "no bound excludes the limit, but no plan was found"
    return AllocError(f"{error}; {short}{_placed_there(draft)}")


def _placed_there(draft: Draft, most: int = 6) -> str:
    """The largest values on the device that the bound says is too small, else on those with a
    limit; nothing before memory is laid out."""
    if "fit" not in draft.made:
        return ""
    values, room = draft.schedule.values.values(), rooms(draft.schedule, draft.options.capacity)
    bounds = lower_bounds(draft.schedule)
    short = [d for d, n in room.items() if d in bounds and bounds[d].nbytes > n]
    found = ""
    for device in short or [d for d in draft.options.capacity if d in room]:
        there = [v for v in values if v.device == device and not v.external and v.same_as is None]
        there.sort(key=lambda v: -v.nbytes)
        rows = ", ".join(f"%{v.name} {v.nbytes}" for v in there[:most])
        found += f"; placed on {device}: {len(there)} values, the largest {rows}"
    return found


def _path(schedule: Schedule) -> str:
    """`6 waits, critical path 12.3 us`."""
    seconds, _ = critical_path(schedule)
    return f"{wait_count(schedule)} waits, critical path {seconds * 1e6:.1f} us"


@dataclass(frozen=True)
class Trade:
    """One way to run a graph: with how much concurrency, at what price.

    `added` of the `waits` were bought to save memory; `lost_bytes` is what this much concurrency
    takes beyond one stream.
    """

    streams: int
    added: int
    waits: int
    nbytes: int
    lost_bytes: int
    critical_path_s: float


def trade_table(
    graph: Graph, devices: Sequence[DeviceSpec], options: Options | None = None, *, most: int = 4
) -> tuple[Trade, ...]:
    """Bytes of all arenas against waits and time, per number of streams, in `hb` mode.

    For each number of streams up to the devices' largest: the schedule as ordered, then with up to
    `most` (and `spare_waits`) further orderings, each the one that saves most. Raises as
    `make_plan` does for graphs that cannot be placed; no limit of memory is applied.
    """
    start = run_passes_until(first_draft(graph, devices, options), "order")
    found: list[Trade] = []
    for streams in range(1, max(d.streams for d in devices) + 1):
        schedule = _order(replace(start, options=replace(start.options, streams=streams)))
        for added in range(1 + min(most, start.options.spare_waits)):
            nbytes = sum(peak_bytes(schedule).values())
            lost = max(0, nbytes - found[0].nbytes) if found else 0
            path, _ = critical_path(schedule)
            found.append(Trade(streams, added, wait_count(schedule), nbytes, lost, path))
            best = next(iter(ordering_offers(schedule)), None)
            if best is None or best.bytes_saved <= 0:
                break
            schedule = with_orderings(schedule, [(best.before, best.after)])
    return tuple(found)


def run_passes_until(draft: Draft, title: str) -> Draft:
    """Run the passes before the one called `title`."""
    for name, step in PASSES:
        if name == title:
            break
        draft = replace(draft, made={**draft.made, name: step(draft)})
    return draft


def fastest(rows: Sequence[Trade], limit: int) -> Trade:
    """The row with the shortest critical path within `limit` bytes; of equals the smallest.

    Raises AllocError where none fits.
    """
    fits = [r for r in rows if r.nbytes <= limit]
    if not fits:
        least = min((r.nbytes for r in rows), default=0)
        raise AllocError(f"no way to run it needs {limit} bytes or less; the least is {least}")
    return min(fits, key=lambda r: (r.critical_path_s, r.nbytes, r.waits))
