"""What a plan rounds: ops that say so in their record, and kernels of devices that say so."""

from dataclasses import dataclass

from ggraph.errors import printable
from ggraph.plan import Do, Plan

NAMED = 3  # tensors that a line names


@dataclass(frozen=True)
class Approximation:
    """Launches of one op that round alike. `device` is "" where the op's own record says so."""

    op: str
    device: str
    rounds: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        named = ", ".join(self.tensors[:NAMED]) + (", .." if len(self.tensors) > NAMED else "")
        return printable(f"{self.op}{where}: {self.rounds} ({len(self.tensors)}: {named})")


def approximations(plan: Plan) -> tuple[Approximation, ...]:
    """Everything in the plan that rounds beyond NumPy's meaning of the graph as it was written."""
    specs = {d.name: d for d in plan.schedule.splits.placement.devices}
    tensors = {t.name: t for t in plan.graph}
    found: dict[tuple[str, str, str], list[str]] = {}
    for c in plan.schedule:
        t = tensors.get(c.node or "") if c.do is Do.LAUNCH else None
        if t is not None and t.spec is not None and t.size:
            ways = (("", t.spec.rounds), (c.actor.device, specs[c.actor.device].rounds(t)))
            for device, rounds in ways:
                if rounds:
                    found.setdefault((t.op, device, rounds), []).append(t.name)
    return tuple(Approximation(*key, tuple(names)) for key, names in sorted(found.items()))
