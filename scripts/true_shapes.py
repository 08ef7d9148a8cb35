"""Speed beside other engines on models of true shape, piece by piece: it goes on where it ended.

    python scripts/true_shapes.py files --only q4_k_m
    python scripts/true_shapes.py measure --threads 2 --seconds 480
    python scripts/true_shapes.py measure --threads 2 --only llama-3.2-1b.q4_k_m --again
    python scripts/performance.py page

A piece is a row of one file: all sides read that file and take turns. Each is kept in
bench/results/performance/shapesN-PROCESSOR-VECTORS.json (N threads; other types in
typesN-PROCESSOR-VECTORS.json; single runs packed beside it) as soon as it is there, and is not
measured again unless asked to; `--seconds` starts no further one after so long. The headline's
files come first. Files of random weights (scripts/random_model.py) are made where they are
missing, in the cache's folder bench/shapes; SmolLM2 is the real one.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "scripts")]

import kept
import random_model
from pages import table

from ggraph import cache_dir
from ggraph.backends.cpu.codegen.isa import host
from models.bench.cpu import CASES, Case, file_of, fitting, measure
from models.bench.install import ORIGINS, built
from models.bench.machine import machine
from models.bench.rounds import row
from models.cli.common import model_path
from models.run.convert import FILE_TYPES

NAMED = {"verify": (3.0, 4.0), "prompt": (1.5, 2.0)}  # kind of a row: bar, aim
NEAR, FAR, LEAST = (1.3, 1.6), (1.5, 2.0), 1.1  # decoding at 64, or of experts; behind; other types
HEADLINE = "q4_k_m"
RESULTS = ROOT / "bench" / "results" / "performance"
REAL = "smollm2-135m"
TYPES = (
    "q4_k_m", "q4_0", "q6_k", "q8_0", "iq4_nl", "iq4_xs", "mxfp4", "f16", "q2_k", "q3_k", "iq3_s",
    "iq2_xs", "iq1_s",
)  # fmt: skip
NAMES = (REAL, *(n for n in random_model.SHAPES if n != "llama-3.1-8b"))  # that is for GPUs
SHORT = [c for c in CASES if c.context + c.rows < 2048]  # whose text is soon in the cache
UNITS = {  # of a processor, by the end of a result's name, the least first
    "plain": "no dot products", "sdot": "Arm", "avx2": "AVX2", "avx512": "512-bit vectors",
    "amx": "AMX",
}  # fmt: skip
AFTER = (
    "over the fastest", "by processor time", "bar, aim", "ceiling, G/s", "of it",
    "at the ceiling", "least share of cores",
)  # fmt: skip
LONG = [c for c in CASES if c not in SHORT]


def file_for(name: str, type_name: str) -> Path:
    """The file of a shape and a type, made where it is missing."""
    if name == REAL:
        return file_of(type_name, model_path(None), print)
    out = cache_dir() / "bench" / "shapes" / f"{name}.{type_name}.gguf"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_suffix(".new")
        random_model.write(name, type_name, new)
        new.rename(out)
    return out


def vectors() -> str:
    """What results are told apart by: the widest units of this processor that products use."""
    isa = host()
    if isa.dot in ("avx2", "vnni"):
        return "amx" if isa.tiles else "avx512" if isa.lanes == 16 else "avx2"
    return isa.dot


def result_file(threads: int, type_name: str) -> Path:
    """Where this machine's rows with so many threads are kept: of the headline, or others."""
    return RESULTS / f"{_kind(type_name)}{threads}-{host().cpu}-{vectors()}.json"


def results(threads: int, type_name: str = HEADLINE) -> list[Path]:
    """The same of every processor that was measured, the least first."""
    kind = f"{_kind(type_name)}{threads}"
    return [p for units in UNITS for p in sorted(RESULTS.glob(f"{kind}-*-{units}.json"))]


def units_of(result: Path) -> str:
    """What a result's processor multiplies with, and which it is."""
    processor, _, units = result.stem.partition("-")[2].rpartition("-")
    return f"{UNITS[units]} of {processor}"


def _kind(type_name: str) -> str:
    return "shapes" if type_name == HEADLINE else "types"


def read(path: Path) -> dict[str, Any]:
    """What is kept there."""
    return kept.read(path) if path.is_file() else {"tables": {}, "peers": {}, "answers": {}}


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A row with five digits of all but rates, which its raw runs give again."""
    peers = {n: {**kept.rounded(p, 5), "rate": p["rate"]} for n, p in row["peers"].items()}
    return {**kept.rounded(row, 5), "ours": row["ours"], "peers": peers}


def keep(path: Path, threads: int, file: str, new: dict[str, Any], peers: dict[str, str]) -> None:
    """Put a row in its place; the head names the latest run, and the commits of all rows."""
    found = read(path)
    here = machine()
    new |= {"commit": here["commit"], "date": here["date"]}
    found["answers"].setdefault(file, {})[new["case"]] = new.pop("samples")
    rows = [r for r in found["tables"].get(file, []) if r["case"] != new["case"]] + [new]
    order = [c.name for c in CASES]
    found["tables"][file] = sorted(map(short, rows), key=lambda r: order.index(r["case"]))
    found["peers"] |= peers
    every = sorted({r["commit"] for rows in found["tables"].values() for r in rows})
    command = f"python scripts/true_shapes.py measure --threads {threads}"
    head = {**here, "commit": " and ".join(every), "threads": threads, "command": command}
    kept.write(path, {**head, **{k: found[k] for k in ("peers", "tables", "answers")}})


def pieces(only: str) -> Iterator[tuple[str, str, list[Case]]]:
    """Shapes, types and cases in the order of what matters most."""
    for type_name in TYPES:
        for cases in (SHORT, LONG):
            for name in NAMES:
                made = name != REAL or type_name in FILE_TYPES  # others are made of random numbers
                if made and only in f"{name}.{type_name}":
                    yield name, type_name, list(cases)


def bar_of(file: str, case: Case) -> tuple[float, float | None]:
    """The least ratio that a row must have, and what it aims at."""
    if HEADLINE not in file.lower():
        return LEAST, None
    near = case.context < 1000 or "moe" in file
    return NAMED.get(case.kind, NEAR if near else FAR)


def head_of(result: Path) -> list[str]:
    """The table's first line: the peers are those of any row."""
    return ["file", "row", "ggraph", *_peers(result), *AFTER]


def _peers(result: Path) -> list[str]:
    known = read(result)["peers"]
    return [name for name in ORIGINS if name in known]


def rows_of(result: Path, only: Sequence[str] | None = None) -> list[list[str]]:
    """Rows of the table; all, or those with the named cases."""
    cases, body = {c.name: c for c in CASES}, []
    peers = _peers(result)
    for file, rows in read(result)["tables"].items():
        for r in rows:
            if only is None or r["case"] in only:
                bar, aim = bar_of(file, cases[r["case"]])
                body.append([file.removesuffix(".gguf"), *_cells(r, peers, bar, aim)])
    return body


def _cells(r: dict[str, Any], peers: Sequence[str], bar: float, aim: float | None) -> list[str]:
    rates = [r["peers"][p]["rate"] if p in r["peers"] else None for p in peers]
    told = ["-" if rate is None else f"{rate:.1f}" for rate in (r["ours"], *rates)]
    least = min(r["our_share"], r["their_share"] or 1.0)
    found = [f"**{r['ratio']:.2f}x**", f"{r['busy_ratio']:.2f}x"] if r["ratio"] else ["-", "-"]
    what = "" if r["ratio"] is None or r["ratio"] >= bar else " (missed)"
    asked = f"{bar:g}x{what}" + (f", {aim:g}x" if aim else "")
    part, most = r["of_ceiling"], "-"
    if part and r["ratio"]:
        most = f"{r['ratio'] / part:.2f}x"
    ceiling = f"{r['ceiling'] / 1e9:.0f}" if r.get("ceiling") else "-"
    share = f"{part:.0%}" if part else "-"
    return [r["case"], *told, *found, asked, ceiling, share, most, f"{least:.2f}"]


def part(result: Path) -> str:
    """A chapter of docs/performance.md."""
    found = read(result)
    if not found["tables"]:
        return ""
    threads = found["threads"]
    plural = "s" * (threads > 1)
    title = "Other types" if result.stem.startswith(_kind("")) else "Models of true shape"
    who = ", ".join(f"{name}: {version}" for name, version in found["peers"].items())
    return (
        f"## {title}, {threads} thread{plural}, {units_of(result)}\n\n`{found['command']}`; {who}; "
        f"{kept.measured_on(found)}.\n\n"
        f"{table(head_of(result), rows_of(result))}\n"
    )


def glance(every: Sequence[Path]) -> str:
    """A chapter of all results: how many rows hold their bar and reach their aim, and each that
    does not hold it, with the peer that is fastest there and what part of the ceiling is used."""
    held, missed = [], []
    for result in every:
        found, cases = read(result), {c.name: c for c in CASES}
        rows = [
            (file, r, *bar_of(file, cases[r["case"]]))
            for file, rows in found["tables"].items()
            for r in rows
            if r["ratio"] is not None
        ]
        kind = "Q4_K_M" if result.stem.startswith(_kind(HEADLINE)) else "other types"
        threads = found["threads"]
        where = f"{units_of(result)}, {threads} thread{'s' * (threads > 1)}, {kind}"
        good = [r["ratio"] >= bar for _, r, bar, _ in rows]
        aims = [r["ratio"] >= aim for _, r, _, aim in rows if aim]
        held.append([where, *(f"{sum(x)} of {len(x)}" if x else "-" for x in (good, aims))])
        missed += [
            [where, f"{file.removesuffix('.gguf')}, {r['case']}", *_short_of(r, bar)]
            for file, r, bar, _ in rows
            if r["ratio"] < bar
        ]
    return (
        "## Bars at a glance\n\nOver the fastest peer of each row; the chapters below have every "
        f"row.\n\n{table(('measured on', 'hold the bar', 'reach the aim'), held)}\n"
        "Rows that miss their bar, and what the roofline leaves them: bytes of memory to decoding, "
        "products to prompts.\n\n"
        f"{table(('measured on', 'row', 'fastest peer', 'over it', 'bar', 'ceiling'), missed)}\n"
    )


def _short_of(r: dict[str, Any], bar: float) -> list[str]:
    """Of a row below its bar: the fastest peer, the ratio, the bar, and what the ceiling leaves."""
    fastest = max(r["peers"], key=lambda n: r["peers"][n]["rate"] or 0.0)
    part, left = r["of_ceiling"], "not measured"
    if part:
        left = f"{part:.0%} of it used, {r['ratio'] / part:.2f}x with all"
    return [fastest, f"{r['ratio']:.2f}x", f"{bar:g}x", left]


def main() -> None:
    """Make the files, or measure what is not measured yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("files", "measure"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only", default="", help="part of SHAPE.TYPE, such as moe-3gb.q4_k_m")
    parser.add_argument("--case", default="", help="part of a row's name, such as 'decode at'")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--peer", default="llama.cpp,ik_llama.cpp", help="those that are installed")
    parser.add_argument("--memory", type=float, default=0.0, help="least GB/s for decoding's rows")
    given = parser.parse_args()
    begun = time.monotonic()
    peers = [p for p in given.peer.split(",") if built(p) is not None]
    for name, type_name, cases in pieces(given.only):
        path = file_for(name, type_name)
        if given.what == "files":
            print(f"{path.stat().st_size / 1e9:.2f} GB {path}", flush=True)
            continue
        out = result_file(given.threads, type_name)
        done = [] if given.again else [r["case"] for r in read(out)["tables"].get(path.name, [])]
        asked = [c for c in cases if c.name not in done and given.case in c.name]
        asked = fitting(path, asked, given.tokens) if asked else []
        if not asked:
            continue
        if time.monotonic() - begun > given.seconds:
            break
        for case, measured, versions in measure(
            path, given.threads, given.rounds, given.tokens, peers, asked
        ):
            new = row(case.name, case.unit, measured)
            slow = case.kind == "decode" and (new["ceiling"] or 0) < given.memory * 1e9
            if not slow:
                keep(out, given.threads, path.name, new, versions)
            sides = {"ggraph": new["ours"], **{p: r["rate"] for p, r in new["peers"].items()}}
            told = {k: round(v, 1) for k, v in sides.items()}
            over = f"{new['ratio'] or 0:.2f}x, by processor time {new['busy_ratio'] or 0:.2f}x"
            shares = f"{new['our_share']:.2f} {new['their_share'] or 0:.2f}"
            left = f" (memory gave {new['ceiling'] or 0:.3g}: not kept)" if slow else ""
            print(f"{path.name} {case.name}: {json.dumps(told)} {over} {shares}{left}", flush=True)
            if time.monotonic() - begun > given.seconds:
                break


if __name__ == "__main__":
    main()
