"""Do the declarations compute the graph? Floor 6: knows tensors, nothing of order.

Accesses must cover what each tensor's op reads and writes; through copies, staging buffers
included, each tensor must get the bytes of the tensor that the graph names; and every output must
reach the host whole. A plan without a graph (another runtime's) has its declarations alone.
"""

from collections.abc import Iterator, Mapping

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Tensor
from ggraph.verify.report import CounterExample
from ggraph.verify.static import at_command


def wiring_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command and tensor that does not do what the graph says."""
    tensors = {t.name: t for t in plan.graph}
    if not tensors:
        return
    contents = _contents(plan)
    for i, c in enumerate(plan.schedule):
        t = tensors.get(c.node or "")
        for message in _misses(c, t, contents) if t is not None else ():
            yield at_command(plan, i, "declaration", message)
    made = {c.node for c in plan.schedule if c.do in (Do.LAUNCH, Do.COPY)}
    for t in plan.graph:
        if not (t.is_leaf or t.is_view or t.name in made) and t.nbytes:
            message = f"no command computes {t.name!r}"
            yield CounterExample("declaration", message, values=(t.name,))
    read = {c.node for c in plan.schedule if c.do is Do.HOST_READ}
    for t in plan.graph.outputs:
        if t.name not in read:
            yield CounterExample("declaration", f"the host never reads output {t.name!r}")


def _contents(plan: Plan) -> Mapping[str, str]:
    """Value -> the value whose bytes copies have put there; what no copy writes is its own."""
    source = {
        w.value: r.value
        for c in plan.schedule
        if c.do is Do.COPY
        for w, r in zip(c.writes, c.reads, strict=False)
    }
    found = {}
    for name in plan.schedule.values:
        origin, seen = name, {name}
        while (below := source.get(origin)) is not None and below not in seen:
            origin = below
            seen.add(below)
        found[name] = origin
    return found


def _misses(c: Command, t: Tensor, contents: Mapping[str, str]) -> Iterator[str]:
    if c.do is Do.LAUNCH:
        yield from _launch(c, t)
        return
    # A copy node means its source's bytes, every other tensor its own, whatever way they take.
    meant = contents.get(t.sources[0].root.name if t.op == "copy" else t.root.name)
    moved = c.reads if c.do is Do.HOST_READ else c.writes
    for a in moved:
        if contents[a.value] != meant:
            yield f"{c.do.value} for {t.name!r}, but {a.value!r} has the bytes of another"
    if c.do is Do.HOST_READ and sum(a.stop - a.start for a in moved) < t.nbytes:
        yield f"reads less than the {t.nbytes} bytes of output {t.name!r}"


def _launch(c: Command, t: Tensor) -> Iterator[str]:
    for s in t.sources:
        for start, stop in s.byte_ranges():
            if not _covers(c.reads, s.root.name, start, stop):
                yield f"reads bytes [{start}, {stop}) of {s.root.name!r} without declaring it"
    if not _covers(c.writes, t.name, 0, t.nbytes):
        yield f"writes {t.nbytes} bytes of {t.name!r} without declaring it"


def _covers(accesses: tuple[Access, ...], value: str, start: int, stop: int) -> bool:
    reached = start
    for a in sorted((a for a in accesses if a.value == value), key=lambda a: a.start):
        if a.start <= reached:
            reached = max(reached, a.stop)
    return reached >= stop
