"""A plan as one self-contained HTML page: memory over time, streams, placement. Floor 7.

The clock is the schedule's own estimate: a command starts when everything that must happen before
it has ended. Nothing is loaded from anywhere; the page works from a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ggraph.plan import HOST_ACTOR, Actor, Command, Do, Plan, Schedule
from ggraph.verify import CounterExample

WIDTH, ROW, MEMORY_HEIGHT = 1120, 26, 420
_PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#bab0ac")
_KINDS = {
    Do.LAUNCH: "#4e79a7",
    Do.COPY: "#f28e2b",
    Do.RECORD: "#8a8f98",
    Do.WAIT: "#c7ccd4",
    Do.HOST_WRITE: "#59a14f",
    Do.HOST_READ: "#b07aa1",
    Do.HOST_SYNC: "#9c755f",
    Do.HOST_FREE: "#76b7b2",
}
SMALLEST = 1e-7  # seconds that a command without an estimate is drawn with


@dataclass(frozen=True)
class Span:
    """When a command runs, in estimated seconds."""

    start: float
    stop: float


def spans(schedule: Schedule) -> list[Span]:
    """Earliest start and end of every command, from the orderings and the estimates."""
    before = schedule.to_networkx()
    found: list[Span] = []
    for i, c in enumerate(schedule):
        start = max((found[j].stop for j in before.predecessors(i)), default=0.0)
        found.append(Span(start, start + max(c.seconds, SMALLEST)))
    return found


def plan_html(plan: Plan, facts: Mapping[str, object], fault: CounterExample | None = None) -> str:
    """The page. `facts` are shown at the top, a counter-example in red."""
    problem = str(fault or "")
    times = spans(plan.schedule)
    parts = [
        f"<h1>{escape(plan.graph.name)}</h1>",
        _facts(facts),
        f'<pre class="problem">{escape(problem)}</pre>' if problem else "",
        "<h2>Streams over time</h2>",
        _timeline(plan.schedule, times, problem),
        "<h2>Memory over time</h2>",
        *_memories(plan, times),
        "<h2>Splits</h2>",
        _splits(plan),
        "<h2>Placement</h2>",
        _placement(plan),
    ]
    return _PAGE.replace("%TITLE%", escape(plan.graph.name)).replace("%BODY%", "\n".join(parts))


def _facts(facts: Mapping[str, object]) -> str:
    cells = (
        f'<div class="fact"><b>{escape(_number(v))}</b><span>{escape(k.replace("_", " "))}</span>'
        "</div>"
        for k, v in facts.items()
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _timeline(schedule: Schedule, times: Sequence[Span], problem: str) -> str:
    """One lane per actor; a bar per command, an arc from each record to its waits."""
    lanes = sorted({c.actor for c in schedule}, key=lambda a: (a != HOST_ACTOR, a))
    total = max((s.stop for s in times), default=1.0)
    rows = [_lane(a, k, total) for k, a in enumerate(lanes)]
    for i, c in enumerate(schedule):
        rows.append(_bar(i, c, times[i], lanes.index(c.actor), total, problem))
    rows += _event_lines(schedule, times, lanes, total)
    return _svg(len(lanes) * ROW + 8, rows)


def _x(seconds: float, total: float) -> float:
    return 110 + (WIDTH - 120) * seconds / total


def _lane(actor: Actor, k: int, total: float) -> str:
    y = k * ROW + 4
    return (
        f'<rect x="110" y="{y}" width="{WIDTH - 120}" height="{ROW - 4}" class="lane"/>'
        f'<text x="100" y="{y + 15}" text-anchor="end">{escape(str(actor))}</text>'
    )


def _bar(i: int, c: Command, span: Span, lane: int, total: float, problem: str) -> str:
    x, stop = _x(span.start, total), _x(span.stop, total)
    hot = ' class="hot"' if problem and c.label and f" {c.label} " in f" {problem} " else ""
    title = f"{i}: {c}\n{span.start * 1e6:.2f} to {span.stop * 1e6:.2f} us"
    return (
        f'<rect x="{x:.2f}" y="{lane * ROW + 6}" width="{max(stop - x, 1.2):.2f}" '
        f'height="{ROW - 8}" fill="{_KINDS[c.do]}"{hot}><title>{escape(title)}</title></rect>'
    )


def _event_lines(
    schedule: Schedule, times: Sequence[Span], lanes: Sequence[Actor], total: float
) -> Iterator[str]:
    recorded: dict[str, int] = {}
    for i, c in enumerate(schedule):
        if c.do is Do.RECORD and c.event:
            recorded[c.event] = i
        elif c.do is Do.WAIT and c.event in recorded:
            j = recorded[c.event]
            a, b = lanes.index(schedule.commands[j].actor), lanes.index(c.actor)
            yield (
                f'<line x1="{_x(times[j].stop, total):.2f}" y1="{a * ROW + 15}" '
                f'x2="{_x(times[i].start, total):.2f}" y2="{b * ROW + 15}" class="event">'
                f"<title>{escape(c.event or '')}</title></line>"
            )


def _memories(plan: Plan, times: Sequence[Span]) -> Iterator[str]:
    """One picture per arena: address upwards, time to the right, a box per value."""
    uses = _lifetimes(plan, times)
    total = max((s.stop for s in times), default=1.0)
    for b in plan.memory.buffers.values():
        if b.external or not b.nbytes:
            continue
        inside = [v for v, r in plan.memory.regions.items() if r.buffer == b.name and v in uses]
        inside.sort(key=lambda v: (uses[v].start, plan.memory.regions[v].offset))
        boxes = [
            _box(plan, v, uses[v], b.nbytes, total, _PALETTE[k % len(_PALETTE)])
            for k, v in enumerate(inside)
        ]
        yield f"<h3>{escape(b.name)}: {b.nbytes:,} bytes, {len(inside)} values</h3>"
        yield _svg(MEMORY_HEIGHT + 8, boxes)


def _lifetimes(plan: Plan, times: Sequence[Span]) -> dict[str, Span]:
    found: dict[str, Span] = {}
    for i, c in enumerate(plan.schedule):
        for a in (*c.reads, *c.writes):
            old = found.get(a.value, times[i])
            start, stop = min(old.start, times[i].start), max(old.stop, times[i].stop)
            found[a.value] = Span(start, stop)
    return found


def _box(plan: Plan, v: str, life: Span, capacity: int, total: float, colour: str) -> str:
    region = plan.memory.regions[v]
    x, stop = _x(life.start, total), _x(life.stop, total)
    height = max(MEMORY_HEIGHT * region.nbytes / capacity, 0.6)
    y = 4 + MEMORY_HEIGHT - MEMORY_HEIGHT * (region.offset + region.nbytes) / capacity
    before = [
        name
        for name, r in plan.memory.regions.items()
        if r.buffer == region.buffer
        and name != v
        and r.offset < region.offset + region.nbytes
        and region.offset < r.offset + r.nbytes
    ]
    title = (
        f"{v}\n[{region.offset:,}, {region.offset + region.nbytes:,})\n"
        f"{plan.memory.causes.get(v, '')}\nalso here: {', '.join(before[:12]) or 'nobody'}"
    )
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(stop - x, 1.2):.2f}" height="{height:.2f}" '
        f'fill="{colour}" class="value"><title>{escape(title)}</title></rect>'
    )


def _svg(height: float, rows: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(rows)}</svg>'


def _splits(plan: Plan) -> str:
    rows = (
        f"<tr><td>{s.index}</td><td>{escape(s.device)}</td><td>{len(s.nodes)}</td>"
        f"<td>{escape(', '.join(s.copies_in)) or '-'}</td></tr>"
        for s in plan.schedule.splits.splits
    )
    return _table("<th>split</th><th>device</th><th>nodes</th><th>copies in</th>", rows)


def _placement(plan: Plan) -> str:
    of = plan.schedule.splits.placement.of
    rows = (
        f"<tr><td>{escape(t.name)}</td><td>{escape(of[t.name].device)}</td>"
        f"<td>{escape(of[t.name].cause)}</td></tr>"
        for t in plan.graph
    )
    return _table("<th>tensor</th><th>device</th><th>cause</th>", rows)


def _table(head: str, rows: Iterator[str]) -> str:
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>%TITLE%</title><style>
:root{--ink:#1d2433;--soft:#5b6475;--line:#e3e7ee;--paper:#fff;--ground:#f6f7f9}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebf1;--soft:#9aa4b5;--line:#2c3442;
--paper:#171c25;--ground:#10141b}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--ground);
max-width:1160px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .8rem}h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
h3{font-size:.9rem;font-weight:500;color:var(--soft);margin:.8rem 0 .3rem}
.facts{display:flex;flex-wrap:wrap;gap:.6rem}.fact{background:var(--paper);
border:1px solid var(--line);border-radius:8px;padding:.5rem .8rem}
.fact b{display:block;font-size:1.1rem;font-variant-numeric:tabular-nums}
.fact span{color:var(--soft);font-size:.8rem}
svg{width:100%;background:var(--paper);border:1px solid var(--line);border-radius:8px}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.lane{fill:var(--ground)}
.event{stroke:var(--soft);stroke-width:1;opacity:.6}
.value{stroke:var(--paper);stroke-width:.5}rect:hover{filter:brightness(1.25)}
.hot{stroke:#d62839;stroke-width:3}.problem{background:#fdecee;color:#8c1522;
border:1px solid #d62839;border-radius:8px;padding:.8rem;overflow:auto}
.scroll{max-height:22rem;overflow:auto;background:var(--paper);border:1px solid var(--line);
border-radius:8px}table{border-collapse:collapse;width:100%;font-size:.85rem}
th{position:sticky;top:0;background:var(--paper);text-align:left}
td,th{padding:.25rem .7rem;border-bottom:1px solid var(--line)}
</style>%BODY%</html>
"""
