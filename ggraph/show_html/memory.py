"""Memory over time: one chart per arena, address upwards, a box per value.

A box reaches from a value's first access to its last, over the bytes where it lies; the pointer
shows who had these bytes before and after. The bytes of a race are hatched in red.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

from ggraph.device import HOST
from ggraph.plan import Buffer, Plan
from ggraph.show_html.chart import Axis, chart, span_text, tip
from ggraph.show_html.timeline import LETTER, NOMINAL_WIDTH, Span
from ggraph.verify import CounterExample

HEIGHT, HOST_HEIGHT, LEAST_HEIGHT = 320.0, 140.0, 90.0  # pixels of the largest arena, the least
LINE = 13.0  # pixels that a label is high
COLOURS = 8
NEIGHBOURS = 6  # tenants listed before and after a value


@dataclass(frozen=True)
class Box:
    """A value's stay: bytes [start, stop) of the arena while `life` lasts."""

    value: str
    number: int
    start: int
    stop: int
    life: Span


@dataclass(frozen=True)
class Scale:
    """Where an address stands, in pixels from above.

    Between two borders of values the room grows with the root of the bytes: one large value, such
    as the logits, does not press all the others into a line.
    """

    borders: tuple[int, ...]
    heights: tuple[float, ...]  # of the borders, upwards
    height: float

    @staticmethod
    def of(capacity: int, boxes: Sequence[Box], height: float) -> "Scale":
        """For the arena of `capacity` bytes in which the boxes lie."""
        borders = tuple(sorted({0, capacity, *(x for b in boxes for x in (b.start, b.stop))}))
        roots = [0.0, *accumulate((hi - lo) ** 0.5 for lo, hi in pairwise(borders))]
        return Scale(borders, tuple(height * r / roots[-1] for r in roots), height)

    def share(self, pixels: float) -> str:
        """Pixels of the scale's height in per cent of it: the page may draw it taller."""
        return f"{100 * pixels / self.height:.3f}%"

    def y(self, address: int) -> float:
        """The height of an address; between two borders it grows evenly."""
        at = min(max(bisect_right(self.borders, address) - 1, 0), len(self.borders) - 2)
        low, high = self.borders[at : at + 2]
        part = (address - low) / (high - low)
        return self.height - self.heights[at] - part * (self.heights[at + 1] - self.heights[at])


def memories(
    plan: Plan, times: Sequence[Span], axis: Axis, fault: CounterExample | None = None
) -> Iterator[str]:
    """Heading and chart of every arena that the plan owns, the largest first; and of the caller's
    buffer, if a fault lies there."""
    where = fault.buffer if fault is not None else ""
    buffers = [b for b in plan.memory.buffers.values() if b.nbytes]
    arenas = [b for b in buffers if not b.external or b.name == where]
    arenas.sort(key=lambda b: -b.nbytes)
    lives = lifetimes(plan, times)
    for b in arenas:
        boxes = _boxes(plan, b, lives)
        share = (b.nbytes / arenas[0].nbytes) ** 0.5
        height = max(LEAST_HEIGHT, (HOST_HEIGHT if b.device == HOST else HEIGHT) * share)
        yield f"<h3>{escape(b.name)} <i>{b.nbytes:,} bytes, {len(boxes)} values</i></h3>"
        raced = fault if fault is not None and fault.buffer == b.name else None
        scale = Scale.of(b.nbytes, boxes, height)
        rows = [_drawn(plan, x, boxes, scale, axis) for x in boxes]
        if raced is not None:
            rows.append(_raced(raced, times, scale, axis))
        yield chart(_addresses(b), height, rows, axis, grows=True)


def lifetimes(plan: Plan, times: Sequence[Span]) -> dict[str, Span]:
    """From the first access of each value to its last."""
    found: dict[str, Span] = {}
    for i, c in enumerate(plan.schedule):
        for a in (*c.reads, *c.writes):
            old = found.get(a.value, times[i])
            start, stop = min(old.start, times[i].start), max(old.stop, times[i].stop)
            found[a.value] = Span(start, stop)
    return found


def _boxes(plan: Plan, buffer: Buffer, lives: Mapping[str, Span]) -> list[Box]:
    found = []
    for number, v in enumerate(plan.schedule.values):
        region = plan.memory.regions.get(v)
        if region is None or region.buffer != buffer.name or v not in lives or not region.nbytes:
            continue
        found += [
            Box(v, number, o, o + region.nbytes, lives[v]) for o in dict.fromkeys(region.offsets)
        ]
    return sorted(found, key=lambda b: (b.life.start, b.start))


def _addresses(b: Buffer) -> list[tuple[str, str]]:
    return [("bottom:22px", "0"), ("top:0", short_bytes(b.nbytes))]


def short_bytes(n: int) -> str:
    """`1.5 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def _drawn(plan: Plan, b: Box, boxes: Sequence[Box], scale: "Scale", axis: Axis) -> str:
    x, width = axis.x(b.life.start), axis.width(b.life.start, b.life.stop)
    y = scale.y(b.stop)
    high = max(scale.y(b.start) - y, 1.0)
    room = (b.life.stop - b.life.start) / (axis.seconds or 1.0) * NOMINAL_WIDTH
    fits = len(b.value) * LETTER + 8 < room and high >= LINE
    label = (
        f'<text class="label{" fits" if fits else ""}" x="{x}" dx="4" dy="4" '
        f'y="{scale.share(y + high / 2)}">{escape(b.value)}</text>'
    )
    return (
        f'<g class="box" data-b="{b.number}">{tip(_history(plan, b, boxes))}'
        f'<rect class="c{b.number % COLOURS}" x="{x}" y="{scale.share(y)}" width="{width}" '
        f'height="{scale.share(high)}"/>{label}</g>'
    )


def _history(plan: Plan, b: Box, boxes: Sequence[Box]) -> str:
    """The value, its place, why it lies there, and the other tenants of its bytes in time."""
    others = [o for o in boxes if o is b or (o.start < b.stop and b.start < o.stop)]
    at = next(i for i, o in enumerate(others) if o is b)
    near = others[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]
    lines = [b.value, f"bytes [{b.start:,}, {b.stop:,}), {b.stop - b.start:,}"]
    lines += [cause] if (cause := plan.memory.causes.get(b.value)) else []
    lines.append(f"tenants of these bytes ({len(others)}):")
    lines += [
        f"{'>' if o is b else ' '} {span_text(o.life.start, o.life.stop)}  {o.value}" for o in near
    ]
    return "\n".join(lines)


def _raced(fault: CounterExample, times: Sequence[Span], scale: "Scale", axis: Axis) -> str:
    """The bytes in question, while either of the two commands may run."""
    sites = [times[s.index] for s in (fault.first, fault.second) if s is not None]
    start = min((s.start for s in sites), default=0.0)
    stop = max((s.stop for s in sites), default=axis.seconds)
    y = scale.y(fault.stop)
    high = max(scale.y(fault.start) - y, 3.0)
    words = f"bytes [{fault.start:,}, {fault.stop:,}): {fault.kind} of {' and '.join(fault.values)}"
    return (
        f'<g class="raced">{tip(words)}<rect x="{axis.x(start)}" y="{scale.share(y)}" '
        f'width="{axis.width(start, stop)}" height="{scale.share(high)}" rx="2"/></g>'
    )
