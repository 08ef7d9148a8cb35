"""On what a section of `gpu_check.py` ran: the tree, the GPU, its driver, libraries and clocks."""

import datetime
import hashlib
import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ggraph.backends.cuda import blas, nvrtc
from ggraph.errors import BackendError

ROOT = Path(__file__).resolve().parent.parent
QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu",
         "power.draw", "power.limit", "persistence_mode", "mig.mode.current")  # fmt: skip


def about(device: str) -> dict[str, Any]:
    """All of it. A copy of the tree may lack its history; `sources` says which tree it was."""
    smi = clocks()
    name = smi.get("name") or device
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "slug": re.sub(r"\W+", "-", name.lower()).strip("-"),
        "commit": _line("git", "rev-parse", "HEAD"), "changed": _line("git", "status", "--short"),
        "sources": sources(), "python": sys.version.split()[0], "machine": platform.machine(),
        "numpy": _version("numpy"), "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x"),
        "nvrtc": _safely(nvrtc.version), "cublas": _safely(blas.version), "gpu": smi,
    }  # fmt: skip


def sources() -> str:
    """A hash of the package, its models and the scripts, for a tree without a history."""
    found = hashlib.sha256()
    for top in ("ggraph", "models", "scripts", "tests"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h"):
                found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def clocks() -> dict[str, str]:
    """What `nvidia-smi` says of the first GPU; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = f"--query-gpu={','.join(QUERY)}"
    line = _line("nvidia-smi", asked, "--format=csv,noheader,nounits").splitlines()[:1]
    return dict(zip(QUERY, (v.strip() for v in line[0].split(",")), strict=False)) if line else {}


def _line(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _safely(asked: Any) -> Any:
    try:
        return asked()
    except BackendError as error:
        return str(error)
