"""Devices by name: `open_backend("cpu")`. Each kind is a folder here with an `open` function.

A folder is imported only when one of its devices is asked for, so planning, and a machine without
CUDA or numba, never pay for it.
"""

import dataclasses
import importlib
import inspect
import re
from typing import Any

from ggraph.backends.protocol import Backend
from ggraph.device import DeviceSpec
from ggraph.errors import BackendError, InputError, shown

KINDS = ("cpu", "cuda", "sim")


def open_backend(name: str, **options: Any) -> Backend:
    """The backend of device `name`: a kind and an optional number ("cpu", "cuda0", "sim1").

    Raises BackendError for an unknown kind or a device that is not there, InputError for an option
    that this kind does not have.
    """
    match = re.fullmatch(r"([a-z]+)(\d*)", name) if isinstance(name, str) else None
    if match is None or match[1] not in KINDS:
        raise BackendError(f"unknown device {shown(name)}; known kinds: {', '.join(KINDS)}")
    room = importlib.import_module(f"ggraph.backends.{match[1]}")
    if not hasattr(room, "open"):
        raise BackendError(f"device {name!r}: this version has no {match[1]} backend")
    known = inspect.signature(room.open).parameters
    has = [n for n, p in known.items() if p.kind is p.KEYWORD_ONLY]
    fields = [f.name for f in dataclasses.fields(DeviceSpec)[2:]] if "fields" in known else []
    for option in options:
        if option not in [*has, *fields]:
            names = ", ".join([*has, *fields])
            raise InputError(f"{match[1]} has no option {option!r}; it has: {names}")
    backend: Backend = room.open(name, **options)
    return backend
