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
    """Every launch that lacks bytes beside its operands, or touches those of another.

    Relies on what `step_faults` has seen.
    """
    tensors = plan.graph.named
    for i, c in enumerate(plan.schedule):
        if tensors and c.do is Do.LAUNCH:
            for message in _faults(plan, c, tensors[c.node or ""], tensors):
                yield at_command(plan, i, "declaration", message)


def _faults(plan: Plan, c: Command, t: Tensor, tensors: Container[str]) -> Iterator[str]:
    spec = plan.schedule.splits.placement.device_called(c.actor.device)
    needs = [(scratch(t, need, c.actor), need) for need in spec.needs(t)]
    beside = [a for a in (*c.reads, *c.writes) if a.value not in tensors]
    touched, known = {a.value for a in beside}, {name for name, _ in needs}
    for name, need in needs:
        whole = Access(name, 0, need.nbytes)
        held = whole in c.writes or (bool(need.of) and whole in c.reads)
        if not held and (name in touched or not need.is_offered):
            yield f"launch of {t.name!r} has no {need.nbytes} bytes of {name!r}, which {t.op} needs"
    for a in (a for a in beside if a.value not in known):
        yield f"launch of {t.name!r} touches {a}, which {t.op} does not need"
