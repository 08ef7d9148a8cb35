"""Pictures of README.md and docs/races.md, drawn from plans: python scripts/make_pictures.py

Runs the blocks of docs/races.md and draws the plans that they make: which stream does what when, as
the simulator ran it in an order that the plan allows, and which bytes hold what meanwhile. Nothing
is drawn that was not computed. Readable on light and dark grounds.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # a clone need not be installed

from make_hazard_docs import STYLE

from ggraph.backends.sim import Adversarial, Order, Simulator, Span, Timed
from ggraph.plan import Certificate, Plan
from ggraph.verify import CounterExample, examine

PAGE = ROOT / "docs" / "races.md"
ARENA = "arena@gpu"
WIDTH, LEFT, LANE, BAR, HIGH, GAP = 860, 64, 28, 18, 96, 20  # of a picture, in its units
MORE = (
    ".m{fill:#eef1f4;stroke:#afb8c1}.see{fill-opacity:.5}.v{font-weight:600}.no{fill:#cf222e}.yes{fill:#1a7f37}"
    "@media(prefers-color-scheme:dark){.m{fill:#21262d;stroke:#6e7681}.no{fill:#ff7b72}"
    ".yes{fill:#56d364}}"
)


@dataclass(frozen=True)
class Shown:
    """One plan of a picture: what stands above it, and the order in which it is run."""

    title: str
    plan: Plan
    order: Order


def names_of(page: Path) -> dict[str, Any]:
    """What the Python blocks of a page leave behind; what they print is dropped."""
    found: dict[str, Any] = {"__name__": page.stem}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            exec(compile(block, str(page), "exec"), found)
    return found


def verdict(plan: Plan) -> tuple[str, str, set[str]]:
    """A sentence, its class, and the labels of the two commands that race."""
    found = examine(plan)
    if isinstance(found, Certificate):
        words = (
            f"proved: {found.pairs_checked} pairs of accesses ordered, {found.reads_proved} reads "
            f"traced, {found.reuses} reuses of bytes"
        )
        return words, "yes", set()
    assert isinstance(found, CounterExample)
    sites = [s for s in (found.first, found.second) if s is not None]
    hot = {plan.schedule.commands[s.index].label for s in sites}
    return f"refused: {found.message}", "no", hot


def drawn(shown: Shown, data: Mapping[str, Any], top: float) -> tuple[list[str], float]:
    """Title, verdict, lanes of the streams, and the arena's bytes below; where it ends."""
    done = Simulator(shown.plan, data["arrays"]).run([data["feeds"]], shown.order)
    spans = [s for s in done.timeline if s.actor.device == "gpu" and s.stop > s.start]
    words, kind, hot = verdict(shown.plan)
    parts = [
        f'<text class="t" x="8" y="{top + 14:.0f}">{escape(shown.title)}</text>',
        f'<text class="v {kind}" x="8" y="{top + 31:.0f}">{escape(words)}</text>',
    ]
    scale = (WIDTH - LEFT - 8) / max(s.stop for s in spans)
    actors = sorted({s.actor for s in spans})
    for i, actor in enumerate(actors):
        y = top + 40 + i * LANE
        parts.append(f'<text class="a" x="8" y="{y + BAR - 5:.0f}">{actor}</text>')
        own = [s for s in spans if s.actor == actor]
        parts += [bar(s, y, scale, "bad" if s.label in hot else "b") for s in own]
    y = top + 44 + len(actors) * LANE
    return [*parts, *memory(shown.plan, spans, y, scale)], y + HIGH + GAP


def bar(s: Span, y: float, scale: float, kind: str) -> str:
    """One command in its lane."""
    return box(LEFT + s.start * scale, y, (s.stop - s.start) * scale, BAR, kind, s.label)


def box(
    x: float, y: float, wide: float, high: float, kind: str, name: str, *, right: bool = False
) -> str:
    """A named rectangle; the name where there is room, left or right, and as its tooltip."""
    fits = len(name) * 6.6 + 6 < wide and high >= 12
    at, anchor = (x + wide - 4, "end") if right else (x + 4, "start")
    place = f'x="{at:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="{anchor}"'
    text = f"<text {place}>{escape(name)}</text>" if fits else ""
    return (
        f'<g><title>{escape(name)}</title><rect class="{kind}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{wide:.1f}" height="{high:.1f}" rx="2"/>{text}</g>'
    )


def memory(plan: Plan, spans: Sequence[Span], top: float, scale: float) -> Iterator[str]:
    """The arena: bytes upwards, time to the right, a box per value from first access to last."""
    size = plan.memory.buffers[ARENA].nbytes
    for text, y in ((f"{size} B", top + 10), ("0", top + HIGH)):
        yield f'<text class="a" x="8" y="{y:.0f}">{text}</text>'
    drawn_before = 0
    for value, (start, stop) in lives(plan, spans).items():
        region = plan.memory.regions[value]
        if region.buffer != ARENA:
            continue
        at, high = region.offsets[0], HIGH * region.nbytes / size
        y = top + HIGH - HIGH * at / size - high
        raced = hit(plan, at, at + region.nbytes)
        place = LEFT + start * scale, y, max(2.0, (stop - start) * scale), high
        yield box(*place, "bad see" if raced else "m", value, right=raced and not drawn_before)
        drawn_before += raced


def hit(plan: Plan, start: int, stop: int) -> bool:
    """Whether bytes of the arena are those of the plan's fault."""
    found = examine(plan)
    return (
        isinstance(found, CounterExample)
        and found.buffer == ARENA
        and start < found.stop
        and found.start < stop
    )


def lives(plan: Plan, spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """From the first access of each value to its last, as it ran."""
    ran = {s.label: s for s in spans}
    found: dict[str, tuple[float, float]] = {}
    for c in plan.schedule:
        for a in (*c.reads, *c.writes) if c.label in ran else ():
            s = ran[c.label]
            start, stop = found.get(a.value, (s.start, s.stop))
            found[a.value] = min(start, s.start), max(stop, s.stop)
    return found


def picture(rows: Sequence[Shown], data: Mapping[str, Any], label: str) -> str:
    """Plans one above the other, as SVG."""
    parts: list[str] = []
    y = 4.0
    for shown in rows:
        lines, y = drawn(shown, data, y)
        parts += lines
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><style>{STYLE}{MORE}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """Every picture by its file."""
    data = names_of(PAGE)
    sound = Shown("a sound plan: two streams, bytes passed on in time", data["sound"], Timed())
    lost = Shown("the same without a wait, y first", data["lost"], Adversarial("a2", "y"))
    shared = Shown(
        "memory by list order: b lies on bytes of a", data["shared"], Adversarial("a2", "b")
    )
    upstream = "two streams with memory from ggml's allocator, by list order"
    race = Shown(upstream, data["shared"], Adversarial("a2", "b"))
    ours = Shown("the plan that ggraph makes, proves and runs", data["sound"], Timed())
    folder = ROOT / "docs" / "races"
    return {
        folder / "sound.svg": picture([sound], data, "timeline and memory of the sound plan"),
        folder / "lost.svg": picture([lost], data, "timeline and memory without the wait"),
        folder / "shared.svg": picture([shared], data, "timeline and memory with shared bytes"),
        ROOT / "docs" / "ggraph.svg": picture(
            [race, ours], data, "two plans of one graph: one refused for a race, one proved"
        ),
    }


def main() -> None:
    """Write all of them."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in pictures().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
