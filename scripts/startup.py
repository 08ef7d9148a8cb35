"""From process start to the first token, and resident memory against the file's size.

    python scripts/startup.py [MODEL] [--rounds 5] [--threads 2] [--peer none] [--json OUT]
    python scripts/startup.py qwen3-4b.gguf --peer llama.cpp,ik_llama.cpp --cold
    python scripts/startup.py --first --peer none

Kernels are in the cache (one run before is not counted), and the file is in memory, or on disk
alone with `--cold`. With `--first` the same is also done with no kernel kept. Medians;
`cpu` is processor time up to the first token, which other processes disturb less than the clock.
Resident memory is read at the last piece of a short answer: all of it, the part that is not backed
by a file, and the peak since the start, which is what the bar is held against. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from models.bench.peer import Peer
from models.run.fetch import fetch_default
from models.run.load import load

PROMPT = "Write one sentence about the sea."
NEW = 48  # tokens of the answer
BAR_SECONDS, BAR_MEMORY, BAR_FIRST = 3.0, 2.0, 2.0
FIRST = "first run"


KINDS = {"resident": "VmRSS:", "anonymous": "RssAnon:", "file": "RssFile:", "peak": "VmHWM:"}


def resident(pid: int) -> dict[str, int]:
    """Bytes of a process: all, without and with a file behind them, and the most it ever had.
    Empty for one that has ended."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return {}
    found = {r[0]: int(r[1]) * 1024 for r in rows if r[0] in KINDS.values()}
    return {k: found[v] for k, v in KINDS.items()} if len(found) == len(KINDS) else {}


def processor_seconds(pid: int) -> float:
    """User and system time of a living process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(folder: str) -> dict[str, str]:
    """A user's: Python keeps its bytecode, here in a folder of our own."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": folder}


def run_first(path: Path, threads: int, folder: str) -> dict[str, float]:
    """The same where nothing is kept from any run before."""
    with tempfile.TemporaryDirectory() as empty:
        return run_ours(path, threads, folder, {"GGRAPH_CACHE": empty})


def run_ours(
    path: Path, threads: int, folder: str, other: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """One start of `ggraph generate`: time to the first piece of text, memory at the last one."""
    command = [
        sys.executable, "-m", "models", "generate", "-m", str(path), "--temp", "0", "-n", str(NEW),
        "-t", str(threads), PROMPT,
    ]  # fmt: skip
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment(folder), **other},
    ) as running:
        assert running.stdout is not None
        os.read(running.stdout.fileno(), 1)
        wall, cpu = time.perf_counter() - begun, processor_seconds(running.pid)
        memory = resident(running.pid)
        while os.read(running.stdout.fileno(), 1 << 16):
            memory = resident(running.pid) or memory  # the last one while it still answers
    return {"seconds": wall, "cpu": cpu, **memory}


def run_theirs(path: Path, threads: int, ids: list[int], name: str) -> dict[str, float]:
    """The same of a peer in a Python process."""
    begun = time.perf_counter()
    with closing(Peer(path, threads, name=name)) as peer:
        peer.ask(ids, 1)
        wall, cpu = time.perf_counter() - begun, processor_seconds(peer.pid)
        peer.ask(ids, NEW)
        return {"seconds": wall, "cpu": cpu, **resident(peer.pid)}


def forget(path: Path) -> None:
    """Take the file out of the system's cache, so that the next reader waits for the disk."""
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure; the first run warms the caches."""
    return {k: statistics.median(r[k] for r in runs[1:]) for k in runs[0]}


def show(name: str, found: dict[str, float], nbytes: int) -> None:
    """One line."""
    print(
        f"{name:12} first token {found['seconds']:.2f} s (cpu {found['cpu']:.2f} s) · resident "
        f"{found['resident'] / 1e6:.0f} MB = {found['resident'] / nbytes:.2f}x the file "
        f"(anonymous {found['anonymous'] / 1e6:.0f}, mapped {found['file'] / 1e6:.0f}), peak "
        f"{found['peak'] / 1e6:.0f} MB = {found['peak'] / nbytes:.2f}x",
        flush=True,
    )


def main() -> None:
    """Alternate, print, compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default="llama.cpp", help="names with commas between, or none")
    parser.add_argument("--first", action="store_true", help="also with no kernel kept")
    parser.add_argument("--cold", action="store_true", help="the file is on disk alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    path = (given.model or fetch_default()).resolve()
    with closing(load(path, threads=1)) as m:
        ids = m.prompt_ids(PROMPT)
    peers = [] if given.peer == "none" else given.peer.split(",")
    alone: dict[str, Callable[[Path, int, str], dict[str, float]]] = {"ggraph": run_ours}
    alone |= {FIRST: run_first} if given.first else {}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*alone, *peers)}
    folder = tempfile.mkdtemp()
    for _ in range(given.rounds + 1):
        for name, found in runs.items():
            if given.cold:
                forget(path)
            found.append(
                alone[name](path, given.threads, folder)
                if name in alone
                else run_theirs(path, given.threads, ids, name)
            )
    nbytes = path.stat().st_size
    result: dict[str, Any] = {"file_bytes": nbytes, "threads": given.threads}
    for name, found in runs.items():
        result[name] = medians(found)
        show(name, result[name], nbytes)
    if given.first:
        beyond = result[FIRST]["seconds"] - result["ggraph"]["seconds"]
        print(f"no kernel kept: {beyond:.2f} s beyond the warm run; bar: {BAR_FIRST:g} s")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    mine = result["ggraph"]
    met = mine["seconds"] < BAR_SECONDS and mine["peak"] < BAR_MEMORY * nbytes
    print(f"bars: under {BAR_SECONDS:g} s and under {BAR_MEMORY:g}x: {'met' if met else 'not met'}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
