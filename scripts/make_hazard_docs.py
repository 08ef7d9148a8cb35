"""Write docs/hazards.md and its pictures from the corpus: python scripts/make_hazard_docs.py

Everything on the page is computed: the counter-examples by `verify`, the damage and the timelines
by the simulator. Seconds are the simulator's own estimates.
"""

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph.backends.sim import Span
from ggraph.hazards import HAZARDS, UNEXPRESSED, Hazard, HazardReport, run_hazard, timelines

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, LEFT, LANE, BAR, GAP = 960, 78, 36, 18, 30
STYLE = (
    "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#24292f}"
    ".t{font-weight:600;font-size:12px}.a{fill:#57606a}"
    ".l{stroke:#d8dee4}.b{fill:#cfe3f8;stroke:#7aa7d6}"
    ".bad{fill:#ffd0cc;stroke:#cf222e;stroke-width:2}"
    ".fixed{fill:#c8ecd0;stroke:#1a7f37;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.a{fill:#9198a1}.l{stroke:#3d444d}"
    ".b{fill:#1f3b57;stroke:#4a7fb5}.bad{fill:#67261f}.fixed{fill:#17412a}}"
)

INTRO = """# Hazards: races that engines really had, as plans

This page is written by `scripts/make_hazard_docs.py` from `ggraph/hazards/`; do not edit it.

Each entry is a race or lost value that was published for some engine, brought down to its smallest
graph. Its *bad plan* is made as that engine makes it: memory in list order (allocator mode `ggml`),
and the engine's own mistake in ordering or placing. Nothing is laid over anything else by hand.
For each entry `ggraph hazards run ID` shows that `verify` refuses the bad plan and names the two
commands; that an adversarial legal order on the simulator gives wrong values; that the fixed plan
is proved, and gives NumPy's very bits in a thousand random legal orders; and what the fix costs.

The pictures show virtual time from left to right, one lane per actor. The two commands of the
counter-example are red in the bad plan and green in the fixed one. In the bad plan's picture the
simulator runs the second one first; a command that is late starts where the adversary let it go.

`ggraph hazards run ID --html race.html` draws all this as a page, memory included, with the race in
red; `--export race.json` writes the bad plan in the form that `ggraph verify` reads
([plan_json.md](plan_json.md)). `ggraph hazards drafts PROMPT` decodes with an EAGLE-3
head whose plans race as in 01H and 01P, and prints the acceptance beside that of sound plans.

Numbers after `#` are issues or pull requests of the project in front of them. The stories are our
reading of public sources; whether a hardware run would show the fault is a matter of timing.
"""


def main() -> None:
    """Write the page and the pictures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "hazards").mkdir(parents=True, exist_ok=True)
    for name, text in made().items():
        (DOCS / name).write_text(text)


def made() -> dict[str, str]:
    """What the corpus, run with few orders, is shown as: the page and the pictures, by name."""
    reports = [run_hazard(h, orders=50) for h in HAZARDS]
    found = {f"hazards/{r.hazard.id}.svg": picture(r.hazard) for r in reports}
    return {"hazards.md": "\n".join(page(reports)) + "\n", **found}


def page(reports: list[HazardReport]) -> Iterator[str]:
    """The lines of docs/hazards.md."""
    yield INTRO
    yield "| id | race | refused for | wrong elements | price of the fix |"
    yield "|---|---|---|---|---|"
    yield from (_row(r) for r in reports)
    for r in reports:
        yield from _entry(r)
    yield "\n## Rows of the catalogue without a plan\n"
    yield from (f"- **{row}**: {why}" for row, why in UNEXPRESSED.items())


def _row(r: HazardReport) -> str:
    h, e, c = r.hazard, r.hazard.expected, r.corruption
    why = "accepted" if e is None else f"{e.kind}: " + _pair(h)
    wrong = "" if c is None else f"{c.elements} of {c.of}"
    return f"| [{h.id}](#{_anchor(h)}) | {h.title} | {why} | {wrong} | {r.fix_price or ''} |"


def _pair(h: Hazard) -> str:
    e = h.expected
    return "" if e is None else " / ".join(f"`{x}`" for x in (e.first, e.second) if x)


def _anchor(h: Hazard) -> str:
    kept = [c for c in f"{h.id} {h.title}".lower() if c.isalnum() or c in " -"]
    return "".join(kept).replace(" ", "-")


def _entry(r: HazardReport) -> Iterator[str]:
    h = r.hazard
    yield f"\n## {h.id} {h.title}\n"
    yield f"{', '.join(h.upstream)}\n"
    yield f"{h.story}\n"
    yield f"![timeline of {h.id}](hazards/{h.id}.svg)\n"
    if r.counter_example is not None:
        yield "```text"
        yield str(r.counter_example).split("\n  nearby:")[0]
        yield "```\n"
    if r.corruption is not None:
        yield f"On the simulator ({r.corruption.order}): {r.corruption}."
        if r.corruption.agreement is not None:
            share = 100 * r.corruption.agreement
            yield f"Rows that draft the right token: {share:.1f} %, with the fix 100 %."
        yield ""
    yield f"**Fix:** {h.repair}.\n"
    yield "| plan | arena bytes | waits per run | estimated us |"
    yield "|---|---|---|---|"
    for title, p in r.prices.items():
        yield f"| {title} | {p.nbytes} | {p.waits} | {p.seconds * 1e6:.1f} |"


def picture(h: Hazard) -> str:
    """Timelines of the bad and the fixed plan, one above the other, as SVG."""
    parts: list[str] = []
    y = 20
    for title, done in timelines(h).items():
        spans = [s for s in done.timeline if s.stop > s.start or _is_culprit(h, s)]
        parts.append(f'<text class="t" x="8" y="{y}">{title} plan</text>')
        lines, y = _lanes(h, spans, y + 8, title)
        parts += lines
    style = f"<style>{STYLE}</style>"
    label = escape(f"timelines of hazard {h.id}: {h.title}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="{label}">{style}{"".join(parts)}</svg>\n'
    )


def _is_culprit(h: Hazard, s: Span) -> bool:
    e = h.expected
    return e is not None and s.label in (e.first, e.second)


def _lanes(h: Hazard, spans: list[Span], top: int, title: str) -> tuple[list[str], int]:
    actors = sorted({s.actor for s in spans})
    end = max((s.stop for s in spans), default=0.0) or 1e-6
    scale = (WIDTH - LEFT - 16) / end
    found: list[str] = []
    for i, actor in enumerate(actors):
        middle = top + i * LANE + LANE - BAR // 2
        found.append(f'<text class="a" x="8" y="{middle + 4}">{actor}</text>')
        found.append(f'<path class="l" d="M{LEFT} {middle}H{WIDTH - 8}"/>')
    for s in sorted(spans, key=lambda s: _is_culprit(h, s)):
        y = top + actors.index(s.actor) * LANE + LANE - BAR
        found.append(_bar(s, y, scale, title if _is_culprit(h, s) else "b"))
    bottom = top + len(actors) * LANE + 16
    found.append(f'<text class="a" x="{LEFT}" y="{bottom}">0</text>')
    found.append(
        f'<text class="a" x="{WIDTH - 8}" y="{bottom}" text-anchor="end">{end * 1e6:.1f} us</text>'
    )
    return found, bottom + GAP


def _bar(s: Span, y: int, scale: float, kind: str) -> str:
    """A bar; its name above it for a culprit, inside it where there is room, and as tooltip."""
    x, wide = LEFT + s.start * scale, max(4.0, (s.stop - s.start) * scale)
    name = escape(s.label)
    shown = ""
    if kind != "b":
        anchor, at = ("end", x + wide) if x > WIDTH * 0.8 else ("start", x)
        shown = f'<text x="{at:.1f}" y="{y - 4}" text-anchor="{anchor}">{name}</text>'
    elif len(s.label) * 6.6 + 8 < wide:
        shown = f'<text x="{x + 4:.1f}" y="{y + 13}">{name}</text>'
    return (
        f'<g><title>{s.actor}: {name}</title><rect class="{kind}" x="{x:.1f}" '
        f'y="{y}" width="{wide:.1f}" height="{BAR}" rx="3"/>{shown}</g>'
    )


if __name__ == "__main__":
    main()
