"""Devices by name: `open_backend("cpu")`. Each kind is a folder here with an `open` function.

A folder is imported only when one of its devices is asked for, so planning, and a machine without
CUDA or numba, never pay for it.
"""

import importlib
import re
from typing import Any

from ggraph.backends.protocol import Backend
from ggraph.errors import BackendError

KINDS = ("cpu", "cuda", "sim")


def open_backend(name: str, **options: Any) -> Backend:
    """The backend of device `name`: a kind and an optional number ("cpu", "cuda0", "sim1").

    Raises BackendError for an unknown kind or a device that is not there.
    """
    match = re.fullmatch(r"([a-z]+)(\d*)", name)
    if match is None or match[1] not in KINDS:
        raise BackendError(f"unknown device {name!r}; known kinds: {', '.join(KINDS)}")
    room = importlib.import_module(f"ggraph.backends.{match[1]}")
    if not hasattr(room, "open"):
        raise BackendError(f"device {name!r}: this version has no {match[1]} backend")
    backend: Backend = room.open(name, **options)
    return backend
