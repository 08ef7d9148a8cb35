"""From a kernel's Python function to machine code, by LLVM.

Only runs that meet a kernel for the first time come here: LLVM is imported when first asked for
something (0.1 s and 45 MB), and `jit.py` finds compiled kernels on disk without it.
"""

from typing import TYPE_CHECKING

from llvmlite import ir

from ggraph.backends.cpu.codegen.isa import Isa, host
from ggraph.backends.cpu.codegen.simd import KERNELS, Kernel, KernelSpec
from ggraph.lazy import lazy

if TYPE_CHECKING:
    from llvmlite import binding as llvm
else:
    llvm = lazy("llvmlite.binding")


def machine(isa: Isa) -> "llvm.TargetMachine":
    """LLVM's code generator for a target."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(isa.triple)
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="pic", codemodel="default", jit=True
    )


def build_ir(spec: KernelSpec, isa: Isa) -> ir.Module:
    """The kernel's IR as its Python function emits it."""
    module = ir.Module(spec.name)
    module.triple = isa.triple
    k = Kernel(module, spec, isa)
    found = spec.build(k)
    k.b.ret_void() if found is None else k.b.ret(found.v)
    return module


PASSES = ("sroa", "simplify_cfg", "instruction_combine", "loop_rotate", "new_gvn",
          "instruction_combine")  # fmt: skip


def optimise(module: ir.Module, isa: Isa) -> "llvm.ModuleRef":
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
    """Machine code of one kernel, an object file of the system's kind."""
    return bytes(machine(isa).emit_object(optimise(build_ir(spec, isa), isa)))


def assembly(name: str, isa: Isa | None = None) -> str:
    """Assembly text of a kernel, for reading and for tests of what was selected."""
    isa = isa or host()
    return str(machine(isa).emit_assembly(optimise(build_ir(KERNELS[name], isa), isa)))


class Linker:
    """LLVM's own loader, for objects that cannot be images. They live as long as it does.

    Its newer linker has all sections of an object beside each other. The older one puts them where
    there is room, and ends the process where that is farther apart than they can reach (2 GB).
    """

    def __init__(self, isa: Isa) -> None:
        newer = "windows" not in isa.triple  # it does not read all that objects have there
        self._jit = llvm.create_lljit_compiler(machine(isa), use_jit_link=newer)
        self._held: list[object] = []

    def load(self, name: str, code: bytes) -> int:
        """Address of function `name` of an object."""
        library = llvm.JITLibraryBuilder().add_object_img(code)
        library.add_current_process().export_symbol(name)
        tracker = library.link(self._jit, name)
        self._held.append(tracker)
        return int(tracker[name])
