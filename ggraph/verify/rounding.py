"""What a plan rounds: ops that say so in their record, and kernels of devices that say so."""

from collections.abc import Iterator
from dataclasses import dataclass

from ggraph.device import DeviceSpec
from ggraph.door import checked
from ggraph.errors import printable
from ggraph.plan import Do, Plan
from ggraph.tensor import Tensor

NAMED = 3  # tensors that a line names


def launches(plan: Plan) -> Iterator[tuple[Tensor, DeviceSpec]]:
    """Each tensor of the graph that some launch computes, and where."""
    placement = plan.schedule.splits.placement
    tensors = plan.graph.named
    for c in plan.schedule:
        t = tensors.get(c.node or "") if c.do is Do.LAUNCH else None
        if t is not None and t.spec is not None and t.size:
            yield t, placement.device_called(c.actor.device)


def named(op: str, device: str, what: str, tensors: tuple[str, ...]) -> str:
    """A line for launches of one op of which the same is to be said."""
    where = f" on {device}" if device else ""
    first = ", ".join(tensors[:NAMED]) + (", .." if len(tensors) > NAMED else "")
    return printable(f"{op}{where}: {what} ({len(tensors)}: {first})")


@dataclass(frozen=True)
class Approximation:
    """Launches of one op that round alike. `device` is "" where the op's own record says so."""

    op: str
    device: str
    rounds: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return named(self.op, self.device, self.rounds, self.tensors)


@checked
def approximations(plan: Plan) -> tuple[Approximation, ...]:
    """Everything in the plan that rounds beyond NumPy's meaning of the graph as it was written."""
    return roundings(plan)


def roundings(plan: Plan) -> tuple[Approximation, ...]:
    """`approximations` of a plan whose members were asked already."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for t, spec in launches(plan):
        own = t.spec.rounds if t.spec is not None else ""
        for device, rounds in (("", own), (spec.name, spec.rounds(t))):
            if rounds:
                found.setdefault((t.op, device, rounds), []).append(t.name)
    return tuple(Approximation(*key, tuple(names)) for key, names in sorted(found.items()))
