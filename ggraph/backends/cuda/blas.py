"""cuBLAS products through ctypes, one handle per stream.

CuPy's own wrapper takes the stream from its state and not from the handle, which a capture of
several streams cannot use. Each handle has a work space of its own, so that streams share nothing
and a captured product allocates nothing.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ggraph.backends.cuda.libraries import shared
from ggraph.errors import BackendError

DATA_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType_t
SUM_IN_F32 = 68  # CUBLAS_COMPUTE_32F
PLAIN, TRANSPOSED = 0, 1  # cublasOperation_t
DEFAULT_ALGORITHM = -1
WORK_SPACE = 32 << 20  # bytes; what cuBLAS recommends for sm_90


def library() -> Any:
    """The cuBLAS library. BackendError where there is none."""
    return shared("cublas", "nvidia-cublas")


def version() -> tuple[int, int, int]:
    """Major, minor and patch version."""
    found = [ctypes.c_int() for _ in range(3)]
    for i, number in enumerate(found):
        _check(library().cublasGetProperty(i, ctypes.byref(number)), "asking for the version")
    return found[0].value, found[1].value, found[2].value


@dataclass(eq=False)
class Blas:
    """Handles by stream. `allocate` gives device memory, which its owner frees."""

    allocate: Callable[[int], int]
    handles: dict[int, ctypes.c_void_p] = field(default_factory=dict)

    def product(
        self,
        w: int,
        x: int,
        y: int,
        shape: tuple[int, int, int],
        row: int,
        kind: str,
        add: bool,
        stream: int,
    ) -> None:
        """As `Driver.product`. cuBLAS counts columns first: y^T [n, m] = w [n, k] . x^T [k, m]."""
        n, m, k = shape
        one, old = ctypes.c_float(1.0), ctypes.c_float(1.0 if add else 0.0)
        type_, p = DATA_TYPES[kind], ctypes.c_void_p
        status = library().cublasGemmEx(
            self.handle(stream), TRANSPOSED, PLAIN, n, m, k, ctypes.byref(one), p(w), type_, k,
            p(x), type_, k, ctypes.byref(old), p(y), DATA_TYPES["f32"], row, SUM_IN_F32,
            DEFAULT_ALGORITHM,
        )  # fmt: skip
        _check(status, f"a product of {m} rows, {n} outputs, {k} columns")

    def handle(self, stream: int) -> ctypes.c_void_p:
        """The handle of a stream, with a work space; made on first use."""
        if stream not in self.handles:
            made = ctypes.c_void_p()
            _check(library().cublasCreate_v2(ctypes.byref(made)), "making a handle")
            _check(library().cublasSetStream_v2(made, ctypes.c_void_p(stream)), "its stream")
            space = ctypes.c_void_p(self.allocate(WORK_SPACE))
            size = ctypes.c_size_t(WORK_SPACE)
            _check(library().cublasSetWorkspace_v2(made, space, size), "its work space")
            self.handles[stream] = made
        return self.handles[stream]

    def close(self) -> None:
        """Destroy the handles; a lost device makes that fail, which changes nothing."""
        for made in self.handles.values():
            library().cublasDestroy_v2(made)
        self.handles.clear()


def _check(status: int, what: str) -> None:
    if status:
        raise BackendError(f"CUDA: {what} failed with cuBLAS status {status}")
