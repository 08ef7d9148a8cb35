"""Everything that needs a GPU, in one command: tests, correctness, races, identity, speed.

    python scripts/gpu_check.py [--device cuda0] [--quick] [--only tests,races] [--model FILE ..]

Needs NumPy, CuPy (with NVRTC and cuBLAS), pytest and this repository; nothing is installed and
nothing fetched. `--model` takes a checkpoint, or the pieces of one file in order. Writes
bench/results/gpu-NAME-DATE.json (`--out` for another place), after every section, and adds to one
that is there, so that sections may be run in several commands. Ends with status 1 if a check
failed, and prints which of the bars of docs/cuda.md were reached. Speeds are of random models
with real shapes (see gpu_models.py).
"""

import argparse
import datetime
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

import gpu_correct
import gpu_speed
from gpu_correct import Found

from ggraph.backends.cuda import Driver, open_driver
from ggraph.errors import GgraphError

CHECKS: dict[str, Callable[[Driver, bool], Found]] = {
    "compile": gpu_correct.check_compile,
    "tests": gpu_correct.check_tests,
    "ops": gpu_correct.check_ops,
    "invariance": gpu_correct.check_invariance,
    "logits": gpu_correct.check_logits,
    "draw": gpu_correct.check_draw,
    "split": gpu_correct.check_split,
    "identity": gpu_correct.check_identity,
    "races": gpu_correct.check_races,
    "ceilings": gpu_speed.measure_ceilings,
    "torch": gpu_speed.measure_torch,
}
SHAPES = ("Llama-3.1-8B", "Qwen3-8B")
KINDS = ("bf16", "q4_k")
# What is measured, its section and key, bar and aim. A bar below its aim is a least value.
PROOF: tuple[tuple[str, str, str, float, float], ...] = (
    ("logits as stored, relative error", "model", "error", 2e-2, 0.0),
    ("logits in float32, relative error", "model", "error_f32", 1e-3, 0.0),
    ("decode bf16, share of floor", "Llama-3.1-8B bf16", "decode_share_of_floor", 0.6, 0.85),
    ("decode q4_k, share of floor", "Llama-3.1-8B q4_k", "decode_share_of_floor", 0.4, 0.65),
    ("8 rows over 1, bf16", "Llama-3.1-8B bf16", "verify8_over_decode", 1.25, 1.1),
    ("8 rows over 1, q4_k", "Llama-3.1-8B q4_k", "verify8_over_decode", 1.25, 1.1),
    ("prompt 512 bf16, share of matmul", "Llama-3.1-8B bf16", "prompt_share_of_matmul", 0.5, 0.75),
    ("SmolLM2 decode over transformers", "torch", "times_faster", 5.0, 10.0),
    ("EAGLE-3 round over decode, bf16", "Llama-3.1-8B bf16", "eagle_round_over_decode", 1.5, 1.3),
    ("races: least share of bad runs", "races", "bad_share", 0.95, 1.0),
    ("races: fixed runs that corrupt", "races", "fixed_wrong", 0.0, 0.0),
    ("host us per replayed step", "Llama-3.1-8B bf16", "decode_host_us", 60.0, 30.0),
)


def run_all(
    driver: Driver,
    names: Sequence[str],
    quick: bool,
    model: Sequence[Path],
    found: Found,
    keep: Callable[[Found], None],
) -> list[str]:
    """Every section by name into `found`, kept after each; one that raises is a failed section,
    and the others go on. Returns the names of the sections that were run."""
    work = {n: lambda f=f: f(driver, quick) for n, f in CHECKS.items() if n in names}
    if model:
        work["model"] = lambda: gpu_correct.check_model(driver, model)
    if "speed" in names and "ceilings" not in found:
        work.setdefault("ceilings", lambda: gpu_speed.measure_ceilings(driver, quick))
    for name in ("tiny",) if quick else SHAPES:
        for kind in KINDS:
            if "speed" in names or f"{name} {kind}" in names:
                work[f"{name} {kind}"] = lambda n=name, k=kind: gpu_speed.measure_shape(
                    driver, n, k, quick, found["ceilings"]
                )
    for title, section in work.items():
        begun = time.perf_counter()
        try:
            result = section()
        except Exception as error:
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[title] = {**result, "seconds": round(time.perf_counter() - begun, 1)}
        keep(found)
        print(f"{title:<20} {'ok' if result['ok'] else 'FAILED'}  {_short(found[title])}")
        sys.stdout.flush()
    return list(work)


def _short(section: Found) -> str:
    """The section's numbers on one line."""
    shown = {k: v for k, v in section.items() if k not in ("ok", "reports", "tail") and v != []}
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()]
    return ", ".join(parts)[:600]


def proof(found: Mapping[str, Found]) -> list[Found]:
    """The table of bars and aims with what was measured; None where it was not."""
    rows = []
    for what, section, key, bar, aim in PROOF:
        value = found.get(section, {}).get(key)
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


def main(given: Sequence[str] | None = None) -> int:
    """Run the sections, print a line each, write the JSON. Status 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda0")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--only", default=",".join([*CHECKS, "speed"]), help="sections, by comma")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="a checkpoint, or pieces")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(given)
    names = asked.only.split(",")
    known = {*CHECKS, "speed", "model", *(f"{s} {k}" for s in SHAPES for k in KINDS)}
    if unknown := set(names) - known:
        parser.error(f"no section {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    try:
        driver = open_driver(asked.device)
    except GgraphError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    today = datetime.date.today().isoformat()
    plain = re.sub(r"\W+", "-", driver.name.lower()).strip("-")
    out = asked.out or ROOT / "bench" / "results" / f"gpu-{plain}-{today}.json"
    found: Found = json.loads(out.read_text())["sections"] if out.is_file() else {}

    def keep(sections: Found) -> None:
        record = {"device": driver.name, "arch": driver.arch, "date": today, "quick": asked.quick,
                  "sections": sections, "proof": proof(sections)}  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")

    ran = run_all(driver, names, asked.quick, asked.model, found, keep)
    print_proof(proof(found))
    print(out)
    return 0 if all(found[n]["ok"] for n in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
