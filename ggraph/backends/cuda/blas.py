"""cuBLAS products through ctypes, one handle per stream.

CuPy's own wrapper takes the stream from its state and not from the handle, which a capture of
several streams cannot use. The work space of each product is the plan's, so that cuBLAS allocates
nothing, captured or not, and products share bytes only where the plan orders them.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ggraph.backends.cuda.driver import Product
from ggraph.backends.cuda.libraries import shared
from ggraph.errors import BackendError

DATA_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType_t
SUM_IN_F32 = 68  # CUBLAS_COMPUTE_32F
PLAIN, TRANSPOSED = 0, 1  # cublasOperation_t
DEFAULT_ALGORITHM = -1


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
    """Handles by stream."""

    handles: dict[int, ctypes.c_void_p] = field(default_factory=dict)

    def product(self, p: Product, stream: int) -> None:
        """As `Driver.product`. cuBLAS counts columns first: y^T [n, m] = w [n, k] . x^T [k, m]."""
        handle, type_, at = self.handle(stream), DATA_TYPES[p.kind], ctypes.c_void_p
        one, old = ctypes.c_float(1.0), ctypes.c_float(1.0 if p.add else 0.0)
        given = library().cublasSetWorkspace_v2(handle, at(p.space), ctypes.c_size_t(p.space_bytes))
        _check(given, "its work space")
        status = library().cublasGemmEx(
            handle, TRANSPOSED, PLAIN, p.n, p.m, p.k, ctypes.byref(one), at(p.w), type_, p.k,
            at(p.x), type_, p.k, ctypes.byref(old), at(p.y), DATA_TYPES["f32"], p.row, SUM_IN_F32,
            DEFAULT_ALGORITHM,
        )  # fmt: skip
        _check(status, f"a product of {p.m} rows, {p.n} outputs, {p.k} columns")

    def handle(self, stream: int) -> ctypes.c_void_p:
        """The handle of a stream, made on first use."""
        if stream not in self.handles:
            made = ctypes.c_void_p()
            _check(library().cublasCreate_v2(ctypes.byref(made)), "making a handle")
            _check(library().cublasSetStream_v2(made, ctypes.c_void_p(stream)), "its stream")
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
