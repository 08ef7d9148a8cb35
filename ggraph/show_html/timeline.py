"""Streams over time: a lane per actor, a bar per command, events between them.

The clock is the schedule's own estimate (a command starts when everything that must come before it
has ended), or whatever the caller's bars say, such as the simulator's.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ggraph.plan import HOST_ACTOR, HOST_STEPS, Access, Actor, Command, Do, Schedule
from ggraph.show_html.chart import Axis, chart, span_text, tip

LANE, HOT_LANE, BAR = 30, 48, 20
SMALLEST = 1e-7  # seconds that a command without an estimate is drawn with
LETTER = 6.3  # pixels of a letter; the page's script measures anew
NOMINAL_WIDTH = 1000  # pixels of an axis before anything is stretched

Link = tuple[int, int, str]  # from bar, to bar, event


@dataclass(frozen=True)
class Span:
    """When a command runs, in estimated seconds."""

    start: float
    stop: float


@dataclass(frozen=True)
class Bar:
    """One bar: who, when, what. `reads` and `writes` are values' numbers, for highlighting."""

    actor: Actor
    span: Span
    label: str
    kind: str  # launch, copy, host, mark
    tip: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    hot: bool = False


def spans(schedule: Schedule) -> list[Span]:
    """Earliest start and end of every command, from the orderings and the estimates."""
    before = schedule.to_networkx()
    found: list[Span] = []
    for i, c in enumerate(schedule):
        start = max((found[j].stop for j in before.predecessors(i)), default=0.0)
        found.append(Span(start, start + max(c.seconds, SMALLEST)))
    return found


def bars_of(schedule: Schedule, times: Sequence[Span], hot: Collection[int] = ()) -> list[Bar]:
    """A bar per command; those whose index is in `hot` are culprits."""
    number = {v: i for i, v in enumerate(schedule.values)}
    return [_bar_of(i, c, times[i], number, i in hot) for i, c in enumerate(schedule)]


def _bar_of(i: int, c: Command, at: Span, number: Mapping[str, int], hot: bool) -> Bar:
    def numbers(accesses: tuple[Access, ...]) -> tuple[int, ...]:
        return tuple(number[a.value] for a in accesses if a.value in number)

    lines = [f"{i}: {c.label}", f"{c.do.value} on {c.actor}, {span_text(at.start, at.stop)}"]
    lines += [f"reads {a}" for a in c.reads] + [f"writes {a}" for a in c.writes]
    lines += [f"event {c.event}"] if c.event else []
    lines += [f"waits for {c.waits_for or 'everything'}"] if _waits_for_all(c) else []
    kind = _kind(c.do)
    text = "\n".join(lines)
    return Bar(c.actor, at, c.label, kind, text, numbers(c.reads), numbers(c.writes), hot)


def _waits_for_all(c: Command) -> bool:
    return c.do is Do.HOST_SYNC and c.event is None


def _kind(do: Do) -> str:
    if do in (Do.RECORD, Do.WAIT, Do.HOST_SYNC):
        return "mark"
    return "host" if do in HOST_STEPS else do.value


def links_of(schedule: Schedule) -> Iterator[Link]:
    """From each record to the waits for it."""
    recorded: dict[str, int] = {}
    for i, c in enumerate(schedule):
        if c.do is Do.RECORD and c.event:
            recorded[c.event] = i
        elif c.event in recorded:
            yield recorded[c.event or ""], i, c.event or ""


def timeline(bars: Sequence[Bar], axis: Axis, links: Iterable[Link] = ()) -> str:
    """The chart. Two hot bars are joined by a line that says that nothing orders them."""
    middle, height, names = _lanes(bars)
    rows = [f'<rect class="lane" x="0" width="100%" y="{y - 1:.0f}" height="2"/>' for y, _ in names]
    rows += [_link(bars, middle, axis, link) for link in links]
    rows += [_drawn(b, middle[b.actor], axis) for b in sorted(bars, key=lambda b: b.hot)]
    rows += _missing([b for b in bars if b.hot], middle, axis)
    return chart([(f"top:{y - 8:.0f}px", n) for y, n in names], height, rows, axis)


def _lanes(bars: Sequence[Bar]) -> tuple[dict[Actor, float], float, list[tuple[float, str]]]:
    """The middle of each lane, the height of all, and the names at their heights."""
    middle: dict[Actor, float] = {}
    y = 4.0
    for a in sorted({b.actor for b in bars}, key=lambda a: (a != HOST_ACTOR, a)):
        high = HOT_LANE if any(b.hot for b in bars if b.actor == a) else LANE
        middle[a] = y + high - LANE / 2
        y += high
    return middle, y + 4, [(at, str(a)) for a, at in middle.items()]


def _drawn(b: Bar, y: float, axis: Axis) -> str:
    x, width = axis.x(b.span.start), axis.width(b.span.start, b.span.stop)
    room = (b.span.stop - b.span.start) / (axis.seconds or 1.0) * NOMINAL_WIDTH
    tall = BAR if b.kind != "mark" else BAR / 2
    shown = "" if b.kind == "mark" else _label(b, x, y, len(b.label) * LETTER + 8 < room, axis)
    data = "".join(
        f' data-{k}="{" ".join(map(str, v))}"' for k, v in (("r", b.reads), ("w", b.writes)) if v
    )
    return (
        f'<g class="bar{" hot" if b.hot else ""}"{data}>{tip(b.tip)}<rect class="{b.kind}" x="{x}" '
        f'y="{y - tall / 2:.0f}" width="{width}" height="{tall:.0f}" rx="3"/>{shown}</g>'
    )


def _label(b: Bar, x: str, y: float, fits: bool, axis: Axis) -> str:
    """Inside the bar where it fits; a culprit's stands above it in any case."""
    if b.hot:
        return (
            f'<text class="culprit{axis.edge(b.span.start)}" x="{x}" y="{y - BAR / 2 - 5:.0f}">'
            f"{escape(b.label)}</text>"
        )
    return (
        f'<text class="label{" fits" if fits else ""}" x="{x}" dx="4" y="{y + 4:.0f}">'
        f"{escape(b.label)}</text>"
    )


def _link(bars: Sequence[Bar], middle: Mapping[Actor, float], axis: Axis, link: Link) -> str:
    first, then = bars[link[0]], bars[link[1]]
    return (
        f'<line class="event" x1="{axis.x(first.span.stop)}" y1="{middle[first.actor]:.0f}" '
        f'x2="{axis.x(then.span.start)}" y2="{middle[then.actor]:.0f}">{tip(link[2])}</line>'
    )


def _missing(hot: Sequence[Bar], middle: Mapping[Actor, float], axis: Axis) -> Iterator[str]:
    """A dashed line between the two culprits, from and to the middle of their bars. What it means
    is written right under the upper bar: the lower one's name needs the room above its own."""
    if len(hot) != 2 or hot[0].actor == hot[1].actor:
        return
    (x1, y1), (x2, y2) = [((b.span.start + b.span.stop) / 2, middle[b.actor]) for b in hot]
    apart = abs(x1 - x2) > axis.seconds / 8
    at = (x1 + x2) / 2 if apart else max(b.span.stop for b in hot)
    yield (
        f'<line class="race" x1="{axis.x(x1)}" y1="{y1:.0f}" x2="{axis.x(x2)}" y2="{y2:.0f}"/>'
        f'<text class="culprit{axis.edge(at)}" x="{axis.x(at)}" dx="{-8 if axis.edge(at) else 8}" '
        f'y="{min(y1, y2) + BAR / 2 + 11:.0f}">no order</text>'
    )
