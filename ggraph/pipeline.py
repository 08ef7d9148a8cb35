"""The order of the passes, as one literal list. Floor 7: knows every pass, and no device.

    graph -rewrite-> graph -place-> placement -split-> splits -order-> schedule
          -allocate-> memory map -verify-> verified plan

Only this file may try again: when memory does not fit, `STRICTER` lists what is tried, in order,
and each attempt leaves a line in the plan's log.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ggraph.alloc import allocate
from ggraph.device import DeviceSpec
from ggraph.errors import AllocError, PlaceError
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import MemoryMap, Plan, Schedule, VerifiedPlan
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.verify import verify


@dataclass(frozen=True)
class Options:
    """How to plan. The defaults are what `Session` uses."""

    pins: tuple[str, ...] = ()  # "regex=device", as llama.cpp's -ot
    layers: Mapping[str, int] = field(default_factory=dict)  # layers per device, in order
    streams: int = 1  # compute streams per device, at most what the device has
    copies: int = 1  # rotating slots of every input
    memory: str = "hb"  # allocator mode: "hb", "offline" or "ggml"
    offline_seconds: float = 0.2  # bound on the search of mode "offline"
    capacity: Mapping[str, int] = field(default_factory=dict)  # bytes per device, below its own
    forced_sync: tuple[str, ...] = ()  # upstream's flag: the host waits after these tensors
    rewrites: bool = True


@dataclass(frozen=True, eq=False)
class Draft:
    """What the passes have made so far; each pass reads the last noun and adds its own."""

    graph: Graph
    devices: tuple[DeviceSpec, ...]
    options: Options
    made: Mapping[str, Any] = field(default_factory=dict)  # pass name -> its result
    log: tuple[str, ...] = ()


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
        d.made["split"], streams=o.streams, n_copies=o.copies, forced_sync=frozenset(o.forced_sync)
    )


def _allocate(d: Draft) -> MemoryMap:
    o = d.options
    return allocate(
        d.made["order"],
        mode=o.memory,
        capacity=o.capacity,
        offline_seconds=o.offline_seconds,
    )


def _verify(d: Draft) -> VerifiedPlan:
    return verify(Plan(d.made["order"], d.made["allocate"], d.log))


PASSES: tuple[tuple[str, Pass], ...] = (
    ("rewrite", _rewrite),
    ("place", _place),
    ("split", _split),
    ("order", _order),
    ("allocate", _allocate),
    ("verify", _verify),
)

STRICTER: tuple[tuple[str, Callable[[Options], Options]], ...] = (
    ("search offsets for longer", lambda o: replace(o, memory="offline", offline_seconds=2.0)),
    ("one stream per device", lambda o: replace(o, streams=1)),
    ("one slot per input", lambda o: replace(o, copies=1)),
)


def make_plan(
    graph: Graph, devices: Sequence[DeviceSpec], options: Options | None = None
) -> VerifiedPlan:
    """A verified plan of `graph` on `devices` (priority order, the fallback last).

    Raises PlaceError, AllocError (after the stricter options have failed too) or PlanError with
    the verifier's counter-example.
    """
    if not devices:
        raise PlaceError("a plan needs at least one device, got none")
    tried = options or Options()
    draft = Draft(graph, tuple(devices), tried)
    for remedy, stricter in (*STRICTER, ("", None)):
        try:
            return run_passes(draft)
        except AllocError as error:
            if stricter is None:
                raise
            note = f"pipeline: {error}; trying: {remedy}"
            draft = replace(draft, options=stricter(draft.options), log=(*draft.log, note))
    raise AssertionError("unreachable: the last attempt returns or raises")


def run_passes(draft: Draft) -> VerifiedPlan:
    """Run the list once; the log gains one line per pass with its milliseconds."""
    for title, step in PASSES:
        begun = time.perf_counter()
        result = step(draft)
        took_ms = (time.perf_counter() - begun) * 1e3
        made = {**draft.made, title: result}
        draft = replace(draft, made=made, log=(*draft.log, f"{title}: {took_ms:.1f} ms"))
    verified: VerifiedPlan = draft.made["verify"]
    return verified
