"""How long a newcomer waits: python scripts/first_plan.py [--json FILE]

In a folder of its own: a fresh virtual environment, `pip install` of this checkout, and a first
graph of one's own, planned, proved and run; each step's seconds, then the same program again, whose
kernels are kept. pip takes its wheels from wherever it is set up to.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from models.bench.machine import machine

PROGRAM = """
import numpy as np
from ggraph import Graph, Session, input, open_backend, ops, weight

x = input("x", (4, 64))
y = x + ops.mul_mat(weight("down", (64, 128)), ops.silu(ops.mul_mat(weight("up", (128, 64)), x)))
rng = np.random.default_rng(0)
held = {n: rng.standard_normal(s, np.float32) for n, s in (("up", (128, 64)), ("down", (64, 128)))}
session = Session({"cpu": open_backend("cpu")})
plan = session.prepare("step", Graph.of({"y": y}), held)
print(plan.certificate.pairs_checked > 0, session.run("step", {"x": np.ones((4, 64))})["y"].shape)
"""


def timed(command: list[str], folder: Path) -> float:
    """Seconds that a command took. CalledProcessError, with what it wrote, when it failed."""
    begun = time.perf_counter()
    away = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GGRAPH"))}
    given = away | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - begun


def steps(folder: Path) -> dict[str, float]:
    """Seconds of each step, in order."""
    python = str(folder / "env" / "bin" / "python")
    program = folder / "first.py"
    program.write_text(PROGRAM)
    return {
        "virtual environment": timed([sys.executable, "-m", "venv", "env"], folder),
        "pip install": timed([python, "-m", "pip", "install", "--quiet", str(ROOT)], folder),
        "a plan of one's own, proved and run": timed([python, str(program)], folder),
        "the same again": timed([python, str(program)], folder),
    }


def main() -> None:
    """Print each step's seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = steps(Path(folder))
    for step, seconds in found.items():
        print(f"{seconds:8.1f} s  {step}")
    if args.json:
        args.json.write_text(json.dumps({**machine(), "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
