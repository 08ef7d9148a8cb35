"""CUDA's shared libraries, found in installed wheels or a toolkit and loaded by ctypes.

Once CuPy is loaded, only libraries of its CUDA major are taken: what a newer compiler makes, an
older loader may refuse. Without CuPy the newest is taken.
"""

import ctypes
import ctypes.util
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ggraph.errors import BackendError

# What a library opens by name while it runs; wheels of CUDA 13.0 do not say where that lies.
OPENED_BY = {"nvrtc": ("nvrtc-builtins",)}
TOOLKITS = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


def shared(name: str, package: str) -> Any:
    """The library `name` ("nvrtc"). BackendError, naming the `package` that brings it."""
    return _loaded(name, package, cupy_major())


def cupy_major() -> int | None:
    """The major version of the CUDA that CuPy was built for; None before it is imported."""
    cuda = sys.modules.get("cupy.cuda")
    return int(cuda.runtime.runtimeGetVersion()) // 1000 if cuda is not None else None


@cache
def _loaded(name: str, package: str, major: int | None) -> Any:
    tried = []
    found = [p for p in _candidates(name) if major in (None, (_version(p) or (major,))[0])]
    for path in found:
        try:
            for other in OPENED_BY.get(name, ()):
                for beside in Path(path).parent.glob(f"lib{other}.so.*"):
                    ctypes.CDLL(str(beside))  # what is loaded already is found by its name
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    of = f" of CUDA {major}, as CuPy is," if major is not None else ""
    package += "-cu12" if major == 12 else ""  # those of newer majors have no suffix
    raise BackendError(
        f"CUDA's library {name}{of} was not found; `pip install {package}` brings it"
        + (f" (tried: {'; '.join(tried)})" if tried else "")
    )


def _candidates(name: str) -> Iterator[str]:
    """Libraries of installed wheels, newest first, then the system's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [p for r in roots for p in r.glob(f"*/lib/lib{name}.so.*")]
    found += [p for r in TOOLKITS for p in Path(r).glob(f"lib{name}.so.*")]
    yield from sorted(map(str, found), key=_version, reverse=True)
    named = ctypes.util.find_library(name)
    if named is not None:
        yield named


def _version(path: str) -> tuple[int, ...]:
    """(13, 4) of libnvrtc.so.13.4; () where the name says nothing."""
    number = re.search(r"\.so\.([\d.]+)$", path)
    return tuple(map(int, number[1].split("."))) if number else ()
