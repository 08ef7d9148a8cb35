"""Is nothing read of a partial copy but the slices that it moves? Floor 6: knows no order.

A partial copy's `writes` are an upper bound: the slices that its indices do not name hold what was
there before. Launches of a graph are asked in `wiring`, since the op's record says which slices
they pick; here it is copies and the host, and where there is no graph the launches too.

Legend: c, k commands, k the copy that brought a value, a an access, t tensors.
"""

from collections.abc import Iterator, Mapping

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Tensor
from ggraph.verify.report import CounterExample, at_command
from ggraph.verify.wiring import original


def part_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command that may read a slice which a partial copy has not moved.

    Relies on what `step_faults` and `wiring_faults` have seen.
    """
    brought = {a.value: c for c in plan.schedule if c.chosen_by is not None for a in c.writes}
    if not brought:
        return
    tensors = {t.name: t for t in plan.graph}
    alike = {} if tensors else _alike(plan)
    looks = {c.node: c for c in plan.schedule if c.do is Do.HOST_READ}
    for i, c in enumerate(plan.schedule):
        if c.chosen_by is not None and (other := _foreign(c, tensors)):
            message = f"a copy chosen by {c.chosen_by!r} for {c.node!r} writes {other!r}"
            yield at_command(plan, i, "declaration", message)
        for a in c.reads:
            k = brought.get(a.value)
            if k is None:
                continue
            if c.do is Do.LAUNCH:
                sound = bool(tensors) or _reads_indices(c, looks.get(k.chosen_by), alike)
            else:
                sound = _same_slices(c, a, k, tensors)
            if not sound:
                message = f"reads slices of {a.value!r} that its partial copy need not bring"
                yield at_command(plan, i, "declaration", message)


def _foreign(c: Command, tensors: Mapping[str, Tensor]) -> str:
    """Another tensor than its own that a partial copy fills; staging is no tensor."""
    return next((w.value for w in c.writes if w.value in tensors and w.value != c.node), "")


def _same_slices(c: Command, a: Access, k: Command, tensors: Mapping[str, Tensor]) -> bool:
    """Whether `c` is a copy that moves on just the slices that `k` brought: as many bytes from
    where those begin, chosen by the same indices, and in a graph cut into as many slices."""
    same_bytes = [(r.value, r.start, r.stop) for r in k.writes] == [(a.value, a.start, a.stop)]
    if c.chosen_by is None or not same_bytes:
        return False
    if not tensors:
        return c.chosen_by == k.chosen_by
    mine, theirs = (original(tensors[x.chosen_by or ""]) for x in (c, k))
    t, s = (tensors[x.node or ""] for x in (c, k))
    return mine is theirs and t.shape[:1] == s.shape[:1]


def _reads_indices(c: Command, look: Command | None, alike: Mapping[str, str]) -> bool:
    """Whether a launch, of which nothing but its declaration is known, reads the indices too: what
    the host read, or what whole copies made of it or it of."""
    read, looked = ({alike.get(a.value, a.value) for a in x.reads} for x in (c, look or c))
    return look is not None and not read.isdisjoint(looked)


def _alike(plan: Plan) -> Mapping[str, str]:
    """For each value that a whole copy reads or writes, one of those that such copies tie it to."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = name = above[above[name]]
        return name

    for c in plan.schedule:
        if c.do is Do.COPY and c.chosen_by is None:
            names = [a.value for a in (*c.reads, *c.writes)]
            for name in names:
                above[top(name)] = top(names[0])
    return {name: top(name) for name in list(above)}
