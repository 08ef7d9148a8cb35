"""What a benchmark ran on, and whether the machine was quiet meanwhile."""

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import __version__

QUIET = 0.05  # cores that others may use in a sample that counts as undisturbed


def machine() -> dict[str, Any]:
    """Processor, cores, system and versions, for the head of a result."""
    return {
        "processor": _processor(),
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
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return named[0] if named else platform.machine()


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
