"""How a step's cost grows: with the context, with the rows, and op by op against the ceilings.

    python bench/growth.py [MODEL] [--threads 2] [--context 8192] [--json OUT] [--plots FOLDER]

Context: one decoded row at 64 to 8,192 tokens of real cache content. Rows: 1 to 512 rows in one
pass behind 256 tokens. Roofline: every op of a decode step, of 5 verified rows and of a prompt of
128, beside the time that its bytes and its operations need at the machine's measured ceilings.
Medians; the sizes take turns. Nothing may grow faster than its theory: a step is at most a + b C
in the context C, and at most a + b T + c T C in the rows T. `--plots` writes two SVG files.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import env
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.rows import Rows
from models.bench.cpu import prompt_ids
from models.bench.machine import machine
from models.run.fetch import fetch_default
from models.run.load import Loaded, load

CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512)
BEHIND = 256  # tokens in the cache while rows are measured
ROOM = 16  # tokens kept free at the end of the context
CASES = ((64, 1), (1024, 1), (64, 5), (0, 128))  # tokens in the cache and rows, op by op
LEAST = max(BEHIND + max(ROWS), *map(sum, CASES)) + ROOM  # tokens of context


def fill(m: Loaded, count: int) -> list[int]:
    """Put `count` tokens of plain text into the cache; their ids."""
    ids = prompt_ids(m, count)
    m.runner.past = 0
    m.runner.text(ids)
    return ids


def step_seconds(m: Loaded, ids: Sequence[int], past: int, rows: int, every: bool) -> float:
    """Seconds of one step of `rows` rows behind `past` tokens, which is then forgotten."""
    runner = m.runner
    slots = range(past, past + rows)
    tokens = [ids[i % len(ids)] for i in slots]
    wanted = range(rows) if every else [rows - 1]
    runner.past = past
    begun = time.perf_counter()
    runner.step(Rows(tokens, slots, slots, past), wanted)
    return time.perf_counter() - begun


def in_turn(actions: dict[int, Callable[[], float]], rounds: int) -> dict[int, float]:
    """Medians of several rounds over all sizes, after one that is not counted."""
    times: dict[int, list[float]] = {n: [] for n in actions}
    for i in range(rounds + 1):
        for n, action in actions.items():
            seconds = action()
            if i:
                times[n].append(seconds)
    return {n: statistics.median(t) for n, t in times.items()}


def by_context(m: Loaded, ids: Sequence[int], rounds: int) -> dict[int, float]:
    """Context -> seconds of one decoded row."""
    last = len(ids)
    places = {c: min(c, last) for c in CONTEXTS if c <= last + ROOM}
    return in_turn(
        {c: partial(step_seconds, m, ids, at, 1, False) for c, at in places.items()}, rounds
    )


def by_rows(m: Loaded, ids: Sequence[int], rounds: int) -> dict[int, float]:
    """Rows -> seconds of one pass; up to 8 rows get logits each, as in verification."""
    return in_turn({n: partial(step_seconds, m, ids, BEHIND, n, n <= 8) for n in ROWS}, rounds)


def roofline(m: Loaded, ids: Sequence[int], past: int, rows: int) -> dict[str, Any]:
    """Ops of a step with their time and what the ceilings would allow."""
    backend = m.session.backends["cpu"]
    assert isinstance(backend, CpuBackend)
    profile = backend.profile
    assert profile is not None
    whole = statistics.median(step_seconds(m, ids, past, rows, rows <= 8) for _ in range(9))
    profile.times.clear()
    profile.on = True
    for _ in range(9):
        step_seconds(m, ids, past, rows, rows <= 8)
    profile.on = False
    top = profile.ceilings()
    found: dict[str, dict[str, float]] = {}
    for (name, _), t in profile.times.items():
        op = found.setdefault(name.split(" ")[0], {"ms": 0, "read_ms": 0, "fma_ms": 0, "calls": 0})
        count = len(t.times) / 9
        op["ms"] += t.seconds / 9 * 1e3
        op["calls"] += count
        op["read_ms"] += count * t.nbytes / top.read * 1e3
        op["fma_ms"] += count * t.flops / top.fma * 1e3
    return {
        "rows": rows,
        "context": past,
        "step_ms": whole * 1e3,
        "ceilings": vars(top),
        "ops": found,
    }


def slope(found: dict[int, float], low: int, high: int) -> float:
    """Seconds per unit between two sizes."""
    return (found[high] - found[low]) / (high - low)


def faster_than_theory(context: dict[int, float], rows: dict[int, float]) -> list[str]:
    """Where a cost grows faster than it may: slopes that rise although the theory is a line.

    Rows attend to each other, so their slope may rise by the share that attention has of it.
    """
    faults = []
    sizes = sorted(context)
    if len(sizes) >= 4:
        first, last = slope(context, sizes[-3], sizes[-2]), slope(context, sizes[-2], sizes[-1])
        if last > 1.5 * max(first, 0.0):
            faults.append(f"context: {first * 1e9:.0f} ns per token, then {last * 1e9:.0f}")
    first, last = slope(rows, 64, 128), slope(rows, 256, 512)
    attention = max(slope(context, sizes[0], sizes[-1]), 0.0) * 512
    if last > 1.25 * first + attention:
        faults.append(f"rows: {first * 1e6:.0f} us per row, then {last * 1e6:.0f}")
    return faults


def plot(title: str, across: str, points: dict[int, float], unit: str) -> str:
    """An SVG line over a logarithmic axis; values are written at the points."""
    wide, high, edge = 720, 320, 50
    sizes, values = sorted(points), [points[n] for n in sorted(points)]
    low, top = np.log2(sizes[0]), np.log2(sizes[-1])
    peak = max(values) * 1.15
    xs = [edge + (np.log2(n) - low) / (top - low) * (wide - 2 * edge) for n in sizes]
    ys = [high - edge - v / peak * (high - 2 * edge) for v in values]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f6feb"/>'
        f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{v:.4g}</text>'
        f'<text x="{x:.1f}" y="{high - edge + 16}" text-anchor="middle">{n}</text>'
        for x, y, v, n in zip(xs, ys, values, sizes, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="{wide}" height="{high}" fill="white"/>'
        f'<text x="{wide / 2}" y="20" text-anchor="middle" font-size="14">{title}, {unit}</text>'
        f'<text x="{wide / 2}" y="{high - 12}" text-anchor="middle">{across}</text>'
        f'<line x1="{edge}" y1="{high - edge}" x2="{wide - edge}" y2="{high - edge}" '
        'stroke="#888"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>{marks}</svg>\n'
    )


def write_plots(folder: Path, context: dict[int, float], rows: dict[int, float]) -> None:
    """Tokens per second against context, and rows per second against rows."""
    folder.mkdir(parents=True, exist_ok=True)
    speed = {n: 1 / s for n, s in context.items()}
    rate = {n: n / s for n, s in rows.items()}
    (folder / "speed_by_context.svg").write_text(
        plot("Decoding", "tokens in the cache", speed, "tokens/s")
    )
    (folder / "speed_by_rows.svg").write_text(plot("One pass", "rows in the pass", rate, "rows/s"))


def measure(path: Path, threads: int, context: int, rounds: int) -> dict[str, Any]:
    """Everything, as it goes into the result file."""
    with closing(load(path, threads=threads, ctx_size=context, profile=True)) as m:
        ids = fill(m, context - ROOM)
        found = {"context": by_context(m, ids, rounds), "rows": by_rows(m, ids, rounds)}
        tables = [roofline(m, ids, past, rows) for past, rows in CASES]
    return {**machine(), "model": path.name, "threads": threads, **found, "roofline": tables}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=env.thread_count())
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path)
    given = parser.parse_args()
    if given.context < LEAST:
        parser.error(f"--context {given.context}: the measurements need {LEAST} tokens or more")
    result = measure(given.model or fetch_default(), given.threads, given.context, given.rounds)
    for n, s in result["context"].items():
        print(f"context {n:5}: {s * 1e3:8.2f} ms, {1 / s:8.1f} tokens/s")
    for n, s in result["rows"].items():
        print(f"rows {n:8}: {s * 1e3:8.2f} ms, {n / s:8.1f} rows/s")
    for table in result["roofline"]:
        ops = sum(o["ms"] for o in table["ops"].values())
        print(
            f"{table['rows']} rows at {table['context']}: {table['step_ms']:.2f} ms, ops {ops:.2f}"
        )
    faults = faster_than_theory(result["context"], result["rows"])
    print("\n".join(faults) or "nothing grows faster than its theory")
    if given.json:
        given.json.write_text(json.dumps({**result, "faults": faults}, indent=1) + "\n")
    if given.plots:
        write_plots(given.plots, result["context"], result["rows"])


if __name__ == "__main__":
    main()
