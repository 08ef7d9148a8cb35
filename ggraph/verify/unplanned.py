"""What launches of a plan take that the plan does not have: named, since it is not proved."""

from collections.abc import Iterator

from ggraph.device import DeviceSpec
from ggraph.errors import printable
from ggraph.plan import Do, Plan
from ggraph.tensor import Tensor

TEMPORARIES = "temporaries of NumPy"
NAMED = 3  # tensors that a line names


def launches(plan: Plan) -> Iterator[tuple[Tensor, DeviceSpec]]:
    """Each tensor of the graph that some launch computes, and where."""
    specs = {d.name: d for d in plan.schedule.splits.placement.devices}
    tensors = {t.name: t for t in plan.graph}
    for c in plan.schedule:
        t = tensors.get(c.node or "") if c.do is Do.LAUNCH else None
        if t is not None and t.spec is not None and t.size:
            yield t, specs[c.actor.device]


def named(op: str, device: str, what: str, tensors: tuple[str, ...]) -> str:
    """A line for launches of one op of which the same is to be said."""
    where = f" on {device}" if device else ""
    first = ", ".join(tensors[:NAMED]) + (", .." if len(tensors) > NAMED else "")
    return printable(f"{op}{where}: {what} ({len(tensors)}: {first})")


def unplanned(plan: Plan) -> tuple[str, ...]:
    """A line per op and device that takes memory of its own while it runs: it has no kernel."""
    found: dict[tuple[str, str], list[str]] = {}
    for t, spec in launches(plan):
        if not spec.compiled(t):
            found.setdefault((t.op, spec.name), []).append(t.name)
    return tuple(named(*key, TEMPORARIES, tuple(names)) for key, names in sorted(found.items()))
