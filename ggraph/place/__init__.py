"""Graph x devices x pins -> Placement: where each tensor lives, and the reason.

The order of the reasons, first that applies: pins; the home of weights and states (layers, else the
first device with room); an op whose largest weight or state decides; expansion from neighbours;
fallback. Devices stand in priority order. The last host-visible one (else the last) is the
fallback; it also holds the inputs, where the host sees it or an op there reads them. Nothing here
knows an op's name: `DeviceSpec.supports` and the declared cost are asked. Source of the idea:
ggml's scheduler passes 1-4.
"""

from collections.abc import Iterable, Mapping, Sequence

from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.place.homes import layer_table, leaves
from ggraph.place.ops import decided, expand, feed, follow, improve
from ggraph.place.pins import Pin, Pinned, match, remaining
from ggraph.place.work import begin
from ggraph.plan import Placement

__all__ = ["Pin", "place", "place_pinned"]


def place(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    pins: Iterable[str | Pin] = (),
    *,
    layers: Mapping[str, int] | None = None,
) -> Placement:
    """A device and a cause for every tensor of `graph`.

    `layers` gives the number of layers (tensors called `blk.N.*`) per device, in its order; the
    rest goes to the fallback. Raises PlaceError for unknown devices, a pin whose pattern matches
    nothing, contradictory pins, a pin to a device that cannot run the op, an op that no device
    can run, and weights that do not fit.
    """
    return place_pinned(graph, devices, match(graph, devices, pins), layers or {})


def place_pinned(
    graph: Graph, devices: Sequence[DeviceSpec], pinned: Pinned, layers: Mapping[str, int]
) -> Placement:
    """`place` with the pins that were matched before `graph` was rewritten."""
    work = begin(graph, tuple(devices), remaining(graph, pinned))
    leaves(work, layer_table(work, layers))
    decided(work)
    expand(work)
    improve(work)
    feed(work)
    follow(work)
    return Placement(graph, work.devices, {t.name: work.of[t.name] for t in graph})
