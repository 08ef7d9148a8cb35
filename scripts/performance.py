"""All figures of docs/performance.md by one command, and the page made of them.

    python scripts/performance.py measure [--quick] [--only startup,growth] [--head HEAD.gguf]
                                          [--first]
    python scripts/performance.py measure --only perplexity
    python scripts/performance.py page

`measure` runs the benchmarks one after another, each in a process of its own, and keeps their JSON
in bench/results/performance; run it on a quiet machine (--quick: fewer rounds). Where other
programs cannot be stopped, `--first` asks Linux to let the benchmark go first (as root). Models of
true shape beside other engines are `scripts/true_shapes.py`'s.
Perplexity, which needs no quiet machine but ten more minutes, is measured where it is named.
`page` writes docs/performance.md, its plots and README's table from whatever results there are.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts"), str(ROOT)]

import kept
import true_shapes
from growth import write_plots
from pages import table

from models.bench.machine import machine

RESULTS = ROOT / "bench" / "results" / "performance"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
MARKED = re.compile(r"(<!-- made: peers -->\n).*?(<!-- end -->)", re.S)
SHAPES = [
    path
    for type_name in (true_shapes.HEADLINE, "")
    for n in (2, 1)
    for path in true_shapes.results(n, type_name)
]
CASES = ("decode at 64", "decode at 1024", "prompt of 512")  # the README's, of true shapes
WHERE_NAMED = ("perplexity",)
HEAD = ("processor", "instructions", "commit", "date")  # of what a benchmark ran on


def commands(quick: bool, head: Path | None) -> dict[str, list[str]]:
    """Name of each result and the command that makes it, as a user would type it."""
    spec = ["-m", "models", "bench", "spec", "--rounds", "2" if quick else "5", "--threads", "2"]
    spec += ["--prompts", "bench/data/eval/spec_bench.jsonl"]
    found = {
        "startup": ["scripts/startup.py", "--threads", "2"],
        "spec": [*spec, "--settings", "suffix", "--limit", "12" if quick else "20"],
        "growth": ["bench/growth.py", "--threads", "2"],
        "perplexity": ["scripts/perplexity.py", "--windows", "8" if quick else "64"],
    }
    if head is not None:
        eagle = [*spec, "--head", str(head)]
        mt = ["--prompts", "bench/data/eval/mt_bench.jsonl", "--limit", "16" if quick else "80"]
        found["eagle-spec"] = [*eagle, "--limit", "12" if quick else "60"]
        found["eagle-mt"] = [*eagle, *mt]
    return found


def go_first() -> None:
    """Ask the scheduler to prefer this process's session to all others; silent where it cannot."""
    try:
        Path("/proc/self/autogroup").write_text("-20")
    except OSError:
        return


def measure(quick: bool, only: Sequence[str], head: Path | None, first: bool) -> None:
    """Run the benchmarks; a failing one is reported and the others go on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, command in commands(quick, head).items():
        if name not in only if only else name in WHERE_NAMED:
            continue
        print(f"== {name}: python {' '.join(command)}", flush=True)
        new = RESULTS / f"{name}.new"
        done = subprocess.run(
            [sys.executable, *command, "--json", str(new)], cwd=ROOT, check=False,
            env=environment(), start_new_session=first, preexec_fn=go_first if first else None,
        )  # fmt: skip
        if done.returncode:
            print(f"== {name} ended with status {done.returncode}", flush=True)
        if new.is_file():
            shown = " ".join(command).replace(f"{ROOT}/", "")
            where = {k: v for k, v in machine().items() if k in HEAD}
            found = {"command": f"python {shown}", **where, **json.loads(new.read_text())}
            kept.write(RESULTS / f"{name}.json", found)
            new.unlink()


def environment() -> dict[str, str]:
    """This process's, with the checkout on Python's path."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def result(name: str) -> dict[str, Any] | None:
    """A kept result, or None."""
    path = RESULTS / f"{name}.json"
    return kept.read(path) if path.is_file() else None


def readme_text() -> str:
    """README.md with its tables of peers made anew: of processors, and of models behind that."""
    results = true_shapes.results(2)
    head = ["over the fastest: median, from the least to the greatest", "models", *CASES]
    rows = [readme_row(r) for r in results]
    made = (
        f"\n{table(head, rows)}\n<details><summary>Each model, in tokens a "
        f"second</summary>\n{''.join(map(readme_part, results))}\n</details>\n"
    )
    return MARKED.sub(lambda m: m[1] + made + m[2], README.read_text())


def readme_row(result: Path) -> list[str]:
    """How often the fastest peer's speed is ours, over all models on one processor."""
    tables = true_shapes.read(result)["tables"]
    cells = []
    for case in CASES:
        rows = (r for rows in tables.values() for r in rows if r["case"] == case)
        ratios = sorted(r["ratio"] for r in rows if r["ratio"] is not None)
        if not ratios:  # of a processor on which nobody has measured it yet
            cells.append("-")
            continue
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        cells.append(f"**{statistics.median(ratios):.2f}x** ({span})")
    return [true_shapes.units_of(result), str(len(tables)), *cells]


def readme_part(result: Path) -> str:
    """Tokens a second of each model on one processor, and how often the fastest peer's that is."""
    found = true_shapes.read(result)
    rows = [
        [file.removesuffix(".gguf"), *(_told(rows, case) for case in CASES)]
        for file, rows in found["tables"].items()
    ]
    every = [r for rows in found["tables"].values() for r in rows if r["case"] in CASES]
    days = {r["date"][:10] for r in every}  # each with a commit, which the page names
    span = " to ".join(sorted({min(days), max(days)}))
    where = f"{found['processor']}, {found['instructions']}, {span}"
    decoded = (r for r in every if r["case"].startswith("decode") and r.get("ceiling"))
    memory = sorted(round(r["ceiling"] / 1e9) for r in decoded)
    told = f" Memory gave them {memory[0]} to {memory[-1]} GB/s as they decoded." if memory else ""
    return (
        f"\n{table((f'{true_shapes.units_of(result)}: tokens/s, over the fastest', *CASES), rows)}"
        f"\nTwo threads of {where}; peers: {', '.join(found['peers'])}.{told}\n"
    )


def _told(rows: Sequence[Mapping[str, Any]], case: str) -> str:
    """A row's cell; "-" where it was not measured."""
    r = next((r for r in rows if r["case"] == case), None)
    if r is None or r["ratio"] is None:
        return "-"
    digits = 0 if r["ours"] >= 100 else 1
    return f"{r['ours']:.{digits}f}, **{r['ratio']:.2f}x**"


def startup_part() -> str:
    """Start time and memory."""
    found = result("startup")
    if found is None:
        return ""
    rows = [
        [
            name, f"{r['seconds']:.2f} s", f"{r['cpu']:.2f} s", f"{r['resident'] / 1e6:.0f} MB",
            f"{r['resident'] / found['file_bytes']:.2f}x",
            f"{r['anonymous'] / found['file_bytes']:.2f}x",
            f"{r['peak'] / found['file_bytes']:.2f}x",
        ]
        for name, r in found.items() if isinstance(r, dict)
    ]  # fmt: skip
    head = [
        "", "first token", "processor time", "resident", "of the file", "without mapped files",
        "peak, of the file",
    ]  # fmt: skip
    return (
        f"## Start and memory\n\n`{found['command']}`; {kept.measured_on(found)}. Memory at the "
        "end of a short answer. Bars: 3 s, and less than twice the file at the peak.\n\n"
        f"{table(head, rows)}\n"
    )


def perplexity_part() -> str:
    """Accuracy of 8-bit activations."""
    found = result("perplexity")
    if found is None:
        return ""
    rows = [[n, f"{p:.4f}"] for n, p in found["perplexity"].items()]
    ratios = ", ".join(f"{r - 1:+.2%} against {n}" for n, r in found["ratios"].items())
    return (
        f"## Accuracy\n\n`{found['command']}`: {found['windows']} windows, "
        f"{found['scored_tokens']} scored tokens of Spec-Bench's articles, {found['model']}; "
        f"{kept.measured_on(found)}.\n\n"
        f"{table(['', 'perplexity'], rows)}\n8-bit activations: {ratios}.\n\n"
    )


def spec_part(name: str) -> str:
    """Drafts against plain decoding."""
    found = result(name)
    if found is None:
        return ""
    text = (
        f"## Drafts: {found['prompts']}, head {found['head'] or 'none'}\n\n`{found['command']}`; "
        f"{kept.measured_on(found)}.\n\n"
    )
    head = [
        "", "prompts", "plain", "drafts", "mean", "least", "under 0.97x",
        "plain against itself: least, under", "accepted", "text",
    ]  # fmt: skip
    for setting, groups in found["tables"].items():
        rows = [
            [
                group, str(r["prompts"]), f"{r['plain_tokens_per_second']:.1f}",
                f"{r['tokens_per_second']:.1f}", f"**{r['mean_speedup']:.2f}x**",
                f"{r['least_speedup']:.2f}x", str(r["below_floor"]),
                f"{r['plain_against_itself_least']:.2f}x, {r['plain_against_itself_below_floor']}",
                f"{r['acceptance_length']:.2f}", "identical" if r["identical"] else "DIFFERENT",
            ]
            for group, r in groups.items()
        ]  # fmt: skip
        text += f"{setting}\n\n{table(head, rows)}\n"
    if (theirs := found.get("llama_cpp")) is not None:
        text += (
            f"llama.cpp with the same head, chain of 4: {theirs['tokens_per_second']:.1f} "
            f"tokens/s, {theirs['acceptance_rate']:.1%} of the drafted tokens kept.\n\n"
        )
    return text


def growth_part() -> str:
    """Growth and the roofline; `plots` draws the two pictures that it shows."""
    found = result("growth")
    if found is None:
        return ""
    faults = "; ".join(found["faults"]) or "nothing grows faster than its theory"
    text = (
        f"## Growth\n\n`{found['command']}`; {kept.measured_on(found)}: {faults}.\n\n"
        "![decoding by context](performance/speed_by_context.svg)\n\n"
        "![rows per second by rows](performance/speed_by_rows.svg)\n\n"
        "## Roofline\n\nWhat each op takes, and what its bytes at the read ceiling and its "
        "operations at the float32 ceiling would take; the larger of the two is the floor, except "
        "that products of 8-bit integers may go below the second. Attention declares its whole "
        "cache bucket.\n\n"
    )
    return text + "".join(roofline_table(t) for t in found["roofline"])


def plots() -> None:
    """The two pictures of growth."""
    found = result("growth")
    if found is not None:
        context, rows = ({int(n): s for n, s in found[k].items()} for k in ("context", "rows"))
        write_plots(PAGE.parent / "performance", context, rows)


def roofline_table(t: dict[str, Any]) -> str:
    """One step, op by op."""
    top = t["ceilings"]
    body = [
        [op, f"{r['calls']:.0f}", f"{r['ms']:.3f}", f"{r['read_ms']:.3f}", f"{r['fma_ms']:.3f}"]
        for op, r in sorted(t["ops"].items(), key=lambda item: -item[1]["ms"])
        if r["ms"] >= 0.005
    ]
    total = {k: sum(r[k] for r in t["ops"].values()) for k in ("ms", "read_ms", "fma_ms")}
    body.append(["all ops", "", *(f"{total[k]:.3f}" for k in ("ms", "read_ms", "fma_ms"))])
    plural = "" if t["rows"] == 1 else "s"
    return (
        f"{t['rows']} row{plural} behind {t['context']} tokens: {t['step_ms']:.2f} ms a step, of "
        f"which {t['step_ms'] - total['ms']:.2f} ms outside the ops (the host's part; below 0 "
        "where running ops one by one costs more than it); ceilings: read "
        f"{top['read'] / 1e9:.1f} GB/s, copy {top['copy'] / 1e9:.1f} GB/s, multiply-adds "
        f"{top['fma'] / 1e9:.0f} GFLOP/s\n\n"
        + table(["op", "calls", "ms", "bytes at read ceiling, ms", "operations, ms"], body)
        + "\n"
    )


INTRODUCTION = """# Performance on the CPU

Made by `python scripts/performance.py page` from the results that `python scripts/true_shapes.py
measure` and `python scripts/performance.py measure` keep in `bench/results/performance`. The honest
peer on x86 is ik_llama.cpp, and the honest file type Q4_K_M: llama.cpp has no fast path for some
others, Q4_1 among them. Every ratio is of one run: the two sides take turns,
medians count, and `share` says which part of its cores a side really got (1: all of it; below 0.9 a
row is not fair, because other programs were running). `ggraph generate --profile` shows the time of
every op on any machine, and this measures a file of yours beside the peers:

    ggraph bench install ik_llama.cpp
    ggraph bench cpu -m FILE --threads 2 --peer llama.cpp,ik_llama.cpp --rounds 5 --tokens 32
    ggraph bench cpu --types q4_0,q6_k --only "decode at" --json cpu.json

Models of true shape, and other types: files of random weights are made by
`scripts/random_model.py`; SmolLM2 is the real one. Their columns:

- a side's name: tokens/s, in rows of five rows/s, beside the peers' decoding;
- by processor time: the same ratio for each second of processor that a side used, which other
  programs disturb less;
- ceiling of decoding: bytes that the threads can read a second, measured between the turns;
  neighbours on the host take their part of it, by the minute, and rounds in which it changes are
  not counted. Of it: bytes that a token reads, of weights and from 1,024 tokens on of the cache;
- ceiling of prompts: products of 4-bit codes with bytes, and their sums, that the threads make a
  second with the best instruction for it, with nothing unpacked, scaled or written; measured in the
  same rounds, since 2026-11-27. Of it: multiply-adds of all matrices for a token;
- at the ceiling: what over the fastest would be if all of it were used. No program with these
  bytes, or these products, has more.

"""


def machine_part() -> str:
    """Python and packages of the first result there is; every part names its own machine."""
    for name in ("growth", "spec"):
        found = result(name)
        if found is not None:
            return (
                f"{found['usable_cores']} cores, Python {found['python']}, numpy {found['numpy']}, "
                f"llvmlite {found['llvmlite']}; each part names its processor, commit and day.\n\n"
            )
    return "Nothing was measured yet.\n\n"


def page_text() -> str:
    """The page that the kept results give."""
    parts = [
        INTRODUCTION, machine_part(), true_shapes.glance(SHAPES),
        *map(true_shapes.part, SHAPES), startup_part(),
        perplexity_part(), *(spec_part(n) for n in ("spec", "eagle-spec", "eagle-mt")),
        growth_part(),
    ]  # fmt: skip
    return "".join(parts).rstrip("\n") + "\n"


def page() -> None:
    """Write the page and its pictures."""
    plots()
    PAGE.write_text(page_text())
    README.write_text(readme_text())
    print(f"wrote {PAGE.relative_to(ROOT)} and the table of README.md")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "page"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--first", action="store_true")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.quick, [n for n in given.only.split(",") if n], given.head, given.first)
    page()


if __name__ == "__main__":
    main()
