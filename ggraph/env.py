"""The process: its environment, which nothing else reads. Imports nothing of ggraph.

Each switch stands in `SWITCHES`, from which the table in the documentation is checked.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ggraph.errors import InputError

SWITCHES: dict[str, str] = {
    "GGRAPH_CACHE": "folder for downloaded models and compiled kernels (default: ~/.cache/ggraph)",
    "GGRAPH_THREADS": "worker threads of the CPU backend, and of `quantize` (default: all cores)",
    "GGRAPH_VECTORS": "widest units that the CPU backend uses: `avx2`, or `avx512` without AMX "
    "(default: all that the processor has)",
}


def cache_dir() -> Path:
    """Folder for downloads and compiled kernels; not created here. InputError where there is no
    home to have it in."""
    given = os.environ.get("GGRAPH_CACHE")
    return Path(given) if given else _home() / ".cache" / "ggraph"


def _home() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user whom the system does not know
        home = Path()
    if not home.is_absolute() or not os.environ.get("HOME", "/"):  # an empty HOME means the root
        raise InputError("there is no home folder: GGRAPH_CACHE must name one for the cache")
    return home


MOST_THREADS = 256  # of a CPU backend, whoever asks


def thread_count() -> int:
    """Threads that compute, or quantise: GGRAPH_THREADS, else the cores this process may use."""
    return _integer("GGRAPH_THREADS", usable_cores(), low=1, high=MOST_THREADS)


def vector_limit() -> str:
    """Widest units that kernels may use, of x86: "avx2", "avx512", or "" for all there are."""
    text = os.environ.get("GGRAPH_VECTORS", "")
    if text not in ("", "avx2", "avx512"):
        raise InputError(f"GGRAPH_VECTORS: expected avx2 or avx512, got {text!r}")
    return text


def usable_cores() -> int:
    """Cores that this process may run on (containers and affinity masks respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process' environment and `extra`, for a program that it starts."""
    return {**os.environ, **extra}


def put(name: str, value: str) -> None:
    """Set a variable of this process, for a shared library that reads it when it is loaded."""
    os.environ[name] = value


def propose(name: str, value: str) -> None:
    """`put` where the user has not set the variable."""
    os.environ.setdefault(name, value)


def _integer(name: str, default: int, *, low: int, high: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InputError(f"{name}: expected an integer from {low} to {high}, got {text!r}")
    return int(text)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles, a fifth of the time of a large plan: none is left by what
    makes one, and each search walks through all tensors and commands again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
