"""The mistakes of other engines, as changes to one pass or schedule.

Each function here makes a `Fault` (Schedule -> Schedule), or replaces one pass. None of them looks
at memory: what overlaps is the planner's own doing.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ggraph.alloc import allocate
from ggraph.errors import PlanError
from ggraph.hazards.corpus import Fault
from ggraph.plan import (
    Actor,
    Buffer,
    Command,
    Do,
    MemoryMap,
    Placed,
    Placement,
    Schedule,
    Split,
    Splits,
)
from ggraph.split.copies import with_copies

_WAITS = (Do.WAIT, Do.HOST_SYNC)


def forgets_wait(event: str, on: str = "") -> Fault:
    """Drops the waits for `event`, on the actor `on` only if one is named."""

    def is_it(c: Command) -> bool:
        return c.do in _WAITS and c.event == event and on in ("", str(c.actor))

    return lambda schedule: _without(schedule, is_it, f"wait for {event!r} on {on or 'any actor'}")


def forgets_waits_before(label: str) -> Fault:
    """Drops the waits of its stream that stand directly before the command called `label`."""

    def fault(schedule: Schedule) -> Schedule:
        before: dict[str, list[int]] = {}
        for i, c in enumerate(schedule):
            if c.label == label:
                lost = set(before.get(str(c.actor), []))
                kept = tuple(k for j, k in enumerate(schedule) if j not in lost)
                if lost:
                    return replace(schedule, commands=kept)
                break
            waiting = before.setdefault(str(c.actor), [])
            waiting.append(i) if c.do is Do.WAIT else waiting.clear()
        raise PlanError(f"there is nothing to forget: no wait stands before {label!r}")

    return fault


def forgets_sync(label: str) -> Fault:
    """Drops the host's synchronisation called `label`, such as "end of run"."""

    def is_it(c: Command) -> bool:
        return c.do is Do.HOST_SYNC and c.label == label

    return lambda schedule: _without(schedule, is_it, f"host synchronisation {label!r}")


def _without(schedule: Schedule, is_it: Callable[[Command], bool], what: str) -> Schedule:
    kept = tuple(c for c in schedule if not is_it(c))
    if len(kept) == len(schedule.commands):
        raise PlanError(f"there is nothing to forget: the schedule has no {what}")
    return replace(schedule, commands=kept)


def records_early(event: str) -> Fault:
    """Records `event` in front of the command whose end it should mark."""

    def fault(schedule: Schedule) -> Schedule:
        commands = list(schedule.commands)
        marks = [i for i, c in enumerate(commands) if c.do is Do.RECORD and c.event == event]
        if not marks:
            raise PlanError(f"nothing to record early: the schedule has no event {event!r}")
        (at,) = marks
        mark = commands.pop(at)
        before = max(i for i in range(at) if commands[i].actor == mark.actor)
        commands.insert(before, mark)
        return replace(schedule, commands=tuple(commands))

    return fault


def launches_on(pattern: str, stream: int) -> Fault:
    """Launches the nodes that match on another stream, without a thought for events."""

    def moved(c: Command) -> Command:
        hit = c.do is Do.LAUNCH and re.fullmatch(pattern, c.label)
        return replace(c, actor=Actor(c.actor.device, stream)) if hit else c

    return lambda schedule: replace(schedule, commands=tuple(map(moved, schedule.commands)))


def reads_in_place(placement: Placement) -> Splits:
    """Splits without copies: devices read one another's memory where it lies, as on a computer
    whose GPU shares the host's memory."""
    parts: list[Split] = []
    for t in placement.graph.nodes:
        device = placement.of[t.name].device
        if parts and parts[-1].device == device:
            parts[-1] = replace(parts[-1], nodes=(*parts[-1].nodes, t.name))
        else:
            parts.append(Split(len(parts), device, (t.name,)))
    return Splits(placement, tuple(parts))


def runs_on(homes: Mapping[str, str]) -> Callable[[Placement], Splits]:
    """A split that runs the named nodes on devices of another engine's choice. Operands are copied
    in; nothing is copied back, not even the bytes that a node overwrites (facts S7)."""

    def split(placement: Placement) -> Splits:
        forced = {n: Placed(d, "another engine's choice") for n, d in homes.items()}
        graph, of = with_copies(replace(placement, of={**placement.of, **forced}))
        return reads_in_place(replace(placement, graph=graph, of=of))

    return split


def still_means(states: Mapping[str, str]) -> Fault:
    """The next run still expects each state to hold the named value."""
    return lambda schedule: replace(schedule, carried={**schedule.carried, **states})


def planned_apart(schedule: Schedule, first: tuple[str, ...]) -> MemoryMap:
    """List-order memory for two graphs in one buffer, each planned without regard to the other:
    values that the commands `first` write belong to the first plan, the rest to the second."""
    mine = {a.value for c in schedule if c.label in first for a in c.writes}
    parts = [_part(schedule, names) for names in (mine, set(schedule.values) - mine)]
    plans = [allocate(p, mode="ggml") for p in parts]
    regions = {n: plans[n not in mine].regions[n] for n in schedule.values}
    used = {r.buffer for r in regions.values()}
    buffers: dict[str, Buffer] = {}
    for b in (b for p in plans for b in p.buffers.values() if b.name in used):
        known = buffers.get(b.name, b)
        buffers[b.name] = b if b.nbytes >= known.nbytes else known
    return MemoryMap("ggml", buffers, regions)


def _part(schedule: Schedule, names: set[str]) -> Schedule:
    """What a plan for these values alone gets to see: all others have their place already."""
    values = {
        n: v if n in names else replace(v, external=True, same_as=None, may_replace=())
        for n, v in schedule.values.items()
    }
    commands = tuple(c for c in schedule if not {a.value for a in c.writes} - names)
    return replace(schedule, values=values, commands=commands)
