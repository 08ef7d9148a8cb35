"""Finds compiled kernels in the cache on disk, or has them compiled.

One file per kernel, kept under the kernel's name, the processor, the compiler's version and a hash
of the source of this package and of what `BAKED` names, so that a changed kernel or another machine
never meets stale code.
Where `image.py` can, the file is an image, which runs without LLVM; else it is the system's object
file (.o), which LLVM loads. Whose files may be run, and how damage is found, is `ggraph/kept.py`.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

import llvmlite

from ggraph import dtype, kept
from ggraph.backends.cpu.codegen.compiler import Linker, compile_object
from ggraph.backends.cpu.codegen.image import Mapped, Unlinkable, link, map_image
from ggraph.backends.cpu.codegen.isa import Isa, host
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.backends.cpu.codegen.together import Crew
from ggraph.errors import BackendError
from ggraph.formats import levels
from ggraph.ops import steps, unary

ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # a kernel's
BAKED = (dtype, levels, steps, unary)  # modules elsewhere whose numbers kernels are made of
WATCHERS: list[Callable[[str], None]] = []  # told the name of each kernel before it is compiled


def _source_hash() -> str:
    digest = hashlib.sha256()
    elsewhere = (Path(str(module.__file__)) for module in BAKED)
    for path in (*sorted(Path(__file__).parents[1].rglob("*.py")), *elsewhere):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE = _source_hash()  # as it is imported: the files may be others later


class Jit:
    """Loaded kernels of one target. `address(name)` compiles or loads on first use."""

    def __init__(self, isa: Isa | None = None, folder: Path | None = None) -> None:
        self.isa = isa or host()
        self.folder = folder or kept.folder("cpu")
        self.compiled: list[str] = []  # kernels that were not in the cache
        self._loaded: dict[str, int] = {}
        self._held: list[Mapped] = []
        self._crews: list[Crew] = []  # at work on what is expected: one at most

    def address(self, name: str) -> int:
        """Entry point of kernel `name`. BackendError for an unknown one."""
        if name not in self._loaded:
            if name not in KERNELS:
                raise BackendError(f"no CPU kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
            self._loaded[name] = self._image(name) or self._object(name)
        return self._loaded[name]

    def expect(self, names: Iterable[str]) -> None:
        """These will be asked for: what is nowhere is compiled beside this process's own work."""
        missing = self._missing(names)
        if missing:
            crew = self._crew()
            crew.begin(missing)
            self._crews.append(crew)

    def prepare(self, names: Iterable[str]) -> None:
        """Have those of these kernels that are nowhere compiled at the same time."""
        missing = self._missing(names)
        if missing:
            for name, code in self._crew().compiled(missing):
                self._loaded[name] = self._linked(name, code, kept=False)

    def _crew(self) -> Crew:
        """The crew that is at work, which is the caller's now, or a new one."""
        with suppress(IndexError):
            return self._crews.pop()
        return Crew(self.isa, SOURCE, self._tell)

    def _missing(self, names: Iterable[str]) -> list[str]:
        """Kernels that nobody has compiled; the others' images are loaded."""
        missing = []
        for name in dict.fromkeys(names):
            if name not in self._loaded:
                address = self._image(name)
                if address:
                    self._loaded[name] = address
                elif self._read(name, "o") is None:
                    missing.append(name)
        return missing

    def _image(self, name: str) -> int:
        """The kernel's address from its image on disk; 0 where there is none to run."""
        image = self._read(name, "image")
        try:
            return 0 if image is None else self._map(image)
        except Unlinkable:
            return 0

    def _object(self, name: str) -> int:
        """The kernel's address after compiling it, or from an object that LLVM must load."""
        found = self._read(name, "o")
        return self._linked(name, found or self._compile(name), kept=found is not None)

    def _linked(self, name: str, code: bytes, *, kept: bool) -> int:
        """The address of an object, which is kept from now on."""
        try:
            image = link(code, name)
            address = self._map(image)
        except Unlinkable:
            if not kept:
                self._keep(name, "o", code)
            return self._linker.load(name, code)
        self._keep(name, "image", image)
        return address

    def _map(self, image: bytes) -> int:
        mapped = map_image(image)
        self._held.append(mapped)
        return mapped.address

    def _compile(self, name: str) -> bytes:
        self._tell(name)
        return compile_object(KERNELS[name], self.isa)

    def _tell(self, name: str) -> None:
        for watcher in WATCHERS:
            watcher(name)
        self.compiled.append(name)

    @cached_property
    def _linker(self) -> Linker:
        return Linker(self.isa)

    def _read(self, name: str, kind: str) -> bytes | None:
        return kept.read(self.folder, f"{name}.{kind}", self._key(name))

    def _keep(self, name: str, kind: str, content: bytes) -> None:
        kept.write(self.folder, f"{name}.{kind}", self._key(name), content)

    def _key(self, name: str) -> str:
        return f"{name}|{self.isa.key}|{llvmlite.__version__}|{SOURCE}"


@cache
def host_jit() -> Jit:
    """The process's kernels for the host."""
    return Jit()
