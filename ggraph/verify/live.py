"""A lower bound on the arenas: bytes that must be live at once in enqueue order.

Enqueue order is one legal execution, so no layout that passes the proof can be smaller. Counted
byte by byte: a byte of a value is live from its first access to its last, on every device apart.
Rotating slots count once: the others exist for the sake of concurrency between runs.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from ggraph.plan import Do, Plan

Piece = tuple[int, int, int]  # bytes, first and last command that touch them


def live_bytes(plan: Plan) -> int:
    """Sum over devices of the largest number of arena bytes live at one command.

    A result that may replace a source whose last access this is counts as if it did.
    """
    values, carried = plan.schedule.values, plan.schedule.carried
    steps = len(plan.schedule.commands)
    made = {a.value for c in plan.schedule if c.do is not Do.HOST_FREE for a in c.writes}
    pieces = {name: list(_pieces(found)) for name, found in _touched(plan).items()}
    change: dict[str, list[int]] = {}
    for name, found in pieces.items():
        value = values[name]
        row = change.setdefault(value.device, [0] * (steps + 1))
        outlives = (value.kept or value.initial) and name not in carried
        for nbytes, first, last in found:
            row[first if name in made else 0] += nbytes
            row[steps if outlives else last + 1] -= nbytes
    for name in pieces:
        row = change[values[name].device]
        for at, saved in _in_place(plan, name, pieces).items():
            row[at] -= saved
            row[at + 1] += saved
    return sum(max(accumulate(row)) for row in change.values())


def _touched(plan: Plan) -> dict[str, list[Piece]]:
    """Per value that lies in an arena: [start, stop) and command of each access."""
    found: dict[str, list[Piece]] = {}
    owned = {name for name in plan.schedule.values if not _external(plan, name)}
    for i, c in enumerate(plan.schedule):
        for a in () if c.do is Do.HOST_FREE else (*c.reads, *c.writes):
            if a.start < a.stop and a.value in owned:
                found.setdefault(a.value, []).append((a.start, a.stop, i))
    return found


def _pieces(accesses: list[Piece]) -> Iterator[Piece]:
    """The value's bytes cut where accesses begin or end: size, first and last access of each."""
    cuts = sorted({at for start, stop, _ in accesses for at in (start, stop)})
    for start, stop in pairwise(cuts):
        at = [i for a, b, i in accesses if a <= start and stop <= b]
        if at:
            yield stop - start, at[0], at[-1]


def _in_place(plan: Plan, name: str, pieces: dict[str, list[Piece]]) -> dict[int, int]:
    """Bytes of `name` that may, at the command that first writes them, lie on a dying source."""
    value = plan.schedule.values[name]
    born = _sums((first, nbytes) for nbytes, first, _ in pieces[name])
    saved: dict[int, int] = {}
    for source in (*value.may_replace, *([value.same_as] if value.same_as else [])):
        if plan.schedule.values[source].device == value.device:
            dying = _sums((last, nbytes) for nbytes, _, last in pieces.get(source, ()))
            for at in born.keys() & dying.keys():
                saved[at] = max(saved.get(at, 0), min(born[at], dying[at]))
    return saved


def _sums(items: Iterator[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, n in items:
        found[key] = found.get(key, 0) + n
    return found


def _external(plan: Plan, name: str) -> bool:
    """Whether `name` lies in a buffer of the caller's."""
    return plan.memory.buffers[plan.memory.regions[name].buffer].external
