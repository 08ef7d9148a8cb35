"""A lower bound on the arenas: bytes that must be live at once in enqueue order. Floor 6.

Enqueue order is one legal execution, so no sound layout can be smaller. A result that may replace
a source for which this is the last access is counted as if it did.
"""

from ggraph.plan import Plan


def live_bytes(plan: Plan) -> int:
    """The largest sum, over all commands, of the sizes of the values live at it."""
    values, commands = plan.schedule.values, plan.schedule.commands
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, c in enumerate(commands):
        for a in (*c.reads, *c.writes):
            root = _ground(plan, a.value)
            first.setdefault(root, i)
            last[root] = i
    change = [0] * (len(commands) + 1)
    for name, start in first.items():
        value = values[name]
        if value.external:
            continue
        stop = len(commands) if value.kept else last[name] + 1
        nbytes = value.nbytes * value.slots
        change[0 if value.kept or value.initial else start] += nbytes
        change[stop] -= nbytes
    for name, start in first.items():
        dying = [r for r in values[name].may_replace if last.get(_ground(plan, r)) == start]
        sizes = [values[_ground(plan, r)].nbytes for r in dying if not values[r].external]
        if sizes and not values[name].external:
            saved = min(values[name].nbytes, max(sizes))
            change[start] -= saved
            change[start + 1] += saved
    peak = now = 0
    for step in change:
        now += step
        peak = max(peak, now)
    return peak


def _ground(plan: Plan, name: str) -> str:
    """The value on whose bytes `name` lies after following overwrites."""
    values = plan.schedule.values
    seen = 0
    while values[name].same_as is not None and seen <= len(values):
        name, seen = values[name].same_as or name, seen + 1
    return name
