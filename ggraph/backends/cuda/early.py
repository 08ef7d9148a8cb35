"""Launches that may begin before those that they are enqueued behind have ended.

A launch has a beginning (blocks are spread over the multiprocessors, arguments and instructions
are fetched) that needs nothing of those before it. CUDA calls it programmatic dependent launch;
each kernel waits where it begins, so that the order of a stream stays what it was. CuPy has no
function for it, so the CUDA driver's own is called.
"""

import ctypes
from functools import cache
from typing import Any

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a value of up to 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _library() -> Any:
    found = ctypes.CDLL("libcuda.so.1")
    found.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    return found


def launch(
    function: int, grid: tuple[int, int, int], block: int, shared: int, stream: int, pointers: Any
) -> None:
    """Enqueue a kernel, which may begin early, with `pointers` to its arguments. RuntimeError with
    CUDA's number, as CuPy's functions have it."""
    allowed = _Attribute(SERIALIZATION, b"", 1)
    one = (block, 1, 1)
    config = _Config(grid, one, shared, stream, ctypes.pointer(allowed), 1)
    status = _library().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx gave {status}")
