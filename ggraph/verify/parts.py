"""Is nothing read of a partial copy but the slices that it moves? Floor 6: knows no order.

A partial copy's `writes` are an upper bound: the slices that its indices do not name hold what was
there before. Launches of a graph are asked in `wiring`, since the op's record says which slices
they pick; here it is copies and the host, and where there is no graph the launches too.

Legend: c, k commands, k the copy that brought a value, a an access, t tensors.
"""

from collections.abc import Iterator, Mapping, Sequence

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Tensor
from ggraph.verify.report import CounterExample, at_command
from ggraph.verify.spans import merged
from ggraph.verify.wiring import original

Part = tuple[Command, Sequence[Access]]  # a partial copy, and what the host had read to choose it


def part_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command that may read a slice which a partial copy has not moved.

    Relies on what `step_faults` and `wiring_faults` have seen.
    """
    tensors = plan.graph.named
    alike = {} if tensors else _alike(plan)
    looks: dict[str | None, Sequence[Access]] = {}  # tensor -> what the host read of it last
    last = {a.value: c for c in plan.schedule if c.chosen_by is not None for a in c.writes}
    # value -> the partial copies that fill it; a state's came in the run before, by other indices
    brought: dict[str, list[Part]] = {
        state: [(last[v], ())] for state, v in plan.schedule.carried.items() if v in last
    }
    for i, c in enumerate(plan.schedule):
        if c.do is Do.HOST_READ:
            looks[c.node] = c.reads
        if c.chosen_by is not None and (other := _foreign(c, tensors)):
            message = f"a copy chosen by {c.chosen_by!r} for {c.node!r} writes {other!r}"
            yield at_command(plan, i, "declaration", message)
        this = (c, looks.get(c.chosen_by, ()))
        for a, part in ((r, part) for r in c.reads for part in brought.get(r.value, ())):
            if c.do is Do.LAUNCH:
                sound = bool(tensors) or _reads_indices(c, part[1], alike)
            else:
                sound = _same_slices(this, a, part, tensors)
            if not sound:
                message = f"reads slices of {a.value!r} that its partial copy need not bring"
                yield at_command(plan, i, "declaration", message)
        for a in c.writes if c.chosen_by is not None else ():
            if plan.schedule.values[a.value].kept:
                message = f"brings slices of {a.value!r}, which must be whole when the run ends"
                yield at_command(plan, i, "declaration", message)
            brought.setdefault(a.value, []).append(this)


def _foreign(c: Command, tensors: Mapping[str, Tensor]) -> str:
    """Another tensor than its own that a partial copy fills; staging is no tensor."""
    return next((w.value for w in c.writes if w.value in tensors and w.value != c.node), "")


def _same_slices(this: Part, a: Access, part: Part, tensors: Mapping[str, Tensor]) -> bool:
    """Whether `this` is a copy that moves on just the slices that `part` brought: as many bytes
    from where those begin, chosen by the same indices, and in a graph cut into as many slices."""
    (c, mine), (k, theirs) = this, part
    if c.chosen_by is None or list(k.writes) != [a]:
        return False
    if not tensors:
        return c.chosen_by == k.chosen_by and mine == theirs
    t, s = (tensors[x.node or ""] for x in (c, k))
    one, other = (original(tensors[x.chosen_by or ""]) for x in (c, k))
    return one is other and t.shape[:1] == s.shape[:1]


def _reads_indices(c: Command, looked: Sequence[Access], alike: Mapping[str, str]) -> bool:
    """Whether a launch, of which nothing but its declaration is known, reads the indices too: what
    the host read, or what whole copies made of it or it of, and no byte of them beside."""
    seen, read = (_ranges(side, alike) for side in (looked, c.reads))
    return not seen.keys().isdisjoint(read) and all(
        merged(seen[name] + read[name]) == merged(seen[name]) for name in seen.keys() & read.keys()
    )


def _ranges(
    accesses: Sequence[Access], alike: Mapping[str, str]
) -> Mapping[str, list[tuple[int, int]]]:
    """The bytes that are touched, by what the values are alike to."""
    found: dict[str, list[tuple[int, int]]] = {}
    for a in (a for a in accesses if a.start < a.stop):
        found.setdefault(alike.get(a.value, a.value), []).append((a.start, a.stop))
    return found


def _alike(plan: Plan) -> Mapping[str, str]:
    """For each value that a whole copy reads or writes, one of those that such copies tie it to."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = name = above[above[name]]
        return name

    def whole(a: Access) -> bool:
        return (a.start, a.stop) == (0, plan.schedule.values[a.value].nbytes)

    for c in (c for c in plan.schedule if c.do is Do.COPY and c.chosen_by is None):
        if len(c.reads) == len(c.writes) == 1 and all(map(whole, (*c.reads, *c.writes))):
            above[top(c.reads[0].value)] = top(c.writes[0].value)
    return {name: top(name) for name in list(above)}
