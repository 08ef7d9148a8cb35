"""The calls of docs/cuda.md on a machine that is played: the calls are read from that page.

    python scripts/gpu_rehearse.py --to FOLDER [--model FILE] [--piece BYTES] [--calls 1,2]
                                   [--limit 600]

The machine takes a copy of the tracked tree and what travels with a call, at most 64 MiB; runs one
command with an empty folder $OUT; ends it at the limit; and gives $OUT back as FOLDER/NUMBER. What
commands leave in $HOME stays. The tests' stand-in takes the GPU's place, at quick sizes; without
--model the model's calls are left out; it is cut into pieces of --piece bytes, of which a small
model needs small ones to come in as many as the page has calls for. Ends by merging what came back.
Status 1 if a call failed, or one of those asked for was left out.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES, PIECE_BYTES = 64 << 20, 30 << 20  # of a tree, and of a piece of a model
CALL = re.compile(r"^\| (\d+) \| (\S+) \| (\S+) \| `([^`]+)` \|")


@dataclass(frozen=True)
class Call:
    """One row of the page's table: what of the tree stays here, what travels beside it ("" for
    nothing), the command."""

    number: int
    stays: str
    travels: str
    command: str


def calls() -> list[Call]:
    """The page's, in order."""
    page = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    found = [CALL.match(line) for line in page.splitlines()]
    return [Call(int(m[1]), m[2], m[3].strip("-"), m[4]) for m in found if m]


def files(call: Call) -> list[str]:
    """The tracked files that travel with a call."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = listed.stdout.splitlines()
    return [n for n in names if (ROOT / n).is_file() and not n.startswith(call.stays)]


def send(tree: Path, pieces: Path, call: Call) -> int:
    """A fresh copy of the files and of the piece that travel. Returns its bytes."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in files(call):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    if call.travels:
        shutil.copy2(pieces / Path(call.travels).name, tree / call.travels)
    return sum(p.stat().st_size for p in tree.rglob("*") if p.is_file())


def run(command: str, tree: Path, out: Path, home: Path, limit: float) -> int:
    """The command in the tree; its status, 124 where it was ended."""
    given = command.replace("gpu_check.py", "gpu_check.py --device stand-in --quick")
    kept = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "LANG", "TMPDIR")}
    # The page says `python`: here that is this one, whose packages are known
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {
        **kept,
        "PATH": found,
        "OUT": str(out),
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    child = subprocess.Popen(
        ["bash", "-c", given], cwd=tree, env=environment, start_new_session=True
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return 124


def cut(model: Path, pieces: Path, piece_bytes: int) -> None:
    """The model's file in pieces that travel, named as the page names them."""
    with model.open("rb") as whole:
        for i, part in enumerate(iter(lambda: whole.read(piece_bytes), b"")):
            (pieces / f"model.{i:02d}").write_bytes(part)


def rehearse(
    chosen: list[Call], to: Path, model: Path | None, limit: float, piece_bytes: int = PIECE_BYTES
) -> int:
    """Every call on one machine; what came back is under `to`."""
    failed = 0
    with tempfile.TemporaryDirectory() as machine:
        tree, out, home, pieces = (Path(machine) / n for n in ("tree", "out", "home", "pieces"))
        for folder in (home, pieces):
            folder.mkdir()
        if model is not None:
            cut(model, pieces, piece_bytes)
        for call in chosen:
            if "model." in call.command and model is None:
                continue
            if call.travels and not (pieces / Path(call.travels).name).is_file():
                print(f"call {call.number}: no {call.travels}: the model has fewer pieces")
                failed += 1
                continue
            size = send(tree, pieces, call)
            if size > MOST_BYTES:
                print(f"call {call.number}: {size} bytes do not travel", file=sys.stderr)
                return 1
            out.mkdir()
            status = run(call.command, tree, out, home, limit)
            shutil.move(out, to / str(call.number))
            print(f"call {call.number}: status {status}, {size} bytes sent", flush=True)
            failed += status != 0
    folders = [str(p) for p in sorted(to.iterdir(), key=lambda p: int(p.name)) if any(p.iterdir())]
    script = ROOT / "scripts" / "gpu_check.py"
    command = [sys.executable, str(script), "--merge", *folders, "--to", str(to / "record")]
    return 1 if subprocess.call(command) or failed else 0


def main() -> int:
    """Play the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--piece", type=int, default=PIECE_BYTES, help="bytes of a piece")
    parser.add_argument("--calls", default="", help="numbers, by comma")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a call")
    asked = parser.parse_args()
    wanted = {int(n) for n in asked.calls.split(",") if n}
    asked.to.mkdir(parents=True)
    chosen = [c for c in calls() if not wanted or c.number in wanted]
    return rehearse(chosen, asked.to, asked.model, asked.limit, asked.piece)


if __name__ == "__main__":
    sys.exit(main())
