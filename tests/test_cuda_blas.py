"""What cuBLASLt is told: held to its own header, and to the library's own record of our calls.

The library needs no GPU to make descriptors and to write down what it was asked, so that its log
says how it understood our arguments. Where the wheel `nvidia-cublas` (405 MB) is not installed
there is nothing to ask; `pip install nvidia-cublas` brings it.
"""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggraph.backends.cuda import blas, libraries
from ggraph.backends.cuda.driver import ALIGNED, Product
from ggraph.errors import BackendError

ROOT = Path(__file__).resolve().parent.parent
SPACE = 32 << 20
DEEP = Product(  # the product behind the gated unit of a prompt of 512 rows, Llama-3.1-8B
    0x10000, 0x20000, 0x30000, 4096, 512, 14336, 4096, "bf16", 0x40000, 0x50000, SPACE
)


PLAIN = Product(0x10002, 0x20040, 0x30010, 24, 65, 77, 32, "f16", 0, 0x50000, 1024)
ASKED = (DEEP, PLAIN, Product(0x100, 0x900, 0x1000, 24, 65, 8, 24, "f32", 0x1000, 0x9000, 0))


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where the library is."""
    try:
        return Path(blas.library()._name)
    except BackendError as error:
        pytest.skip(f"cuBLASLt is not installed: {error}")


@pytest.fixture(scope="module")
def header(installed: Path) -> str:
    """cublasLt.h and cublas_api.h without comments."""
    folder = installed.parent.parent / "include"
    files = [folder / name for name in ("cublas_api.h", "cublasLt.h")]
    if not all(f.is_file() for f in files):
        pytest.skip(f"no headers beside {installed}")
    text = "\n".join(f.read_text() for f in files)
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


CONSTANTS = {
    "CUBLAS_COMPUTE_32F": blas.SUM_IN_F32,
    "CUBLAS_OP_T": blas.TRANSPOSED,
    "CUBLASLT_MATMUL_DESC_TRANSA": blas.TRANSFORM_OF_A,
    "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": blas.MOST_SPACE,
    **{
        f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{what}_BYTES": value
        for what, value in zip("ABCD", blas.ALIGNMENTS_OF, strict=True)
    },
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_the_header_s(name: str, header: str) -> None:
    found = re.search(rf"\b{name} = (\d+)", header)
    assert found and int(found[1]) == CONSTANTS[name]


def _c_type(declared: str) -> Any:
    """The ctypes of a parameter: pointers and handles are addresses, enumerations ints."""
    words = declared.replace("const ", "").strip().rsplit(" ", 1)[0].strip()
    handles = ("cublasLtHandle_t", "cudaStream_t", "cublasLtMatmulDesc_t", "cublasLtMatrixLayout_t",
               "cublasLtMatmulPreference_t")  # fmt: skip
    if "*" in declared or "[" in declared or words in handles:
        return ctypes.c_void_p
    plain = {"size_t": ctypes.c_size_t, "uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64}
    known = re.fullmatch(r"int|cuda\w+|cublas\w+|libraryPropertyType", words)
    assert words in plain or known, f"{declared!r}: what is {words!r}?"
    return plain.get(words, ctypes.c_int)


@pytest.mark.parametrize("name", blas.FUNCTIONS)
def test_arguments_are_the_header_s(name: str, header: str) -> None:
    declared = re.search(rf"\b{name}\s*\(([^)]*)\)", header)
    assert declared, f"{name} is not in the header"
    wanted = tuple(_c_type(part) for part in declared[1].split(","))
    assert blas.FUNCTIONS[name] == wanted


def test_the_guess_is_the_header_s(header: str) -> None:
    """Fields in order, with their types; the algorithm is so many words of 64 bits."""
    body = re.search(r"typedef struct \{([^}]*)\} cublasLtMatmulHeuristicResult_t;", header)
    words = re.search(
        r"typedef struct \{\s*uint64_t data\[(\d+)\];\s*\} cublasLtMatmulAlgo_t", header
    )
    assert body and words
    types = {"cublasLtMatmulAlgo_t": ctypes.c_uint64 * int(words[1]), "float": ctypes.c_float,
             "size_t": ctypes.c_size_t, "cublasStatus_t": ctypes.c_int}  # fmt: skip
    wanted = []
    for line in filter(None, map(str.strip, body[1].split(";"))):
        kind, name = line.split()
        several = re.search(r"\[(\d+)\]", name)
        wanted.append(ctypes.c_int * int(several[1]) if several else types[kind])
    assert [kind for _, kind in blas.Guess._fields_] == wanted
    assert re.findall(r"(\w+)(?:\[4\])?;", body[1]) == [
        "algo", "workspaceSize", "state", "wavesCount", "reserved"
    ]  # fmt: skip


class Claimed:
    """The library with a GPU that it has not: no handle is needed, and there is one algorithm."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def cublasLtCreate(self, at: Any) -> int:
        """No handle, without complaint."""
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        """Asked, refused, and taken for an answer."""
        assert self.real.cublasLtMatmulAlgoGetHeuristic(*given) == 1, "not initialised"
        given[-1]._obj.value = 1
        return 0


ASK = """
import sys
sys.path[:0] = [".", "tests"]
from test_cuda_blas import ASKED, Claimed
from ggraph.backends.cuda import blas
from ggraph.errors import BackendError
real = blas.library()
blas.library = lambda: Claimed(real)
made = blas.Blas()
for p in ASKED:
    try:
        made.product(p)(0x77)
    except BackendError as error:
        print(error)
made.close()
"""


@pytest.fixture(scope="module")
def log(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the library wrote of ASKED, each asked for and run, in a process of its own; without a
    GPU both are refused, but read."""
    path = tmp_path_factory.mktemp("blas") / "log"
    env = {**os.environ, "CUBLASLT_LOG_LEVEL": "5", "CUBLASLT_LOG_FILE": str(path),
           "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    refused = "failed: CUBLAS_STATUS_NOT_INITIALIZED"
    assert done.stdout.count(refused) == len(ASKED), done
    return path.read_text().splitlines()


def calls(log: list[str], name: str) -> list[str]:
    return [line.partition(f"[{name}] ")[2] for line in log if f"[{name}] " in line]


def fields(text: str) -> dict[str, int]:
    """name=0X.. or name=1 of a line."""
    found = re.findall(r"(\w+)=(0X[0-9A-F]+|\d+)(?=[ \]]|$)", text)
    return {name: int(value, 0) for name, value in found}


def test_the_library_reads_a_shape_as_we_mean_it(log: list[str]) -> None:
    """w and x are read by columns of k, y by columns of n: y^T = w . x^T, w transposed first."""
    deep, plain, third = calls(log, "cublasLtMatmulAlgoGetHeuristic")
    assert "computeDesc=[computeType=COMPUTE_32F scaleType=R_32F transa=OP_T]" in deep
    assert "Adesc=[type=R_16BF rows=14336 cols=4096 ld=14336]" in deep
    assert "Bdesc=[type=R_16BF rows=14336 cols=512 ld=14336]" in deep
    for what in "CD":
        assert f"{what}desc=[type=R_32F rows=4096 cols=512 ld=4096]" in deep
        assert f"{what}desc=[type=R_32F rows=24 cols=65 ld=32]" in plain
    assert "Adesc=[type=R_16F rows=77 cols=24 ld=77]" in plain
    assert "Adesc=[type=R_32F rows=8 cols=24 ld=8]" in third
    assert fields(deep)["maxWorkspaceSizeinBytes"] == SPACE
    assert "minBytesAlignment" not in deep, "256, which is the default"
    aligned = fields(plain)
    assert [aligned.get(f"minBytesAlignment{what}", ALIGNED) for what in "ABCD"] == [2, 64, 16, 16]


def test_the_library_reads_a_call_as_we_mean_it(log: list[str]) -> None:
    """Addresses, work space and stream; C is what is added, or the result itself."""
    found = [fields(line) for line in calls(log, "cublasLtMatmul")]
    for p, one in zip(ASKED, found, strict=True):
        got = tuple(one[name] for name in ("A", "B", "C", "D", "workSpace"))
        assert got == (p.w, p.x, p.rest or p.y, p.y, p.space)
        assert (one["workSpaceSizeInBytes"], one["stream"]) == (p.space_bytes, 0x77)
        assert one["Cdesc"] == one["Ddesc"] and len({one[f"{d}desc"] for d in "ABD"}) == 3


def test_all_descriptors_are_destroyed(log: list[str]) -> None:
    for what, each in (("MatmulDesc", 1), ("MatrixLayout", 3), ("MatmulPreference", 1)):
        made, gone = (calls(log, f"cublasLt{what}{end}") for end in ("Create", "Destroy"))
        assert len(made) == len(gone) == each * len(ASKED)


def test_products_of_one_shape_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie, as far as that is aligned alike, and whatever is added."""
    made, asked = blas.Blas(), list[Product]()

    def answer(shape: Product) -> blas.Form:
        asked.append(shape)
        return blas.Form(*[ctypes.c_void_p()] * 4, [blas.Guess(), blas.Guess()])

    monkeypatch.setattr(made, "_asked", answer)
    for p in (DEEP, replace(DEEP, w=0x70000, rest=0), replace(DEEP, rest=DEEP.y, space=0x90000)):
        made.product(p)
        made.product(p, 1)
    assert len(asked) == 1
    for p in (replace(DEEP, w=0x10010), replace(DEEP, row=8192), replace(DEEP, space_bytes=1024)):
        made.product(p)
    assert len(asked) == 4
    with pytest.raises(BackendError, match=r"2 algorithm.* none of rank 2"):
        made.product(DEEP, 2)


def test_its_major_version_is_that_of_cupy(installed: Path) -> None:
    pytest.importorskip("cupy.cuda", reason="CuPy is not installed")
    assert libraries.cupy_major() == blas.version()[0]
