"""Has every launch all bytes that its device says it needs beside operands? Knows no order.

A device's `needs` belong to the op registry, not to the plan. A launch must declare each of them in
full, under the name that says whose it is: one of its own as written, one that it shares as written
or read, one that it offers as written or not at all. That what is read was filled by the launch
that comes first is the proof's business, as for any other value; that it was made of the same
sources is in the name.
"""

from collections.abc import Container, Iterator

from ggraph.plan import Access, Command, Do, Plan, scratch
from ggraph.tensor import Tensor
from ggraph.verify.report import CounterExample, at_command


def room_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every launch that lacks bytes beside its operands, or touches those of another."""
    tensors = {t.name: t for t in plan.graph}
    for i, c in enumerate(plan.schedule):
        t = tensors.get(c.node or "")
        if c.do is Do.LAUNCH and t is not None:
            for message in _faults(plan, c, t, tensors):
                yield at_command(plan, i, "declaration", message)


def _faults(plan: Plan, c: Command, t: Tensor, tensors: Container[str]) -> Iterator[str]:
    spec = plan.schedule.splits.placement.device_called(c.actor.device)
    known = {t.name, *(s.root.name for s in t.sources)}
    touched = {a.value for a in (*c.reads, *c.writes)}
    for need in spec.needs(t):
        name = scratch(t, need, c.actor)
        whole = Access(name, 0, need.nbytes)
        known.add(name)
        if need.is_offered and name not in touched:
            continue
        if whole not in c.writes and not (need.of and whole in c.reads):
            yield f"needs {need.nbytes} bytes of {name!r} and does not declare them"
    for a in (*c.reads, *c.writes):
        if a.value not in known and a.value not in tensors:
            yield f"touches {a}, which it has no need of"
