"""ggraph beside llama.cpp on one GPU: a file of a model's true shape with random weights.

    python scripts/gpu_peer.py --llama-bench PATH [--tokenizer FILE] [--shape llama-3.1-8b]
                               [--type q4_k_m] [--folder /dev/shm] [--to FILE.json]

Prints tokens a second of decoding behind 64 and 2,048 tokens and of a prompt of 512, of both, and
the ratio; flash attention on, all layers on the GPU. `--tokenizer` is a GGUF file to take tokens
from where the default model is not at hand; it may be without tensors. Shapes are those of
random_model.py, or a config.json. The file is made where it is missing, and stays.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]  # need not be installed

import gpu_about
import gpu_speed
import kept
import random_model
from gpu_check import STAND_IN, opened

from ggraph.decode.runner import Runner
from models.registry import open_model

CASES = (("decode at 64", 1, 64), ("decode at 2048", 1, 2048), ("prompt of 512", 512, 0))
WRITTEN = 64  # tokens that llama-bench decodes behind a depth
TURNS = 5


def ours(path: Path, device: str) -> dict[str, float]:
    """Tokens a second of each case."""
    driver = gpu_speed.Watched(opened(device))
    session = gpu_speed.random_session(driver)
    runner = Runner(open_model(path), session, 2304)
    runner.picks = 1  # as greedy text is decoded
    found = {}
    for name, rows, past in CASES:
        timing = gpu_speed.step_seconds(runner, rows, past, device == STAND_IN, driver)
        found[name] = rows / timing.median
    session.close()
    return found


def theirs(bench: Path, path: Path) -> tuple[dict[str, float], str]:
    """The same of llama-bench, and which build it is."""
    found, build = {}, ""
    for name, rows, past in CASES:
        asked = ["-p", str(rows), "-n", "0"] if rows > 1 else ["-p", "0", "-n", str(WRITTEN)]
        command = [str(bench), "-m", str(path), "-ngl", "99", "-fa", "1", "-d", str(past),
                   "-r", str(TURNS), "-o", "json", *asked]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row: dict[str, Any] = json.loads(done.stdout)[0]
        found[name], build = row["avg_ts"], f"{row['build_commit']} ({row['build_number']})"
    return found, build


def main() -> int:
    """Both on one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--device", default="cuda0", help="cuda0, or stand-in")
    parser.add_argument("--to", type=Path, help="a file for what was found")
    asked = parser.parse_args()
    path = asked.folder / f"{Path(asked.shape).stem}.{asked.type}.gguf"
    if not path.is_file():
        random_model.write(asked.shape, asked.type, path, asked.tokenizer)
    begun = time.perf_counter()
    peer, build = theirs(asked.llama_bench, path)
    mine = ours(path, asked.device)
    rows = {n: {"ggraph": mine[n], "llama.cpp": peer[n], "ratio": mine[n] / peer[n]} for n in mine}
    for name, row in rows.items():
        print(f"{name:<16} " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
    if asked.to:
        about = gpu_about.about(asked.device)
        seconds = round(time.perf_counter() - begun, 1)
        found = {"about": about, "file": path.name, "llama.cpp": build, "rows": rows}
        kept.write(asked.to, {**found, "seconds": seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
