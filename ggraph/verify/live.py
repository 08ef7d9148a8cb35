"""A lower bound on the arenas: bytes that must be live at once in enqueue order.

Enqueue order is one legal execution, so no layout that passes the proof can be smaller. Counted
byte by byte: a byte of a value is live from its first access to its last, on every device apart.
Rotating slots count once: the others exist for the sake of concurrency between runs.
"""

from collections.abc import Mapping
from itertools import accumulate

from ggraph.plan import Do, Plan
from ggraph.verify.spans import first_and_last

Uses = dict[tuple[int, int], tuple[int, int]]  # [start, stop) -> first and last command


def live_bytes(plan: Plan) -> int:
    """Sum over devices of the largest number of arena bytes live at one command.

    A result that may replace a source whose last access this is counts as if it did.
    """
    values, carried = plan.schedule.values, plan.schedule.carried
    steps = len(plan.schedule.commands)
    made = {a.value for c in plan.schedule if c.do is not Do.HOST_FREE for a in c.writes}
    change = {d: [0] * (steps + 1) for d in {v.device for v in values.values()}}
    sources = {name for v in values.values() for name in (*v.may_replace, v.same_as)}
    born: dict[str, dict[int, int]] = {}  # value -> command -> bytes first touched by it
    dying: dict[str, dict[int, int]] = {}  # of values that others may lie on: bytes last touched
    for name, uses in _touched(plan).items():
        v, row = values[name], change[values[name].device]
        outlives = (v.kept or v.initial) and name not in carried
        for nbytes, first, last in first_and_last(uses):
            row[first if name in made else 0] += nbytes
            row[steps if outlives else last + 1] -= nbytes
            if v.may_replace or v.same_as is not None:
                _count(born.setdefault(name, {}), first, nbytes)
            if name in sources:
                _count(dying.setdefault(name, {}), last, nbytes)
    for name, at in born.items():
        row = change[values[name].device]
        for i, saved in _in_place(plan, name, at, dying).items():
            row[i] -= saved
            row[i + 1] += saved
    return sum(max(accumulate(row)) for row in change.values())


def _count(found: dict[int, int], at: int, nbytes: int) -> None:
    found[at] = found.get(at, 0) + nbytes


def _touched(plan: Plan) -> dict[str, Uses]:
    """Per value that lies in an arena: the ranges that are accessed, first and last by whom."""
    found: dict[str, Uses] = {}
    buffers, regions = plan.memory.buffers, plan.memory.regions
    owned = {v for v in plan.schedule.values if not buffers[regions[v].buffer].external}
    for i, c in enumerate(plan.schedule):
        for a in () if c.do is Do.HOST_FREE else (*c.reads, *c.writes):
            if a.value in owned:
                uses = found.setdefault(a.value, {})
                span = (a.start, a.stop)
                uses[span] = (uses[span][0] if span in uses else i, i)
    return found


def _in_place(
    plan: Plan, name: str, born: Mapping[int, int], dying: Mapping[str, Mapping[int, int]]
) -> dict[int, int]:
    """Bytes of `name` that may, at the command that first writes them, lie on a dying source."""
    value = plan.schedule.values[name]
    saved: dict[int, int] = {}
    for source in {*value.may_replace, value.same_as} & dying.keys():
        if source is not None and plan.schedule.values[source].device == value.device:
            gone = dying[source]
            for at in born.keys() & gone.keys():
                saved[at] = max(saved.get(at, 0), min(born[at], gone[at]))
    return saved
