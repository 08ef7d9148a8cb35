"""Finds compiled kernels in the cache on disk, or has them compiled.

One file per kernel, named by the kernel, the processor, the compiler's version and a hash of the
source of this package, so that a changed kernel or another machine never meets stale code. Where
`image.py` can, the file is an image, which is mapped and run without LLVM; else it is the system's
object file (.o), which LLVM loads.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import llvmlite

from ggraph import env
from ggraph.backends.cpu.compiler import Linker, compile_object
from ggraph.backends.cpu.image import Unlinkable, link, map_image
from ggraph.backends.cpu.isa import Isa, host
from ggraph.backends.cpu.simd import KERNELS
from ggraph.errors import BackendError

WATCHERS: list[Callable[[str], None]] = []  # told the name of each kernel before it is compiled


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Jit:
    """Loaded kernels of one target. `address(name)` compiles or loads on first use."""

    def __init__(self, isa: Isa | None = None, folder: Path | None = None) -> None:
        self.isa = isa or host()
        self.folder = folder or env.cache_dir() / "cpu"
        self.compiled: list[str] = []  # kernels that were not in the cache
        self._loaded: dict[str, int] = {}
        self._held: list[object] = []  # maps of images

    def address(self, name: str) -> int:
        """Entry point of kernel `name`. BackendError for an unknown one."""
        if name not in self._loaded:
            if name not in KERNELS:
                raise BackendError(f"no CPU kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
            self._loaded[name] = self._image(name) or self._object(name)
        return self._loaded[name]

    def _image(self, name: str) -> int:
        """The kernel's address from its image on disk; 0 where there is none to run."""
        mapped = map_image(self._path(name, "image"))
        if mapped is None:
            return 0
        self._held.append(mapped)
        return mapped.address

    def _object(self, name: str) -> int:
        """The kernel's address after compiling it, or from an object that LLVM must load."""
        path = self._path(name, "o")
        code = path.read_bytes() if path.is_file() else self._compile(name)
        try:
            _write_atomically(self._path(name, "image"), link(code, name))
        except Unlinkable:
            _write_atomically(path, code)
        return self._image(name) or self._linker.load(name, code)

    def _compile(self, name: str) -> bytes:
        for watcher in WATCHERS:
            watcher(name)
        self.compiled.append(name)
        return compile_object(KERNELS[name], self.isa)

    @cached_property
    def _linker(self) -> Linker:
        return Linker(self.isa)

    def _path(self, name: str, kind: str) -> Path:
        text = f"{name}|{self.isa.key}|{llvmlite.__version__}|{_source_hash()}"
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.{kind}"


def _write_atomically(path: Path, code: bytes) -> None:
    """Another process sees the whole file or none; a read-only cache is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(code)
        os.replace(temporary, path)
    except OSError:
        return


@cache
def host_jit() -> Jit:
    """The process's kernels for the host."""
    return Jit()
