"""Compiles kernels and finds compiled ones in the cache on disk. Floor 6.

One object file per kernel, named by the kernel, the processor, the LLVM version and a hash of the
source of this package, so that a changed kernel or another machine never meets stale code. A cached
kernel is loaded without building any IR.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from llvmlite import binding as llvm
from llvmlite import ir

from ggraph import env
from ggraph.backends.cpu.isa import Isa, host
from ggraph.backends.cpu.simd import KERNELS, Kernel, KernelSpec
from ggraph.errors import BackendError

WATCHERS: list[Callable[[str], None]] = []  # told the name of each kernel before it is compiled


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def machine(isa: Isa) -> llvm.TargetMachine:
    """LLVM's code generator for a target."""
    target = llvm.Target.from_triple(isa.triple)
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="pic", codemodel="default", jit=True
    )


def build_ir(spec: KernelSpec, isa: Isa) -> ir.Module:
    """The kernel's IR as its Python function emits it."""
    module = ir.Module(spec.name)
    module.triple = isa.triple
    k = Kernel(module, spec, isa)
    spec.build(k)
    k.b.ret_void()
    return module


PASSES = ("sroa", "simplify_cfg", "new_gvn", "instruction_combine", "simplify_cfg",
          "loop_rotate", "new_gvn", "instruction_combine")  # fmt: skip


def optimise(module: ir.Module, isa: Isa) -> llvm.ModuleRef:
    """Verified and optimised by the short list above.

    LLVM's standard pipeline reassociates integer sums and re-rolls what kernels laid out by hand,
    which costs the register tiles up to half their speed; it would also compile slower.
    """
    tm = machine(isa)
    parsed = llvm.parse_assembly(str(module))
    parsed.data_layout = str(tm.target_data)
    parsed.verify()
    passes = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(parsed, llvm.create_pass_builder(tm, llvm.create_pipeline_tuning_options()))
    return parsed


def compile_object(spec: KernelSpec, isa: Isa) -> bytes:
    """Machine code of one kernel."""
    return bytes(machine(isa).emit_object(optimise(build_ir(spec, isa), isa)))


def assembly(name: str, isa: Isa | None = None) -> str:
    """Assembly text of a kernel, for reading and for tests of what was selected."""
    isa = isa or host()
    return str(machine(isa).emit_assembly(optimise(build_ir(KERNELS[name], isa), isa)))


class Jit:
    """Loaded kernels of one target. `address(name)` compiles or loads on first use."""

    def __init__(self, isa: Isa | None = None, folder: Path | None = None) -> None:
        self.isa = isa or host()
        self.folder = folder or env.cache_dir() / "cpu"
        self.compiled: list[str] = []  # kernels that were not in the cache
        self._jit = llvm.create_lljit_compiler(machine(self.isa))
        self._loaded: dict[str, tuple[int, object]] = {}

    def address(self, name: str) -> int:
        """Entry point of kernel `name`. BackendError for an unknown one."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name][0]

    def _load(self, name: str) -> tuple[int, object]:
        if name not in KERNELS:
            raise BackendError(f"no CPU kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
        library = llvm.JITLibraryBuilder().add_object_img(self._object(name))
        library.add_current_process().export_symbol(name)
        tracker = library.link(self._jit, name)
        return tracker[name], tracker

    def _object(self, name: str) -> bytes:
        path = self._path(name)
        if path.is_file():
            return path.read_bytes()
        for watcher in WATCHERS:
            watcher(name)
        code = compile_object(KERNELS[name], self.isa)
        self.compiled.append(name)
        _write_atomically(path, code)
        return code

    def _path(self, name: str) -> Path:
        version = ".".join(map(str, llvm.llvm_version_info))
        text = f"{name}|{self.isa.key}|{version}|{_source_hash()}"
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"


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
