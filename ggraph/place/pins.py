"""Pins: the user's own placement, as regular expressions over names."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ggraph.device import DeviceSpec
from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.tensor import Tensor


@dataclass(frozen=True)
class Pin:
    """Every tensor whose name holds a match of the regular expression `pattern` is on `device`;
    where it is a `whole` name, the one of that name."""

    pattern: str
    device: str
    whole: bool = False

    @staticmethod
    def parse(text: str) -> "Pin":
        """`REGEX=DEVICE`, as in llama.cpp's `-ot`. PlaceError when there is no `=`."""
        pattern, equals, device = text.rpartition("=")
        if not (pattern and equals and device):
            raise PlaceError(f"pin {text!r}: expected REGEX=DEVICE, such as blk\\.1\\..*=cuda0")
        return Pin(pattern, device)

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"


Pinned = Mapping[str, Pin]  # by names of tensors


def match(graph: Graph, devices: Sequence[DeviceSpec], pins: Iterable[str | Pin]) -> Pinned:
    """Which pin holds which tensor. Views are not pinned: they follow what they look at."""
    names = [d.name for d in devices]
    pinned: dict[str, Pin] = {}
    for pin in (Pin.parse(p) if isinstance(p, str) else p for p in pins):
        if pin.device not in names:
            raise PlaceError(f"pin {pin}: unknown device {pin.device!r}; known: {', '.join(names)}")
        matched = list(_matches(graph, pin))
        if not matched:
            raise PlaceError(f"pin {pin}: the pattern matches none of {len(graph)} tensor names")
        for t in matched:
            other = pinned.setdefault(t.name, pin)
            if other.device != pin.device:
                raise PlaceError(f"contradictory pins for %{t.name}: {other} and {pin}")
    return _with_storage(graph, pinned)


def remaining(graph: Graph, pinned: Pinned) -> Pinned:
    """`pinned`, which was said of the graph that `graph` was rewritten from, as said of this one.

    Raises PlaceError for a pin of which other ops took in all that it matches.
    """
    found: dict[str, Pin] = {}
    for t in graph if pinned else ():
        if t.name in pinned:
            found.setdefault(t.root.name, pinned[t.name])
    held = set(found.values())
    for pin in pinned.values():
        if pin not in held:
            raise PlaceError(
                f"pin {pin}: all that it matches became part of other ops; pin those, or plan with "
                "Options(rewrites=False)"
            )
    return found


def _matches(graph: Graph, pin: Pin) -> Iterator[Tensor]:
    if pin.whole:  # looked up: sessions pin every leaf that they hold
        held = graph.get(pin.pattern)
        return iter([] if held is None else [held.root])
    try:
        pattern = re.compile(pin.pattern)
    except re.error as error:
        raise PlaceError(f"pin {pin}: not a regular expression: {error}") from None
    found = [t for t in graph if pattern.search(t.name)]
    return (t for t in ([t for t in found if not t.is_view] or [t.root for t in found]))


def _with_storage(graph: Graph, pinned: dict[str, Pin]) -> dict[str, Pin]:
    """A pin on an overwriting result holds its storage too, and the reverse: they share bytes."""
    for t in graph.overwriting if pinned else ():
        home, mine = pinned.get(t.storage.name), pinned.get(t.name)
        if home and mine and home.device != mine.device:
            raise PlaceError(
                f"contradictory pins: %{t.name} ({mine}) overwrites %{t.storage.name} ({home})"
            )
        if mine:
            pinned[t.storage.name] = mine
    return pinned
