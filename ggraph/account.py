"""What a plan takes of each device's memory, by what it is for.

Device by device: weights as the device keeps them (packed copies included), states, the results of
ops, what launches need beside their operands, the host's staging copies, and constants (tables that
a program brings along, such as the frequencies of a rotation). In an arena values
share bytes: those on which nothing but such needs ever lies count as scratch, the rest as compute.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ggraph.device import HOST
from ggraph.plan import Do, Plan, Region
from ggraph.tensor import Kind, Tensor


@dataclass(frozen=True)
class Account:
    """Bytes of one device, or of the host."""

    device: str
    weights: int = 0
    states: int = 0
    compute: int = 0
    scratch: int = 0
    staging: int = 0
    constants: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        kinds = self.weights, self.states, self.compute, self.scratch, self.staging
        return sum(kinds) + self.constants


def accounts(plan: Plan) -> tuple[Account, ...]:
    """One row per device of the plan, and one for the host where it holds staging copies."""
    placement = plan.schedule.splits.placement
    devices = [d.name for d in placement.devices]
    found = (_account(plan, name) for name in (*devices, HOST))
    return tuple(a for a in found if a.total or a.device != HOST)


def _account(plan: Plan, device: str) -> Account:
    arenas = [b for b in plan.memory.buffers.values() if b.device == device and not b.external]
    whole = sum(b.nbytes for b in arenas)
    if device == HOST:
        return Account(device, staging=whole)
    compute = sum(_covered(_regions(plan, b.name), b.alignment) for b in arenas)
    compute = min(compute, whole)  # the last value of an arena is not rounded up
    return Account(
        device,
        weights=sum(_weights(plan, device)),
        states=sum(
            v.nbytes
            for t in plan.graph.leaves(Kind.STATE)
            if (v := plan.schedule.values[t.name]).device == device
        ),
        compute=compute,
        scratch=whole - compute,
        constants=_constants(plan, device),
    )


def _constants(plan: Plan, device: str) -> int:
    spec = plan.schedule.splits.placement.device_called(device)
    nodes = {c.node for c in plan.schedule if c.do is Do.LAUNCH and c.actor.device == device}
    return sum(spec.constant_bytes(t) for t in plan.graph if t.name in nodes and t.spec is not None)


def _weights(plan: Plan, device: str) -> Iterator[int]:
    """What the device keeps of each weight that lies there."""
    users, placement = plan.graph.users(), plan.schedule.splits.placement
    spec = placement.device_called(device)
    for t in plan.graph.leaves(Kind.WEIGHT):
        if placement.of[t.name].device == device:
            yield spec.held_bytes(t, tuple(_readers(t, users)))


def _readers(t: Tensor, users: Mapping[str, Sequence[Tensor]]) -> Iterator[Tensor]:
    """Who reads a leaf, itself or through views; a view that nobody reads is a reader."""
    for u in users[t.name]:
        if u.is_view and users[u.name]:
            yield from _readers(u, users)
        else:
            yield u


def _regions(plan: Plan, buffer: str) -> list[Region]:
    """Where the graph's tensors lie in an arena: everything else there is a launch's need."""
    tensors = {t.name for t in plan.graph}
    return [r for v, r in plan.memory.regions.items() if r.buffer == buffer and v in tensors]


def _covered(regions: list[Region], alignment: int) -> int:
    """Bytes on which some of these regions lies, each up to a multiple of the alignment."""
    spans = sorted(
        (o, o + -(-r.nbytes // alignment) * alignment) for r in regions for o in r.offsets
    )
    total = reached = 0
    for start, stop in spans:
        total += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return total
