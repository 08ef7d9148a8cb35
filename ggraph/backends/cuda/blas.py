"""Products by cuBLASLt through ctypes: stream, work space and algorithm are each call's own.

What a shape's algorithm is, the library is asked once, before anything is enqueued (since CUDA 13.3
it refuses to be asked while a stream is captured), and the answer is kept: every run and every
captured graph of a process has the same bits. Its first is taken. A choice by the clock would
make bits depend on noise; `scripts/gpu_speed.py` measures what it would bring.

Source: the cuBLAS manual's chapter on cuBLASLt, and cublasLt.h, to which `tests/test_cuda_blas.py`
holds what is declared here.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from ggraph.backends.cuda.driver import ALIGNED, Product
from ggraph.backends.cuda.libraries import shared
from ggraph.errors import BackendError

DATA_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType_t
SUM_IN_F32 = 68  # CUBLAS_COMPUTE_32F
TRANSPOSED = 1  # CUBLAS_OP_T
TRANSFORM_OF_A = 3  # CUBLASLT_MATMUL_DESC_TRANSA
MOST_SPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
ALIGNMENTS_OF = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, .._B_, .._C_, .._D_
MOST_GUESSES = 8  # algorithms that are asked for

AT = ctypes.c_void_p
INT = ctypes.c_int
SIZE = ctypes.c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (AT,),
    "cublasLtDestroy": (AT,),
    "cublasLtGetProperty": (INT, AT),
    "cublasLtGetStatusName": (INT,),
    "cublasLtMatmulDescCreate": (AT, INT, INT),
    "cublasLtMatmulDescSetAttribute": (AT, INT, AT, SIZE),
    "cublasLtMatmulDescDestroy": (AT,),
    "cublasLtMatrixLayoutCreate": (AT, INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (AT,),
    "cublasLtMatmulPreferenceCreate": (AT,),
    "cublasLtMatmulPreferenceSetAttribute": (AT, INT, AT, SIZE),
    "cublasLtMatmulPreferenceDestroy": (AT,),
    "cublasLtMatmulAlgoGetHeuristic": (*[AT] * 7, INT, AT, AT),
    "cublasLtMatmul": (*[AT] * 14, SIZE, AT),
}


class Guess(ctypes.Structure):
    """An algorithm, and what the library says of it (cublasLtMatmulHeuristicResult_t): bytes of
    work space, whether it can be used, and how many times its blocks fill the GPU."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("space_bytes", SIZE),
        ("status", INT),
        ("waves", ctypes.c_float),
        ("reserved", INT * 4),
    )


@dataclass(frozen=True, eq=False)
class Form:
    """What cuBLASLt knows of a shape: descriptors of the operation, of w, x and y; and its guesses,
    first that which it expects to be the fastest."""

    operation: AT
    w: AT
    x: AT
    y: AT
    guesses: Sequence[Guess]


def library() -> Any:
    """The cuBLASLt library. BackendError where there is none."""
    return _declared(shared("cublasLt", "nvidia-cublas"))


@cache
def _declared(found: Any) -> Any:
    """With the types of the arguments: a plain int would be passed as 32 bits."""
    for name, types in FUNCTIONS.items():
        getattr(found, name).argtypes = types
    found.cublasLtGetStatusName.restype = ctypes.c_char_p
    return found


def version() -> tuple[int, int, int]:
    """Major, minor and patch version."""
    found = [INT() for _ in range(3)]
    for i, number in enumerate(found):
        _check(library().cublasLtGetProperty(i, ctypes.byref(number)), "asking for the version")
    return found[0].value, found[1].value, found[2].value


def shape_of(p: Product) -> Product:
    """All of a product that its algorithm may go by: of addresses, what they are multiples of."""
    w, x, y, rest = (min(a & -a, ALIGNED) for a in (p.w, p.x, p.y, p.rest or p.y))
    return replace(p, w=w, x=x, y=y, rest=rest, space=0)


@dataclass(eq=False)
class Blas:
    """One GPU's handle, and the forms of the shapes there were."""

    handle: AT | None = None
    forms: dict[Product, Form] = field(default_factory=dict)
    _undo: list[Callable[[], Any]] = field(default_factory=list)

    def product(self, p: Product, rank: int = 0) -> Callable[[int], None]:
        """As `Driver.product`."""
        shape = shape_of(p)
        form = self.forms[shape] = self.forms.get(shape) or self._asked(shape)
        if rank >= len(form.guesses):
            raise BackendError(
                f"CUDA: cuBLASLt has {len(form.guesses)} algorithm(s) for {_text(p)}, none of rank "
                f"{rank}"
            )
        return partial(self._enqueue, p, form, form.guesses[rank])

    def _enqueue(self, p: Product, form: Form, guess: Guess, stream: int) -> None:
        one, old = ctypes.c_float(1.0), ctypes.c_float(1.0 if p.rest else 0.0)
        status = library().cublasLtMatmul(
            self.handle, form.operation, ctypes.byref(one), p.w, form.w, p.x, form.x,
            ctypes.byref(old), p.rest or p.y, form.y, p.y, form.y, guess.algorithm, p.space,
            p.space_bytes, stream,
        )  # fmt: skip
        _check(status, _text(p))

    def _asked(self, s: Product) -> Form:
        """The form of a shape. cuBLAS counts columns first: y^T [n, m] = w [n, k] . x^T [k, m]."""
        kind, sums = DATA_TYPES[s.kind], DATA_TYPES["f32"]
        handle = self.handle = self.handle or self._made("")
        operation = self._made("MatmulDesc", SUM_IN_F32, sums)
        _set("MatmulDesc", operation, TRANSFORM_OF_A, ctypes.c_int32(TRANSPOSED))
        w = self._made("MatrixLayout", kind, s.k, s.n, s.k)
        x = self._made("MatrixLayout", kind, s.k, s.m, s.k)
        y = self._made("MatrixLayout", sums, s.n, s.m, s.row)
        limits = self._made("MatmulPreference")
        _set("MatmulPreference", limits, MOST_SPACE, ctypes.c_uint64(s.space_bytes))
        for what, aligned in zip(ALIGNMENTS_OF, (s.w, s.x, s.rest, s.y), strict=True):
            _set("MatmulPreference", limits, what, ctypes.c_uint32(aligned))
        found, count = (Guess * MOST_GUESSES)(), INT()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle, operation, w, x, y, y, limits, MOST_GUESSES, found, ctypes.byref(count)
        )
        _check(status, f"asking for an algorithm of {_text(s)}")
        return Form(operation, w, x, y, [g for g in found[: count.value] if not g.status])

    def _made(self, what: str, *given: int) -> AT:
        """A handle ("") or a descriptor, destroyed with the rest."""
        made, names = AT(), (f"cublasLt{what}Create", f"cublasLt{what}Destroy")
        create, destroy = (getattr(library(), name) for name in names)
        _check(create(ctypes.byref(made), *given), names[0])
        self._undo.append(partial(destroy, made))
        return made

    def close(self) -> None:
        """Destroy what was made; a lost device makes that fail, which changes nothing."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.forms.clear()
        self.handle = None


def _set(what: str, descriptor: AT, attribute: int, value: Any) -> None:
    """One attribute, whose size the library checks."""
    name = f"cublasLt{what}SetAttribute"
    given = (descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value))
    _check(getattr(library(), name)(*given), f"{name} {attribute}")


def _text(p: Product) -> str:
    return f"a {p.kind} product of {p.m} rows, {p.n} outputs, {p.k} columns"


def _check(status: int, what: str) -> None:
    if status:
        name = library().cublasLtGetStatusName(status).decode()
        raise BackendError(f"CUDA: {what} failed: {name}")
