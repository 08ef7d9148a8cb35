"""What a benchmark ran on, and whether the machine was quiet meanwhile."""

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import ggraph
from ggraph import __version__
from ggraph.backends.cpu.codegen.isa import host
from ggraph.env import vector_limit

CHECKOUT = Path(ggraph.__file__).parent.parent


def machine() -> dict[str, Any]:
    """Processor, instructions, commit, cores, system and versions, for the head of a result."""
    return {
        "processor": _processor(),
        "instructions": _instructions(),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "llvmlite": metadata.version("llvmlite"),
        "ggraph": __version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": load_average(),
    }


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, ours included; None where unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def peer_version() -> str | None:
    """The installed `xllamacpp`, or None."""
    try:
        return metadata.version("xllamacpp")
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name that the system gives, with family and model: a name alone may hide both."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    told = {k.strip(): v.strip() for k, _, v in (x.partition(":") for x in first.splitlines())}
    if "model name" not in told:
        return platform.machine()
    return f"{told['model name']} (family {told.get('cpu family')}, model {told.get('model')})"


def _instructions() -> str:
    """Which vectors and dot products the CPU backend compiles for here."""
    isa = host()
    tiles = ", tiles of AMX" * isa.tiles
    withheld = f", GGRAPH_VECTORS={vector_limit()}" * bool(vector_limit())
    return f"{isa.cpu}, dot products by {isa.dot}, {32 * isa.lanes} bits{tiles}{withheld}"


def _commit() -> str | None:
    """The checkout's commit, "+" behind it where files differ; None outside of a checkout."""
    if not (CHECKOUT / ".git").exists():  # a user's repository around an installed package
        return None
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(git, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


class Others:
    """Cores that other processes used since it was made, by the system's accounts.

    `mine` is what the measured processes used themselves. None where there is no /proc.
    """

    def __init__(self) -> None:
        self._busy, self._wall = _busy_seconds(), time.perf_counter()

    def cores(self, mine: float) -> float | None:
        """Average number of cores that were busy for someone else."""
        now, wall = _busy_seconds(), time.perf_counter() - self._wall
        if now is None or self._busy is None or wall <= 0:
            return None
        return max(0.0, (now - self._busy - mine) / wall)


def _busy_seconds() -> float | None:
    """Seconds of all cores that were not idle (stolen ones included), since the start."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(v) for v in first.split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
