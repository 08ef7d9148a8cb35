"""A plan as one self-contained HTML page: streams and memory over time, the verdict.

    plan_html(plan, vars(certificate))       a proved plan
    plan_html(plan, {}, counter_example)     a refused one: the race in red

The charts' clock is the schedule's own estimate: a command starts when everything that must happen
before it has ended.
"""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import cycle
from math import isfinite

from ggraph.errors import PlanError
from ggraph.order import estimate
from ggraph.plan import Plan
from ggraph.show_html.chart import Axis
from ggraph.show_html.memory import memories
from ggraph.show_html.page import (
    CONTROLS,
    LEGEND,
    cards,
    chapter,
    heading,
    page,
    panel,
    paragraph,
    table,
)
from ggraph.show_html.timeline import Bar, Span, bars_of, links_of, spans, timeline
from ggraph.verify import CounterExample
from ggraph.verify.report import Site

__all__ = [
    "Axis",
    "Bar",
    "Span",
    "bars_of",
    "cards",
    "chapter",
    "charts",
    "heading",
    "page",
    "panel",
    "paragraph",
    "plan_html",
    "refusal",
    "spans",
    "table",
    "timeline",
]


def plan_html(
    plan: Plan,
    facts: Mapping[str, object],
    fault: CounterExample | None = None,
    *,
    title: str = "",
) -> str:
    """The page. `facts` are shown at the top, a counter-example with the race in red. The title is
    the graph's name unless given. PlanError for times and sizes that no chart can show."""
    for c in (c for c in plan.schedule if not isfinite(c.seconds) or c.seconds < 0):
        raise PlanError(f"{c.label!r} takes {c.seconds} seconds: no chart shows that")
    for b in (b for b in plan.memory.buffers.values() if b.nbytes < 0):
        raise PlanError(f"{b.name!r} has {b.nbytes} bytes: no chart shows that")
    title = title or plan.graph.name
    devices = ", ".join(d.name for d in plan.schedule.splits.placement.devices)
    mode = f"memory laid out by mode {plan.memory.mode}"
    return page(
        title,
        [
            heading(title, f"{devices}; {mode}"),
            cards(facts),
            *(paragraph(line, "note") for line in plan.log if "ms" not in line.split()),
            refusal(fault) if fault is not None else "",
            *charts(plan, fault),
            *_placed(plan),
        ],
    )


def refusal(fault: CounterExample) -> str:
    """The counter-example: what meets, on which bytes, which order is missing, and the repairs."""
    sites = [s for s in (fault.first, fault.second) if s is not None]
    versus = '<div class="versus">no order</div>' if fault.kind == "race" else "<div>then</div>"
    parts = [paragraph(fault.message)]
    if sites:
        parts.append(f'<div class="sites">{versus.join(map(_site, sites))}</div>')
    if fault.stop > fault.start:
        parts.append(
            paragraph(f"bytes [{fault.start:,}, {fault.stop:,}) of {fault.buffer}", "mono")
        )
    if fault.edge:
        parts.append(paragraph(f"missing: {fault.edge}", "mono"))
    parts += [paragraph(f"repair: {r}", "mono") for r in fault.repairs]
    return panel("bad", f"verify refuses this plan: {fault.kind}", parts)


def _site(s: Site) -> str:
    where = f"run {s.iteration}, command {s.index}"
    return f'<div class="site"><b>{where}</b>{escape(s.text.strip())}</div>'


def charts(plan: Plan, fault: CounterExample | None = None, of: str = "") -> Iterator[str]:
    """Streams and memory over the same time axis; `of` says in the titles whose they are."""
    streams, memory = (f"{of}: streams", f"{of}: memory") if of else ("Streams", "Memory")
    times = spans(plan.schedule)
    axis = Axis(max((s.stop for s in times), default=1.0))
    sites = (fault.first, fault.second) if fault is not None else ()
    hot = {s.index for s in sites if s is not None}
    lines = "Lines lead from what records an event to who waits."
    yield chapter(streams, f"Estimated time: {estimate(plan.schedule)}. {lines}")
    yield LEGEND + CONTROLS
    yield timeline(bars_of(plan.schedule, times, hot), axis, links_of(plan.schedule))
    yield chapter(
        memory,
        "Addresses upwards, the same time axis; between two borders the room grows with the root "
        "of the bytes, so that small values are seen beside large ones. A box is one value's stay; "
        "point at it for its bytes and the tenants before and after.",
    )
    yield from memories(plan, times, axis, fault)


def _placed(plan: Plan) -> Iterator[str]:
    """Splits and placement; a plan that came as JSON has neither."""
    splits, of = plan.schedule.splits.splits, plan.schedule.splits.placement.of
    if splits:
        yield chapter("Splits", "Runs of work per device, in order.")
        yield _strip(plan)
        yield table(
            ("split", "device", "nodes", "copies in"),
            ((s.index, s.device, len(s.nodes), ", ".join(s.copies_in) or "-") for s in splits),
        )
    if of:
        yield chapter("Placement", "Where every tensor is, and why.")
        rows = ((t.name, of[t.name].device, of[t.name].cause) for t in plan.graph)
        yield table(("tensor", "device", "cause"), rows, filtered=True)


def _strip(plan: Plan) -> str:
    """The splits side by side, as wide as they have nodes."""
    splits = plan.schedule.splits
    known = [*(d.name for d in splits.placement.devices), *(s.device for s in splits.splits)]
    tints = dict(zip(dict.fromkeys(known), cycle(_TINTS), strict=False))
    parts = (
        f'<div style="flex:{len(s.nodes)};background:{tints[s.device]}" '
        f'title="{escape(f"{s.device}: {len(s.nodes)} nodes", quote=True)}">'
        f"{escape(s.device)} {len(s.nodes)}</div>"
        for s in plan.schedule.splits.splits
    )
    return f'<div class="strip">{"".join(parts)}</div>'


_TINTS = ("#8fb4f0", "#f6bd7d", "#93d0a6", "#cbaee8", "#86cfd2", "#ecd57a", "#dba7a0", "#b7bfcc")
