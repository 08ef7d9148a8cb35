"""CUDA's shared libraries, found in installed wheels or a toolkit and loaded by ctypes."""

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ggraph.errors import BackendError

TOOLKITS = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


@cache
def shared(name: str, package: str) -> Any:
    """The library `name` ("nvrtc"). BackendError, naming the `package` that brings it."""
    tried = []
    for path in _candidates(name):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    raise BackendError(
        f"CUDA's library {name} was not found; `pip install {package}` brings it"
        + (f" (tried: {'; '.join(tried)})" if tried else "")
    )


def _candidates(name: str) -> Iterator[str]:
    """Libraries of installed wheels, newest first, then the system's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [p for r in roots for p in r.glob(f"*/lib/lib{name}.so.*")]
    found += [p for r in TOOLKITS for p in Path(r).glob(f"lib{name}.so.*")]
    yield from (str(p) for p in sorted(found, key=lambda p: p.name, reverse=True))
    named = ctypes.util.find_library(name)
    if named is not None:
        yield named
