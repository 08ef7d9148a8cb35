"""Everything that needs a GPU: tests, correctness, races, identity, speed.

    python scripts/gpu_check.py --out FOLDER [--only products,races] [--seconds 570] [--quick]
                                [--races 1000] [--device cuda0] [--model FILE ..]
    python scripts/gpu_check.py --merge FOLDER .. --to bench/results

Each section is a process of its own with a time limit, and leaves FOLDER/SECTION.json when it ends,
however it ends, beside the log of what it printed. Those that ask only whether results are right
run side by side; what is timed, and races, have the GPU alone. Sections for which `--seconds` have
no room are named, for the next command. `--merge` makes one record of such folders, later ones
first, with a table of the bars of docs/cuda.md. Needs CuPy (with NVRTC and cuBLAS), pytest, what
ggraph itself needs (the CPU's compiler for a split alone) and this repository; nothing is installed
or fetched. `--model` takes a checkpoint, or the pieces of one file in order. `--device stand-in`
runs on the tests' stand-in for a GPU, as rehearsals do. Ends with status 1 if a section failed.
Speeds are of random models with real shapes (gpu_models.py).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]  # need not be installed

import gpu_about
import gpu_correct
import gpu_products
import gpu_speed
import gpu_tests
import kept
from gpu_correct import Found

from ggraph.backends.cuda import Driver, open_driver
from ggraph.env import usable_cores
from ggraph.errors import GgraphError

STAND_IN, PATIENCE = "stand-in", 10  # which computes on the CPU: its limits are so much longer
SIDE_BY_SIDE = max(1, usable_cores() // 2)  # sections, each busy on the host


@dataclass(frozen=True)
class Section:
    """What is run, in the order of its worth; `limit` in seconds."""

    limit: int
    work: Callable[[Driver, bool], Found] | None = None
    files: tuple[str, ...] = ()  # of tests
    quick: str = ""  # which of them at quick sizes
    alone: bool = False  # what other sections do to the GPU or the cache would change it


def _shape(name: str, kind: str) -> Callable[[Driver, bool], Found]:
    return lambda d, quick: gpu_speed.measure_shape(d, "tiny" if quick else name, kind, quick)


SECTIONS: dict[str, Section] = {
    "compile": Section(240, gpu_correct.check_compile, alone=True),
    "driver": Section(
        120,
        files=("tests/test_cuda_gpu.py", "tests/test_cuda_blas.py"),
        quick="bytes or memory",
        alone=True,
    ),
    "products": Section(
        300, files=("tests/test_cuda_matmul.py",), quick="decoded and (q4_k or bf16)"
    ),
    "ops": Section(300, files=("tests/test_cuda_ops.py",), quick="oracles and (rope or add)"),
    "golden": Section(200, files=("tests/test_cuda_golden.py",), quick="golden and qwen2"),
    "ceilings": Section(60, gpu_speed.measure_ceilings, alone=True),
    "llama-bf16": Section(240, _shape("Llama-3.1-8B", "bf16"), alone=True),
    "llama-q4_k": Section(240, _shape("Llama-3.1-8B", "q4_k"), alone=True),
    "few": Section(120, gpu_products.measure_few, alone=True),
    "algorithms": Section(120, gpu_speed.measure_algorithms, alone=True),
    "races": Section(400, alone=True),
    "identity": Section(200, gpu_correct.check_identity),
    "invariance": Section(120, gpu_correct.check_invariance),
    "torch": Section(120, gpu_speed.measure_torch, alone=True),
    "qwen3-bf16": Section(240, _shape("Qwen3-8B", "bf16"), alone=True),
    "qwen3-q4_k": Section(240, _shape("Qwen3-8B", "q4_k"), alone=True),
    "draw": Section(60, gpu_correct.check_draw),
    "split": Section(60, gpu_correct.check_split),
    "model": Section(120),
}
# What is measured, its section and key, bar and aim. A bar below its aim is a least value.
PROOF: tuple[tuple[str, str, str, float, float], ...] = (
    ("logits as stored, relative error", "model", "error", 2e-2, 0.0),
    ("logits in float32, relative error", "model", "error_f32", 1e-3, 0.0),
    *(
        row
        for past in gpu_speed.PASTS
        for row in (
            (f"decode bf16 at {past}, share of floor", "llama-bf16", f"share_of_floor_{past}", 0.6,
             0.8),
            (f"decode q4_k at {past}, share of floor", "llama-q4_k", f"share_of_floor_{past}", 0.4,
             0.6),
            (f"8 rows over 1 at {past}, bf16", "llama-bf16", f"rows8_over_1_{past}", 1.25, 1.1),
            (f"8 rows over 1 at {past}, q4_k", "llama-q4_k", f"rows8_over_1_{past}", 1.25, 1.1),
            (f"60 rows over 1 at {past}, bf16", "llama-bf16", f"rows60_over_1_{past}", 2.0, 1.4),
        )
    ),
    ("prompt 512 bf16, share of matmul", "llama-bf16", "prompt_share_of_matmul", 0.5, 0.65),
    ("EAGLE-3 round over decode, bf16", "llama-bf16", "eagle_round_over_decode", 1.5, 1.3),
    ("SmolLM2 decode over transformers", "torch", "times_faster", 2.0, 4.0),
    ("host us per replayed step", "llama-bf16", "decode_host_us", 60.0, 25.0),
    ("races: least share of bad runs", "races", "bad_share", 0.95, 1.0),
    ("races: fixed runs that corrupt", "races", "fixed_wrong", 0.0, 0.0),
)  # fmt: skip


def opened(device: str) -> Driver:
    """The driver of a GPU, or the tests' stand-in for one."""
    if device == STAND_IN:
        from cuda_host import HostDriver

        made: Driver = HostDriver(1 << 33)
        return made
    return open_driver(device)


def run_section(name: str, asked: argparse.Namespace) -> int:
    """In a process of its own: run one section, leave its part. A plan that CUDA refuses to capture
    fails it: what it measured would be something else."""
    warnings.filterwarnings("error", message=".*run without graphs")
    section, begun = SECTIONS[name], time.perf_counter()
    result: Found = {"ok": False}
    try:
        result["about"] = gpu_about.about(asked.device)
        if section.files:
            chosen, device = section.quick if asked.quick else "", asked.device
            journal = asked.out / f"{name}.tests.jsonl"
            result |= gpu_tests.run(
                journal, section.files, chosen, "" if device == STAND_IN else device
            )
        else:
            given = {
                "model": lambda d, quick: gpu_correct.check_model(d, asked.model),
                "races": lambda d, quick: gpu_correct.check_races(d, quick, asked.races),
            }
            work = section.work or given[name]
            driver = opened(asked.device)
            result |= {"device": driver.name, "arch": driver.arch, **work(driver, asked.quick)}
        result["clocks_after"] = gpu_about.clocks()
    except Exception as error:
        traceback.print_exc()
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    keep(asked.out, name, {**result, "quick": asked.quick}, begun)
    return 0 if result["ok"] else 1


def keep(out: Path, name: str, result: Mapping[str, Any], begun: float) -> None:
    """The section's part, whole or not at all."""
    part = out / f".{name}.part"
    seconds = round(time.perf_counter() - begun, 1)
    part.write_text(json.dumps({**result, "seconds": seconds}, indent=1) + "\n")
    part.replace(out / f"{name}.json")


def supervise(name: str, given: Sequence[str], out: Path, limit: float) -> Found:
    """One section in its process, at most `limit` seconds; what it left, or how it ended."""
    begun = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), *given, "--section", name]
    with (out / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            status: int | str = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"over its limit of {limit:.0f} s"
        except BaseException:  # the command itself is being ended
            os.killpg(child.pid, signal.SIGKILL)
            raise
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if not (out / f"{name}.json").is_file():
        journal = out / f"{name}.tests.jsonl"
        done = gpu_tests.summary(journal) if journal.is_file() else {}
        ended = status if isinstance(status, str) else f"ended with status {status}"
        keep(out, name, {**done, "ok": False, "error": ended}, begun)
    found: Found = json.loads((out / f"{name}.json").read_text())
    return found


def run_all(
    names: Sequence[str], given: Sequence[str], out: Path, seconds: float, patience: int = 1
) -> list[str]:
    """Sections in order while there is time, those that need not be alone side by side; prints a
    line each. Returns those that failed. What an earlier run has left of them is gone first, since
    it would be taken for theirs."""
    end = time.perf_counter() + seconds
    for name in names:
        for left_behind in (f"{name}.json", f"{name}.tests.jsonl"):
            (out / left_behind).unlink(missing_ok=True)
    failed: list[str] = []
    left: list[str] = []

    def section(name: str) -> None:
        room = end - time.perf_counter()
        limit = SECTIONS[name].limit * patience
        if room < min(limit, 10):
            left.append(name)
            return
        found = supervise(name, given, out, min(limit, room))
        failed.extend([] if found["ok"] else [name])
        print(f"{name:<12} {'ok' if found['ok'] else 'FAILED'}  {_short(found)}", flush=True)

    for alone, group in groupby(names, lambda name: SECTIONS[name].alone):
        with ThreadPoolExecutor(1 if alone else SIDE_BY_SIDE) as beside:
            list(beside.map(section, group))
    if left:
        print(f"no time for: {','.join(left)}")
    return failed + left


def _short(section: Found) -> str:
    """The section's numbers on one line."""
    hidden = ("ok", "reports", "about", "clocks_after", "quick")
    shown = {k: v for k, v in section.items() if k not in hidden and v not in ([], {})}
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()]
    return ", ".join(parts)[:600]


def merged(folders: Sequence[Path]) -> Found:
    """One record of the folders' parts; of two of one section, the later folder's."""
    found = {p.stem: json.loads(p.read_text()) for f in folders for p in sorted(f.glob("*.json"))}
    found = {n: found[n] for n in SECTIONS if n in found}
    about = [v["about"] for v in found.values() if v.get("about")]
    missing = [n for n in SECTIONS if n not in found]
    return {"about": about[-1] if about else {}, "sections": found, "missing": missing,
            "proof": proof(found)}  # fmt: skip


def proof(found: Mapping[str, Found]) -> list[Found]:
    """The table of bars and aims with what was measured; None where it was not."""
    rows = []
    for what, section, key, bar, aim in PROOF:
        part = found.get(section, {})
        value = None if part.get("quick") else part.get(key)
        reached = None
        if isinstance(value, int | float):
            least = aim > bar
            meets = [value >= b if least else value <= b for b in (bar, aim)]
            reached = "aim" if meets[1] else "bar" if meets[0] else "missed"
        rows.append({"what": what, "value": value, "bar": bar, "aim": aim, "reached": reached})
    return rows


def print_proof(rows: Sequence[Found]) -> None:
    """One line each."""
    for r in rows:
        value = "-" if r["reached"] is None else f"{r['value']:.4g}"
        reached = r["reached"] or "not measured"
        print(f"{r['what']:<36} {value:>10}  bar {r['bar']:<6g} aim {r['aim']:<6g} {reached}")


def write_record(folders: Sequence[Path], to: Path) -> int:
    """The folders as one file named after the GPU and the day."""
    record = merged(folders)
    about = record["about"]
    path = to / f"gpu-{about.get('slug', 'none')}-{about.get('date', 'undated')}.json"
    to.mkdir(parents=True, exist_ok=True)
    path.write_text(kept.text(kept.rounded(record), 2) + "\n")  # a line for each section
    print_proof(record["proof"])
    for name, part in record["sections"].items():
        print(f"{name:<12} {'ok' if part['ok'] else 'FAILED'}  {_short(part)}")
    print(f"not run: {', '.join(record['missing']) or 'nothing'}\n{path}")
    return 0 if all(p["ok"] for p in record["sections"].values()) else 1


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the folder that comes back")
    parser.add_argument("--device", default="cuda0", help="cuda0, or stand-in")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--only", default="", help="sections, by comma")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of them")
    parser.add_argument("--races", type=int, default=1000, help="runs of each plan")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="a checkpoint, or pieces")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="folders of parts")
    parser.add_argument("--to", type=Path, default=ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    asked.names = asked.only.split(",") if asked.only else [n for n in SECTIONS if n != "model"]
    if unknown := set(asked.names) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if not asked.merge and asked.out is None:
        parser.error("--out names the folder that comes back")
    return asked


def probe(device: str) -> int:
    """Whether there is a device, with one line where there is none."""
    try:
        opened(device).close()
    except GgraphError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    return 0


def main(given: Sequence[str]) -> int:
    """Run sections, or merge what they left. Status 1: one failed or had no time; 2: no GPU."""
    asked = parsed(given)
    if asked.merge:
        return write_record(asked.merge, asked.to)
    if asked.section:
        return run_section(asked.section, asked)
    if asked.probe:
        return probe(asked.device)
    # In a process of its own too: a context of this one would take memory from all sections.
    mine = str(Path(__file__).resolve())
    if subprocess.call([sys.executable, mine, "--probe", *given]):
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if asked.device == STAND_IN else 1
    return 1 if run_all(asked.names, given, asked.out, asked.seconds, patience) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
