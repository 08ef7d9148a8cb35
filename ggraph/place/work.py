"""What the passes of placement share."""

from dataclasses import dataclass, field

from ggraph.device import DeviceSpec
from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.place.pins import Pinned
from ggraph.plan import Placed
from ggraph.tensor import Tensor, line


@dataclass(eq=False)
class Work:
    """What `place` has decided so far.

    `readers` maps a root to the ops that read it, directly or through views; `users` maps the
    storage (a leaf, or a result that nothing overwrote) to all ops that read any of its values.
    """

    graph: Graph
    devices: tuple[DeviceSpec, ...]
    fallback: DeviceSpec
    pinned: Pinned
    readers: dict[str, list[Tensor]]
    users: dict[str, list[Tensor]]
    of: dict[str, Placed] = field(default_factory=dict)

    def spec(self, name: str) -> DeviceSpec:
        """The spec of a device by name."""
        return next(d for d in self.devices if d.name == name)

    def at(self, t: Tensor) -> str | None:
        """The device of `t`, None while undecided."""
        found = self.of.get(t.root.name)
        return found.device if found else None

    def put(self, t: Tensor, device: str, cause: str) -> None:
        """Decide where `t` is, and why."""
        self.of[t.name] = Placed(device, cause)

    def able(self, device: DeviceSpec, t: Tensor) -> bool:
        """Whether a device can run `t`, and all that overwrites its bytes, which stays there."""
        heirs = [u for u in self.users[t.name] if u.overwritten is not None and u.storage is t]
        return device.supports(t) and all(map(device.supports, heirs))

    def require(self, t: Tensor, device: str, why: str) -> None:
        """PlaceError unless `device` can run `t`."""
        if not self.spec(device).supports(t):
            raise PlaceError(f"{device} cannot run {line(t)}, but must: {why}")


def begin(graph: Graph, devices: tuple[DeviceSpec, ...], pinned: Pinned) -> Work:
    """Nothing decided yet. PlaceError for devices that are missing or called the same."""
    names = [d.name for d in devices]
    if not devices or len(set(names)) < len(names):
        raise PlaceError(f"placement needs distinct devices, got {names or 'none'}")
    visible = [d for d in devices if d.host_visible]
    readers: dict[str, list[Tensor]] = {t.name: [] for t in graph}
    users: dict[str, list[Tensor]] = {t.name: [] for t in graph}
    for t in graph.nodes:
        for root in dict.fromkeys(t.roots):
            readers[root.name].append(t)
        for held in dict.fromkeys([root.storage for root in t.roots]):
            users[held.name].append(t)
    fallback = visible[-1] if visible else devices[-1]
    return Work(graph, devices, fallback, pinned, readers, users)
