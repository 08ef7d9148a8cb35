"""Is each command what an executor carries out of it? Floor 6: one command at a time, no order.

A command of a plan with a graph is carried out by its node: a launch computes it, a copy moves one
range, the host feeds or fetches one tensor. What a declaration says beyond that would be proved and
not done, so it is refused. Legend: t the command's node, a an access, r reads, w writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Kind, Tensor
from ggraph.verify.report import CounterExample, at_command

_NODELESS = (Do.RECORD, Do.WAIT, Do.HOST_SYNC, Do.HOST_FREE)


def step_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command that would be carried out otherwise than declared; none without a graph."""
    tensors = plan.graph.named
    if not tensors:
        return
    rooms = _rooms(plan, tensors)
    for i, c in enumerate(plan.schedule):
        for message in (*_step(c, tensors), *_writers(c, tensors, rooms)):
            yield at_command(plan, i, "declaration", message)


def _rooms(plan: Plan, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Values that launches touch and that are no tensors: what they need beside operands."""
    launches = (c for c in plan.schedule if c.do is Do.LAUNCH)
    touched = {a.value for c in launches for a in (*c.reads, *c.writes)}
    return frozenset(touched - tensors.keys())


def _step(c: Command, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if c.do in _NODELESS:
        return
    t = tensors.get(c.node or "")
    if t is None:
        yield f"{c.do.value} of {c.node!r}, which is no tensor of the graph"
    elif c.do is Do.LAUNCH:
        if t.is_leaf or t.is_view:
            yield f"launch of {t.name!r}, which nothing computes"
    elif c.do is Do.HOST_READ:
        yield from _one_range(c, c.reads, t)
    elif c.do is Do.HOST_WRITE:
        if not (t.is_leaf and t.kind is Kind.INPUT) or any(a.start for a in c.writes):
            yield f"host_write of {t.name!r}: the host writes inputs, from their value's first byte"
        yield from _one_range(c, c.writes, t)
    elif len(c.reads) != 1 or len(c.writes) != 1:
        yield f"copy of {len(c.reads)} ranges to {len(c.writes)}: one is moved, to one"
    elif c.chosen_by is not None:
        yield from _one_range(c, c.writes, t)


def _one_range(c: Command, accesses: Sequence[Access], t: Tensor) -> Iterator[str]:
    """All of a tensor at once; nothing of one that has no bytes."""
    sizes = [a.stop - a.start for a in accesses]
    if sizes != [t.nbytes] and (sizes or t.nbytes):
        yield f"{c.do.value} of {t.name!r} in ranges of {sizes} bytes, expected one of {t.nbytes}"


def _writers(c: Command, tensors: Mapping[str, Tensor], rooms: AbstractSet[str]) -> Iterator[str]:
    """A tensor's bytes come from its own launch, from copies if it is one, from the host if it is
    an input; what launches need beside tensors, from launches alone."""
    for a in () if c.do is Do.HOST_FREE else c.writes:
        t = tensors.get(a.value)
        if a.value in rooms and c.do is not Do.LAUNCH:
            yield f"{c.do.value} of {c.node!r} writes {a}, which launches fill themselves"
        if t is None or (c.do is not Do.COPY and c.node == t.name):
            continue
        if c.do is not Do.COPY or not (t.op == "copy" or (t.is_leaf and t.kind is Kind.INPUT)):
            yield f"{c.do.value} of {c.node!r} writes {a}, which is not its result"
