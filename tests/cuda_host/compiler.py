"""The kernels' sources compiled by g++ for the host, behind `shim.h`; kept by their hash."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ggraph.backends.cuda import kernels
from ggraph.backends.cuda.kernels import Unit

SHIM = Path(__file__).parent / "shim.h"
BUILT = Path(tempfile.gettempdir()) / "ggraph-cuda-host"
COMPILER = shutil.which("g++")
need_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
# Without ipa-ra: a callee that jumps to another fiber comes back with no register as it was.
FLAGS = ("-std=c++17", "-O1", "-fno-ipa-ra", "-ffp-contract=off", "-fno-strict-aliasing",
         "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-w", "-DGGRAPH_HOST",
         "-ftrivial-auto-var-init=pattern",
         "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
         "-fsanitize-undefined-trap-on-error")  # fmt: skip


@cache
def library(unit: Unit) -> ctypes.CDLL:
    """A unit compiled for the host."""
    return compiled(str(unit.source), unit.text, unit.type, unit.defines)


def compiled(name: str, text: str, type_name: str = "", defines: str = "") -> ctypes.CDLL:
    """Kernels compiled for the host; kept by the hash of their sources."""
    entries = "\n".join(f"HOST_ENTRY({k})" for k in kernels.declared(text))
    files = {
        **kernels.headers(type_name),
        "shim.h": SHIM.read_text(),
        "unit.cpp": f"{text}\n{entries}\n",
    }
    key = hashlib.sha256("\0".join([*files.values(), defines, *FLAGS]).encode()).hexdigest()[:16]
    folder = BUILT / f"{name}-{type_name or 'plain'}-{key}"
    if not (folder / "unit.so").is_file():
        _compile(folder, defines, files)
    return ctypes.CDLL(str(folder / "unit.so"))


def _compile(folder: Path, defines: str, files: dict[str, str]) -> None:
    """Compile beside the folder: other processes may be at the same unit."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as own:
        for name, text in files.items():
            (Path(own) / name).write_text(text)
        command = [str(COMPILER), *FLAGS, *(f"-D{d}" for d in defines.split()), "unit.cpp", "-o"]
        subprocess.run([*command, "unit.so"], cwd=own, check=True)
        (Path(own) / "unit.so").replace(folder / "unit.so")


def entry_of(held: ctypes.CDLL, kernel: str) -> Any:
    """What runs a kernel's grid; it returns a text where that goes wrong."""
    entry = getattr(held, f"host_{kernel}")
    entry.restype = ctypes.c_char_p
    return entry
