"""What the host's processor can do, as data. Floor 6: no kernels, no compilation.

Kernels ask an `Isa` which dot product to emit; everything else is generic vector IR that LLVM
legalises for any processor. Integer results are the same bits on every variant, and floating-point
work is emitted in one fixed order, so a model's bits depend on the host only where a host lacks a
fused multiply-add (LLVM then calls the library's, which rounds the same).
"""

from dataclasses import dataclass
from functools import cache

from llvmlite import binding as llvm


@dataclass(frozen=True)
class Isa:
    """A compilation target: LLVM's names for it, and the dot product to use.

    `dot` is one of "vnni" (x86 vpdpbusd), "avx2" (pmaddubsw and pmaddwd), "sdot" (Arm), "plain".
    """

    triple: str
    cpu: str
    features: str
    dot: str

    @property
    def key(self) -> str:
        """Text that tells compiled code of one target from another's."""
        return f"{self.triple}|{self.cpu}|{self.features}|{self.dot}"

    @property
    def is_x86(self) -> bool:
        """Whether x86 intrinsics may be emitted."""
        return self.triple.startswith(("x86_64", "i686"))


def dot_variant(triple: str, features: frozenset[str]) -> str:
    """The best dot product among the features that a processor reports."""
    if triple.startswith(("x86_64", "i686")):
        if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
            return "vnni"
        return "avx2" if "avx2" in features else "plain"
    if triple.startswith(("aarch64", "arm64")) and "dotprod" in features:
        return "sdot"
    return "plain"


@cache
def host() -> Isa:
    """The processor that runs this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    features = llvm.get_host_cpu_features()
    present = frozenset(name for name, there in features.items() if there)
    return Isa(triple, llvm.get_host_cpu_name(), features.flatten(), dot_variant(triple, present))


def plain() -> Isa:
    """The host without its special dot products: the fallback, for tests on any machine."""
    here = host()
    return Isa(here.triple, here.cpu, here.features, "plain")
