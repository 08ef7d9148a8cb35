"""Frames of the page's charts: one time axis for all, lanes, ticks. Text only.

Positions along time are percentages, so that the page can stretch every chart alike. A chart is a
column of names and, beside it, an SVG over another one with the ticks, which scroll together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

GUTTER = 0.6  # per cent of free room at both ends of the axis
RIGHT = 85.0  # per cent of the axis behind which a text would run over its end
TICKS = 8


@dataclass(frozen=True)
class Axis:
    """The time axis: `seconds` from its left to its right end."""

    seconds: float

    def x(self, at: float) -> str:
        """A time as a position."""
        return f"{self._percent(at):.3f}%"

    def width(self, start: float, stop: float) -> str:
        """A duration as a width."""
        return f"{max(self._percent(stop) - self._percent(start), 0.05):.3f}%"

    def _percent(self, at: float) -> float:
        return GUTTER + (100 - 2 * GUTTER) * at / (self.seconds or 1.0)

    def edge(self, at: float) -> str:
        """The class of a text at a time: one near the right end grows to the left, lest it be
        clipped."""
        return " last" if self._percent(at) > RIGHT else ""

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Round times, and how they are written."""
        step = _round_step(self.seconds / TICKS)
        unit, name = _unit(self.seconds)
        for k in range(int(self.seconds / step) + 1):
            yield k * step, f"{k * step / unit:g} {name}"


def _round_step(wanted: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is no less than `wanted`."""
    scale = 1e-12
    while scale * 10 <= wanted:
        scale *= 10
    return next((m * scale for m in (1, 2, 5) if m * scale >= wanted), 10 * scale)


def _unit(seconds: float) -> tuple[float, str]:
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    return next((u for u in units if seconds >= u[0]), (1e-9, "ns"))


def span_text(start: float, stop: float) -> str:
    """`12.0 to 16.0 us`."""
    unit, name = _unit(stop)
    return f"{start / unit:.1f} to {stop / unit:.1f} {name}"


def chart(
    names: Sequence[tuple[str, str]],
    height: float,
    rows: Sequence[str],
    axis: Axis,
    *,
    grows: bool = False,
) -> str:
    """A chart of `height` pixels over the axis; `names` stand on the left, each with its place in
    CSS. One that `grows` has its rows' heights in per cent: the page can make it taller."""
    left = "".join(
        f'<span style="{place}" title="{escape(n, quote=True)}">{escape(n)}</span>'
        for place, n in names
    )
    lines, ticks = _grid(axis)
    return (
        f'<div class="chart{" grows" if grows else ""}" style="--height:{height:.0f}px">'
        f'<div class="names">{left}</div><div class="pan"><svg class="drawn">{lines}'
        f'{"".join(rows)}</svg><svg class="ticks">{ticks}</svg></div></div>'
    )


def _grid(axis: Axis) -> tuple[str, str]:
    """A line for each tick, and what is written under it."""
    lines = texts = ""
    for at, text in axis.ticks():
        x, edge = axis.x(at), axis.edge(at) if at else " first"
        lines += f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>'
        texts += f'<text class="tick{edge}" x="{x}" y="15">{text}</text>'
    return lines, texts


def tip(text: str) -> str:
    """What the pointer shows; the page's script turns titles into a faster tooltip."""
    return f"<title>{escape(text)}</title>"
