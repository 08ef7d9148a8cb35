"""One hazard as a self-contained HTML page: the race in red, its damage, the repair."""

from collections.abc import Iterator, Sequence

from ggraph.backends.sim import Span as SimSpan
from ggraph.hazards.corpus import plan_of
from ggraph.hazards.report import Corruption, HazardReport
from ggraph.hazards.run import labels, timelines
from ggraph.plan import HOST_ACTOR, Plan
from ggraph.show_html import (
    Axis,
    Bar,
    Span,
    cards,
    chapter,
    charts,
    heading,
    page,
    panel,
    paragraph,
    refusal,
    table,
    timeline,
)
from ggraph.verify import CounterExample
from ggraph.verify.report import Site


def hazard_html(report: HazardReport) -> str:
    """The page of one hazard that has been run."""
    h = report.hazard
    title = f"{h.id}  {h.title}"
    parts = [heading(title, ", ".join(h.upstream)), paragraph(h.story), *_failures(report)]
    if h.bad is not None and report.counter_example is not None:
        parts += _bad(report, plan_of(h, h.bad), report.counter_example)
    return page(title, [*parts, *_fixed(report)])


def _failures(r: HazardReport) -> Iterator[str]:
    for failure in r.failures:
        yield panel("bad", "not as expected", [paragraph(failure)])


def _bad(r: HazardReport, bad: Plan, example: CounterExample) -> Iterator[str]:
    yield refusal(example)
    if r.corruption is not None:
        yield _damage(r.corruption)
        yield chapter(
            "What the simulator did",
            f"Virtual time of {r.hazard.runs} runs, adversarial order: {r.corruption.order}.",
        )
        yield _simulated(r.corruption.timeline, example, bad)
    yield from charts(bad, example, "The bad plan")


def _damage(c: Corruption) -> str:
    """What users would see."""
    facts: dict[str, object] = {
        f"of {c.of:,} elements of %{c.output} wrong": c.elements,
        "first wrong element": "[" + ", ".join(map(str, c.at)) + "]",
        "expected": f"{c.expected:.6g}",
        "got": f"{c.got:.6g}",
    }
    parts = [cards(facts)]
    parts += [paragraph(c.fault, "mono")] if c.fault else []
    if c.agreement is not None:
        parts.append(_meter("right drafts, bad plan", c.agreement, "race"))
        parts.append(_meter("right drafts, sound plan", 1.0, "host"))
    return panel("bad", "run, it gives wrong values", parts)


def _meter(title: str, share: float, colour: str) -> str:
    return (
        f'<div class="meter"><span>{title}</span><i><b style="width:{100 * share:.1f}%;'
        f'background:var(--{colour})"></b></i><span>{100 * share:.1f} %</span></div>'
    )


def _simulated(done: Sequence[SimSpan], example: CounterExample, bad: Plan) -> str:
    """The simulator's own timeline; of the culprits, those of the runs that are meant."""
    marks = zip(labels(example, bad), (example.first, example.second), strict=True)
    hot = {at for label, site in marks if (at := _occurrence(done, label, site)) is not None}
    bars = [_bar(s, i in hot) for i, s in enumerate(done)]
    return timeline(bars, Axis(max((s.stop for s in done), default=1e-6)))


def _bar(s: SimSpan, hot: bool = False) -> Bar:
    kind = "copy" if s.label.startswith("copy:") else "launch"
    words = f"{s.label}\n{s.actor}, {s.start * 1e6:.1f} to {s.stop * 1e6:.1f} us"
    span = Span(s.start, s.stop)
    return Bar(s.actor, span, s.label, "host" if s.actor == HOST_ACTOR else kind, words, hot=hot)


def _occurrence(done: Sequence[SimSpan], label: str, site: Site | None) -> int | None:
    """Where the timeline shows the command of that run, or of the last run that was simulated."""
    found = [i for i, s in enumerate(done) if s.label == label]
    if site is None or not found:
        return None
    return found[min(site.iteration, len(found) - 1)]


def _fixed(r: HazardReport) -> Iterator[str]:
    """The repair, its proof and price, and the fixed plan."""
    h = r.hazard
    if r.certificate is not None:
        c = r.certificate
        facts = {
            "pairs ordered": c.pairs_checked,
            "reads proved": c.reads_proved,
            "reuses of bytes": c.reuses,
            "random legal orders, bit-equal": r.orders if r.ok else 0,
        }
        yield panel("good", "the fix is proved", [paragraph(h.repair), cards(facts)])
    yield chapter("Prices", "Arena bytes, waits per run, virtual time of the simulated runs.")
    yield table(
        ("plan", "arena bytes", "waits per run", "estimated us"),
        ((n, p.nbytes, p.waits, f"{p.seconds * 1e6:.1f}") for n, p in r.prices.items()),
    )
    done = timelines(h, r.seed)["fixed"]
    yield chapter("The fixed plan, simulated", "As timed by the device's rates.")
    yield timeline([_bar(s) for s in done.timeline], Axis(done.seconds or 1e-6))
    yield from charts(plan_of(h, h.fixed), of="The fixed plan")
