"""The account of a model of half a billion parameters against the memory that it takes.

    python scripts/account_half_billion.py [--folder DIR]

Writes a GGUF file of Qwen2.5-0.5B's shape (scripts/random_model.py), runs steps of 1 and of 64 rows
in a process each, and prints what resident memory has grown by and what the plan accounts for.
Needs 0.4 GB of disk and of memory; exits with 1 where the two differ by more than 3 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import random_model

ROOT = Path(__file__).resolve().parent.parent
SHAPE, TYPE, MOST = "qwen2.5-0.5b", "q4_0", 0.03


def measured(path: Path, rows: int) -> float:
    """How far growth and account are apart, as a share of the account; both are printed."""
    program = ROOT / "tests" / "memory_growth.py"
    done = subprocess.run(
        [sys.executable, str(program), str(path), str(rows)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    (account,) = found["accounts"]
    total = sum(value for name, value in account.items() if name != "device")
    apart = float(found["grown"] / total - 1)
    sys.stdout.write(f"{rows} rows: {account}\n")
    sys.stdout.write(f"  grown by {found['grown']}, accounted for {total}: {apart:+.2%}\n")
    return apart


def main() -> int:
    """Write, measure, compare."""
    parser = argparse.ArgumentParser(description="account of a model of 0.5B against memory")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: removed again)")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        path = Path(folder) / "random-0.5b.gguf"
        random_model.write(SHAPE, TYPE, path)
        sys.stdout.write(f"{path.stat().st_size} bytes written\n")
        return int(any(abs(measured(path, rows)) > MOST for rows in (1, 64)))


if __name__ == "__main__":
    sys.exit(main())
