"""The CUDA backend. `open("cuda0")` is all that the rest of ggraph needs of it.

CuPy is imported only when a device is opened; without it, or without a driver or a GPU, that raises
BackendError with the reason and what to do.
"""

import importlib
import re
from typing import Any

from ggraph import env
from ggraph.backends.cuda.backend import CudaBackend, CudaSpec, Events
from ggraph.backends.cuda.driver import Driver
from ggraph.backends.cuda.replay import Replayer
from ggraph.errors import BackendError, InputError

__all__ = [
    "CudaBackend",
    "CudaSpec",
    "Driver",
    "Events",
    "Replayer",
    "cuda_spec",
    "open",
    "open_driver",
]

LIBRARIES = 1 << 29  # bytes left to cuBLAS itself, code and constants; small GPUs leave less
FUSED = frozenset({"rms_norm_mul", "mul_mat_add", "mul_mat_gated", "mul_mats", "rope_set_rows"})


def open(name: str, *, graphs: bool = True) -> CudaBackend:
    """The GPU that `name` counts ("cuda" and "cuda0": the first). `graphs` captures whole plans."""
    driver = open_driver(name)
    return CudaBackend(cuda_spec(name, driver), driver, graphs)


def open_driver(name: str) -> Driver:
    """The driver of a GPU by name. BackendError, with the reason, where it cannot be used."""
    match = re.fullmatch(r"cuda(\d*)", name)
    if match is None:
        raise InputError(f"{name!r} is no CUDA device; expected cuda, cuda0, cuda1 ..")
    # Streams beyond the queues (8, unless told before CUDA begins) wait for one another.
    env.propose("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        room = importlib.import_module("ggraph.backends.cuda.cupy_driver")
    except ImportError as error:
        raise BackendError(
            f"{name}: CuPy is not installed ({error}); `pip install 'ggraph-runtime[cuda]'`, or "
            "`[cuda12]` for drivers of CUDA 12"
        ) from None
    driver: Driver = room.open_driver(int(match[1] or 0))
    return driver


def cuda_spec(name: str, driver: Driver, **fields: Any) -> CudaSpec:
    """The spec of a device as planning sees it; `fields` replace."""
    free, _ = driver.memory()
    free -= min(free // 8, LIBRARIES)
    given: dict[str, Any] = {
        "memory_bytes": free,
        "max_buffer_bytes": free,
        "alignment": 256,
        "streams": 4,
        "copy_streams": 0,
        "fused": FUSED,
        "flops_per_s": 5e13,
        "bytes_per_s": 3e12,
        "link_bytes_per_s": 2.5e10,
        "peer_bytes_per_s": 1e11,
        "launch_s": 3e-6,
    }
    return CudaSpec(name, "cuda", **{**given, **fields})
