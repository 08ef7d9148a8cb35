"""CUDA C++ to machine code by NVRTC, through ctypes: needs no GPU, no driver and no CuPy.

The library comes with the wheel `nvidia-cuda-nvrtc`, with CuPy's `[ctk]` extra, or with a CUDA
toolkit. Compiled code is kept in `cache_dir()/cuda`, under a hash of all that went into it.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

from ggraph import kept
from ggraph.backends.cuda.libraries import shared
from ggraph.errors import BackendError

# A lambda within another is the device's: 13.0 asks to be told so.
FLAGS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


def library() -> Any:
    """The NVRTC library. BackendError where there is none."""
    return shared("nvrtc", "nvidia-cuda-nvrtc")


@cache
def version() -> tuple[int, int]:
    """NVRTC's major and minor version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def build(name: str, text: str, headers: Mapping[str, str], arch: str, defines: str) -> bytes:
    """Machine code of `text` for `arch` ("sm_90"), from the cache where it is there.

    `defines` is a space-separated list such as "WEIGHT=q4_k". Raises BackendError with the
    compiler's messages (which name source lines), or where there is no NVRTC.
    """
    key = identity(name, text, headers, arch, defines)
    place, file = kept.folder("cuda"), f"{PurePath(name).stem}-{arch}.cubin"
    code = kept.read(place, file, key)
    if code is None:
        code = compile_source(name, text, headers, arch, defines)
        kept.write(place, file, key, code)
    return code


def identity(name: str, text: str, headers: Mapping[str, str], arch: str, defines: str) -> str:
    """All that goes into the machine code of `text`, the compiler's version with it."""
    return "\0".join([name, text, *headers.values(), arch, *FLAGS, defines, str(version())])


def compile_source(
    name: str, text: str, headers: Mapping[str, str], arch: str, defines: str
) -> bytes:
    """Machine code of `text` for `arch`, always compiled. Raises BackendError as `build` does."""
    nvrtc, program = library(), ctypes.c_void_p()
    contents = _strings(headers.values())
    names = _strings(headers)
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), len(headers), contents, names
    )
    _check(created, f"{name}: nvrtcCreateProgram")
    try:
        flags = (f"--gpu-architecture={arch}", *FLAGS, *(f"-D{d}" for d in defines.split()))
        options = _strings(flags)
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status:
            title = " ".join([name, defines]).strip()
            raise BackendError(f"{title} does not compile for {arch}: {_errors(program)}")
        return _code(program, name)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(values: Sequence[str] | Any) -> Any:
    encoded = [v.encode() for v in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _errors(program: Any) -> str:
    """The compiler's errors with their source lines, on one line."""
    log = _log(program)
    found = [" ".join(t.split()) for t in log.splitlines() if ": error" in t or "error:" in t]
    return "; ".join(found) or log.replace("\n", " ")


def _log(program: Any) -> str:
    size = ctypes.c_size_t()
    library().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library().nvrtcGetProgramLog(program, text)
    return text.value.decode("utf-8", "replace").strip()


def _code(program: Any, name: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library().nvrtcGetCUBINSize(program, ctypes.byref(size)), f"{name}: nvrtcGetCUBINSize")
    code = ctypes.create_string_buffer(size.value)
    _check(library().nvrtcGetCUBIN(program, code), f"{name}: nvrtcGetCUBIN")
    return code.raw


def _check(status: int, what: str) -> None:
    if status:
        raise BackendError(f"{what} failed with NVRTC status {status}")
