"""A stream for every node: independent branches side by side.

Nodes are taken in the graph's order; each goes to the stream on which it can start first, by the
estimated times, and stays with its predecessors where that is no later. A branch that forks off
thus gets a stream of its own while others are busy, and a join goes to the branch that ends last.
(List scheduling by earliest start, after Topcuoglu et al. 2002, HEFT, without the reordering.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ggraph.device import DeviceSpec
from ggraph.errors import PlanError
from ggraph.plan import Actor, Placement
from ggraph.tensor import Tensor

HOP = 2.0  # an edge between streams costs a record and a wait: this many launches


@dataclass(frozen=True)
class Streams:
    """Who runs what. `copier` of (device, outwards) is the stream for transfers."""

    of: Mapping[str, Actor]
    specs: Mapping[str, DeviceSpec]
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each launch, estimated

    def spec(self, device: str) -> DeviceSpec:
        """The spec of a device by name."""
        return self.specs[device]

    def copier(self, device: str, *, outwards: bool) -> Actor:
        """The stream that moves data into a device, or out of it: compute stream 0 if it has
        no copy streams, one for both ways if it has one."""
        spec = self.specs[device]
        if not spec.copy_streams:
            return Actor(device, 0)
        return Actor(device, spec.streams + (1 if outwards and spec.copy_streams > 1 else 0))


@dataclass(eq=False)
class _Times:
    """Estimated finish of each node, and when each stream is free."""

    finish: dict[str, float] = field(default_factory=dict)
    free: dict[Actor, float] = field(default_factory=dict)
    of: dict[str, Actor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each launch

    def starts(self, t: Tensor, actors: Sequence[Actor], hop: float) -> list[float]:
        """When `t` can begin on each of the actors."""
        made = [root.name for root in t.roots]
        known = [(self.finish[name], self.of[name]) for name in made if name in self.finish]
        return [
            max([self.free.get(a, 0.0), *[end if by == a else end + hop for end, by in known]])
            for a in actors
        ]

    def put(self, t: Tensor, actor: Actor, begin: float, seconds: float) -> None:
        self.of[t.name] = actor
        self.finish[t.name] = self.free[actor] = begin + seconds


def assign(placement: Placement, streams: int, chosen: Mapping[str, int]) -> Streams:
    """The stream of every node of the placed graph, Copy nodes included; `chosen` wins."""
    if streams < 1:
        raise PlanError(f"expected at least one stream, got {streams}")
    specs = {d.name: d for d in placement.devices}
    able = {d: [Actor(d, i) for i in range(min(streams, s.streams))] for d, s in specs.items()}
    result = Streams({}, specs)
    times = _Times()
    for t in placement.graph.nodes:
        device = placement.of[t.name].device
        if t.op == "copy":
            source = placement.of[t.sources[0].root.name].device
            actor = mover(result, source, device)
            seconds = copy_seconds(specs[source], specs[device], copied_bytes(t))
            _put(times, t, [actor], 0.0, seconds)
        elif t.name in chosen:
            _launch(times, t, specs[device], [_stream(t, specs[device], chosen[t.name])])
        else:
            _launch(times, t, specs[device], able[device])
    return Streams(times.of, specs, times.seconds)


def _launch(times: _Times, t: Tensor, spec: DeviceSpec, actors: Sequence[Actor]) -> None:
    times.seconds[t.name] = seconds = launch_seconds(spec, t)
    _put(times, t, actors, HOP * spec.launch_s, seconds)


def _put(times: _Times, t: Tensor, actors: Sequence[Actor], hop: float, seconds: float) -> None:
    """Give `t` the first of the actors on which it can begin earliest."""
    begin, i = min(zip(times.starts(t, actors, hop), range(len(actors)), strict=True))
    times.put(t, actors[i], begin, seconds)


def _stream(t: Tensor, spec: DeviceSpec, stream: int) -> Actor:
    if not 0 <= stream < spec.streams:
        raise PlanError(f"%{t.name} on stream {stream}: {spec.name} has {spec.streams}")
    return Actor(spec.name, stream)


def mover(streams: Streams, source: str, target: str) -> Actor:
    """Who performs a transfer: the end that the host does not see; of two such, the target."""
    if streams.spec(target).host_visible and not streams.spec(source).host_visible:
        return streams.copier(source, outwards=True)
    return streams.copier(target, outwards=False)


def launch_seconds(spec: DeviceSpec, t: Tensor) -> float:
    """Estimated time of a launch: the larger of arithmetic and memory traffic, plus the launch."""
    if t.spec is None:
        return 0.0
    cost = t.spec.cost(t)
    return spec.launch_s + max(cost.flops / spec.flops_per_s, cost.bytes / spec.bytes_per_s)


def is_peer(source: DeviceSpec, target: DeviceSpec) -> bool:
    """Whether two devices reach each other's memory without the host."""
    same = source.kind == target.kind
    return same and source.peer_bytes_per_s > 0 and target.peer_bytes_per_s > 0


def copied_bytes(t: Tensor) -> int:
    """Bytes that a Copy node is expected to move: of a partial copy, those of its slices that
    independent even choices name."""
    if len(t.sources) == 1 or not t.shape[0]:
        return t.nbytes
    stay = (1 - 1 / t.shape[0]) ** t.sources[1].size
    return round(t.nbytes * (1 - stay))


def copy_seconds(source: DeviceSpec, target: DeviceSpec, nbytes: int) -> float:
    """Estimated time of a transfer, through the host where there is no direct way."""
    if is_peer(source, target):
        rate = min(source.peer_bytes_per_s, target.peer_bytes_per_s)
        return target.launch_s + nbytes / rate
    ends = [d for d in (source, target) if not d.host_visible] or [target]
    return sum(link_seconds(d, nbytes) for d in ends)


def link_seconds(device: DeviceSpec, nbytes: int) -> float:
    """Estimated time of a transfer between a device and the host."""
    return device.launch_s + nbytes / device.link_bytes_per_s
