"""Small graphs against PyTorch on the CPU: python scripts/bench_graphs.py [--only NAME] [--keep]

Each graph of `bench/graphs.py` runs here, in PyTorch eager and, with --compile, in `torch.compile`,
on the same threads, the sides taking turns; what is printed is the median of each side in
milliseconds, and how many times PyTorch's time ours goes in. Differences of the results are printed
too. Where other programs run, `--threads 1 --clock processor` compares what the processor did for
each side. With --keep the rows replace those of `bench/results/performance/graphs.json`, and
docs/performance/graphs.md is made of it. PyTorch is an extra that nothing else here needs: without
it our own times are printed and the table says so.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]  # a clone need not be installed

import kept
import pages
from graphs import CASES, Case

from ggraph import Array, Graph, Options, Session, open_backend
from ggraph.ops.evaluate import to_storage
from models.bench.machine import Others, machine

try:
    import torch
except ImportError:
    torch = None

KEPT = ROOT / "bench" / "results" / "performance" / "graphs.json"
PAGE = ROOT / "docs" / "performance" / "graphs.md"
ROUNDS_MIN, ROUND_SECONDS = 15, 0.02
REST = 0.02  # seconds before a side's turn: the other's threads spin so long after their work
CLOCKS = {
    "wall": (time.perf_counter, "seconds by the clock"),
    "processor": (time.process_time, "seconds of the processor, which do not count what others do"),
}


def ours(case: Case, threads: int) -> tuple[Callable[[], Array], dict[str, Array]]:
    """A call that runs our side, and all values by name."""
    y, feeds, held = case.build()
    graph = Graph.of({"y": y})
    session = Session({"cpu": open_backend("cpu", threads=threads)}, Options(strict=True))
    session.prepare("k", graph, {n: stored(graph, n, a) for n, a in held.items()})
    return lambda: session.run("k", feeds)["y"], {**feeds, **held}


def stored(graph: Graph, name: str, values: Array) -> Array:
    """A weight's values as its type stores them."""
    return to_storage(values, graph[name])


def theirs(case: Case, values: Mapping[str, Array], compiled: bool) -> Callable[[], Array]:
    """A call that runs PyTorch's side."""
    tensors = {n: torch.from_numpy(a) for n, a in values.items()}

    def step(v: Mapping[str, Any]) -> Any:
        return case.torch(torch, v)

    if compiled:
        torch.compiler.reset()  # every graph shares `step`, which is compiled eight times at most
    run = torch.compile(step, dynamic=False) if compiled else step

    def call() -> Array:
        with torch.inference_mode():
            found: Array = run(tensors).numpy()
        return found

    return call


def timed(
    sides: Mapping[str, Callable[[], Array]], rounds: int, now: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of a call of each side; the sides take turns, each with its threads awake and
    the others' asleep."""
    counts, times = {}, {n: list[float]() for n in sides}
    for name, call in sides.items():
        call()
        begun = now()
        call()
        counts[name] = max(1, int(ROUND_SECONDS / (now() - begun + 1e-9)))
    for _ in range(rounds):
        for name, call in sides.items():
            time.sleep(REST)
            call()
            begun = now()
            for _ in range(counts[name]):
                call()
            times[name].append((now() - begun) / counts[name])
    return {n: statistics.median(t) for n, t in times.items()}


def measured(case: Case, threads: int, rounds: int, compiled: bool, clock: str) -> dict[str, Any]:
    """One row of the table."""
    mine, values = ours(case, threads)
    sides = {"ggraph": mine}
    if torch is not None:
        sides["eager"] = theirs(case, values, False)
        if compiled:
            sides["compile"] = theirs(case, values, True)
    others, begun = Others(), time.process_time()
    row: dict[str, Any] = {"graph": case.name, **timed(sides, rounds, CLOCKS[clock][0])}
    row["others"] = others.cores(time.process_time() - begun)
    if torch is not None:
        want = sides["eager"]()
        row["difference"] = float(np.abs(mine() - want).max() / np.abs(want).max())
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, and PyTorch's time over ours."""
    others = [n for n in ("eager", "compile") if n in rows[0]]
    head = ["graph", "ggraph ms", *(f"{n} ms" for n in others), *(f"{n} / ggraph" for n in others)]
    lines = [" | ".join(f"{h:>20}" for h in head)]
    for r in rows:
        cells = [r["graph"], f"{r['ggraph'] * 1e3:.3f}", *(f"{r[n] * 1e3:.3f}" for n in others)]
        cells += [f"{r[n] / r['ggraph']:.2f}" for n in others]
        lines.append(" | ".join(f"{c:>20}" for c in cells))
    for n in others:
        mean = statistics.geometric_mean(r[n] / r["ggraph"] for r in rows)
        lines.append(f"geometric mean of {n} / ggraph: {mean:.2f}")
    if not others:
        lines.append("PyTorch is not installed: no comparison (pip install torch)")
    return "\n".join(lines)


def kept_rows(rows: Sequence[dict[str, Any]], threads: int, clock: str) -> list[dict[str, Any]]:
    """The rows with those that were kept, each with its machine, by threads, then by graphs."""
    about = machine() | {"threads": threads, "clock": clock, "torch": torch.__version__}
    found = kept.read(KEPT) if KEPT.is_file() else {"rows": [], "runs": []}
    old = [r | {"on": found["runs"][r["on"]]} for r in found["rows"]]
    held = {(r["on"]["threads"], r["graph"]): r for r in old}
    held |= {(threads, r["graph"]): r | {"on": about} for r in rows}
    counts = sorted({n for n, _ in held}, reverse=True)
    return [held[n, c.name] for n in counts for c in CASES if (n, c.name) in held]


def _told(on: dict[str, Any]) -> str:
    """Where and how a row was measured."""
    return f"PyTorch {on['torch']}, {CLOCKS[on['clock']][1]}; {kept.measured_on(on)}"


def _section(threads: int, rows: Sequence[dict[str, Any]]) -> str:
    """The table of so many threads."""
    sides = ("ggraph", "eager", "compile")
    over = [f"{n} over ggraph" for n in sides[1:]]
    head = ["graph", *(f"{n}, ms" for n in sides), *over, "difference", "others"]
    body = [
        [r["graph"], *(f"{r[n] * 1e3:.3f}" for n in sides)]
        + [f"{r[n] / r['ggraph']:.2f}x" for n in sides[1:]]
        + [f"{r['difference']:.0e}", f"{r['others'] or 0:.2f}"]
        for r in rows
    ]
    means = {n: statistics.geometric_mean(r[n] / r["ggraph"] for r in rows) for n in sides[1:]}
    others = statistics.geometric_mean(sorted(r["eager"] / r["ggraph"] for r in rows)[:-1] or [1])
    slowest = min(rows, key=lambda r: r["eager"] / r["ggraph"])
    told = sorted({_told(r["on"]) for r in rows})
    return (
        f"## {threads} thread{'s' * (threads > 1)}\n\n{'; '.join(told)}.\n\n"
        f"{pages.table(head, body)}\n"
        f"Geometric means: eager takes {means['eager']:.2f}x our time, `torch.compile` "
        f"{means['compile']:.2f}x;\nwithout the graph that gains most {others:.2f}x of eager. "
        f"Least: {slowest['graph']}, where eager\ntakes "
        f"{slowest['eager'] / slowest['ggraph']:.2f}x.\n"
    )


def page(rows: Sequence[dict[str, Any]]) -> str:
    """docs/performance/graphs.md."""
    counts = dict.fromkeys(r["on"]["threads"] for r in rows)
    tables = [_section(n, [r for r in rows if r["on"]["threads"] == n]) for n in counts]
    return (
        "# Small graphs beside PyTorch on the CPU\n\n"
        "Made by `python scripts/bench_graphs.py --compile --keep`: each graph of\n"
        "`bench/graphs.py` here, in PyTorch eager and in `torch.compile`, which take turns, each\n"
        f"after a rest of {REST * 1e3:.0f} ms in which the others' threads fall asleep;\n"
        "medians of a call. Difference: the greatest, over the greatest element; PyTorch's\n"
        "weights are float32 throughout. Others: cores that other programs used meanwhile.\n\n"
        + "\n".join(tables)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile as well")
    parser.add_argument("--only", default="", help="graphs whose names hold one of these: a,b")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep rows, and write the page anew")
    args = parser.parse_args()
    if torch is not None:
        torch.set_num_threads(args.threads)
    elif args.keep:
        parser.error("--keep wants PyTorch: pip install torch")
    wanted = args.only.lower().split(",")
    chosen = [c for c in CASES if any(part in c.name.lower() for part in wanted)]
    rows = [measured(c, args.threads, args.rounds, args.compile, args.clock) for c in chosen]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.keep:
        rows = kept_rows(rows, args.threads, args.clock)
        newest = max((r["on"] for r in rows), key=lambda on: str(on["date"]))
        runs = list({str(r["on"]): r["on"] for r in rows}.values())
        told = [r | {"on": runs.index(r["on"])} for r in rows]
        kept.write(KEPT, {**newest, "runs": runs, "rows": told})
        PAGE.write_text(page(rows))
        print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
