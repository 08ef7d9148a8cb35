"""The figures of drafting in docs/eagle3.md, made of what `ggraph bench spec` measured.

    python scripts/draft_figures.py RESULT.json [RESULT.json ...]

Results are files of `ggraph bench spec --json`, or what bench/kept.py made of them. Writes a table
per file and setting between the marks of docs/eagle3.md, and a picture of the mean speeds,
docs/eagle3/speed.svg.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import kept
import pages

PAGE = ROOT / "docs" / "eagle3.md"
PICTURE = ROOT / "docs" / "eagle3" / "speed.svg"
SCRIPT = "scripts/draft_figures.py"
COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df")
HEAD = (
    "", "prompts", "plain, tokens/s", "drafts, tokens/s", "mean", "with reading", "least",
    "below 0.97x", "tokens a round", "drafts kept",
    "plain against itself: least, below", "text",
)  # fmt: skip
WIDE, LEFT, BAR, GAP = 720, 150, 11, 12  # of the picture, in its units

Row = dict[str, Any]


def ratio(value: float | None) -> str:
    """A speed as tables show it."""
    return "-" if value is None else f"{value:.2f}x"


def table(groups: dict[str, Row]) -> str:
    """One setting, group by group."""
    rows = []
    for group, r in groups.items():
        rows.append((
            group, str(r["prompts"]), f"{r['plain_tokens_per_second']:.1f}",
            f"{r['tokens_per_second']:.1f}", f"**{ratio(r['mean_speedup'])}**",
            ratio(r.get("mean_speedup_with_reading")), ratio(r["least_speedup"]),
            str(r["below_floor"]), f"{r['acceptance_length']:.2f}",
            f"{r['acceptance_rate']:.1%}",
            f"{ratio(r['plain_against_itself_least'])}, {r['plain_against_itself_below_floor']}",
            "identical" if r["identical"] else "DIFFERENT",
        ))  # fmt: skip
    return pages.table(HEAD, rows)


def title(found: Row) -> str:
    """What was measured, on what."""
    done, asked = len(found["answers"]), found["asked"]
    some = f"{done}" if done == asked else f"{done} of {asked}"
    close, first = found.get("close_rounds"), found["answers"][0]["settings"].values()
    until_clear = any("speedup_error" in f for f in first)
    more = (
        "up to {} more until the side of 0.97x is clear" if until_clear else "{} more under 1.03x"
    )
    rounds = f"{found['rounds']} rounds" + (f" ({more.format(close)})" if close else "")
    return (
        f"{found['prompts']}, {some} prompts, {found['new_tokens']} tokens, greedy, "
        f"{found['threads']} threads, {rounds}, head {found['head'] or 'none'}, "
        f"{kept.measured_on(found)}"
    )


def text(results: Sequence[Row]) -> str:
    """All tables with the picture before them."""
    parts = [f"![mean speed by group of prompts]({PICTURE.relative_to(PAGE.parent)})\n"]
    for found in results:
        parts.append(f"{title(found)}:\n")
        parts += [f"`{name}`\n\n{table(groups)}" for name, groups in found["tables"].items()]
    return "\n".join(parts)


def bars(results: Sequence[Row]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Groups of all results with the settings' mean and least speeds; of a setting that several
    results have, the first one's, since machines and days are not to be mixed."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for result in results:
        for name, groups in result["tables"].items():
            for group, r in groups.items():
                whole = group in ("all", "without loops")
                label = f"{group} ({result['prompts']})" if whole else group
                held = found.setdefault(label, [])
                if all(name != other for other, _, _ in held):
                    held.append((name, r["mean_speedup"], r["least_speedup"]))
    return list(found.items())


def picture(results: Sequence[Row]) -> str:
    """Bars of mean speed, a mark at the least of any prompt, a line at plain decoding's speed."""
    groups = bars(results)
    names = list(dict.fromkeys(n for _, held in groups for n, _, _ in held))
    scale = (WIDE - LEFT - 60) / max(mean for _, held in groups for _, mean, _ in held)
    y, parts = 30.0, []
    for i, name in enumerate(names):
        x = LEFT + 130 * i
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{name}</text>')
    for group, held in groups:
        middle = y + BAR * len(held) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{group}</text>')
        for name, mean, least in held:
            colour, end = COLOURS[names.index(name) % len(COLOURS)], LEFT + mean * scale
            low = LEFT + least * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y:.0f}" width="{mean * scale:.1f}" height="{BAR - 2}" '
                f'fill="{colour}"/><line x1="{low:.1f}" x2="{low:.1f}" y1="{y:.0f}" '
                f'y2="{y + BAR - 2:.0f}" stroke="black" stroke-width="2"/>'
                f'<text x="{end + 4:.1f}" y="{y + 9:.0f}">{mean:.2f}x</text>'
            )
            y += BAR
        y += GAP
    plain = LEFT + scale
    parts.append(f'<line x1="{plain:.1f}" x2="{plain:.1f}" y1="26" y2="{y:.0f}" stroke="#888"/>')
    label = "mean speed against plain decoding (line: 1x); black marks: the slowest prompt"
    parts.append(f'<text x="{LEFT}" y="{y + 14:.0f}">{label}</text>')
    return pages.drawing(WIDE, y + 24, parts)


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    results = [kept.read(path) for path in given.results]
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture(results))
    given.page.write_text(pages.placed(given.page.read_text(), SCRIPT, "Measured", text(results)))
    print(f"wrote {given.page} and {given.picture}")


if __name__ == "__main__":
    main()
