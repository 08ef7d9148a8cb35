"""What a plan rounds: ops that say so in their record, and kernels of devices that say so."""

from dataclasses import dataclass

from ggraph.plan import Plan
from ggraph.verify.unplanned import launches, named


@dataclass(frozen=True)
class Approximation:
    """Launches of one op that round alike. `device` is "" where the op's own record says so."""

    op: str
    device: str
    rounds: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return named(self.op, self.device, self.rounds, self.tensors)


def approximations(plan: Plan) -> tuple[Approximation, ...]:
    """Everything in the plan that rounds beyond NumPy's meaning of the graph as it was written."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for t, spec in launches(plan):
        own = t.spec.rounds if t.spec is not None else ""
        for device, rounds in (("", own), (spec.name, spec.rounds(t))):
            if rounds:
                found.setdefault((t.op, device, rounds), []).append(t.name)
    return tuple(Approximation(*key, tuple(names)) for key, names in sorted(found.items()))
