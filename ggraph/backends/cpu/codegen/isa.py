"""What the host's processor can do, as data. No kernels, no compilation.

Kernels ask an `Isa` which dot product to emit; everything else is generic vector IR that LLVM
legalises for any processor. Integer results are the same bits on every variant, and floating-point
work is emitted in one fixed order, so a model's bits depend on the host only where a host lacks a
fused multiply-add (LLVM then calls the library's, which rounds the same).
"""

import ctypes
import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import llvmlite

from ggraph import kept
from ggraph.env import vector_limit
from ggraph.lazy import lazy

if TYPE_CHECKING:
    from llvmlite import binding as llvm
else:
    llvm = lazy("llvmlite.binding")


X86, ARM = ("x86_64", "i686"), ("aarch64", "arm64")  # how triples begin


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

    @cached_property
    def lanes(self) -> int:
        """Numbers of 32 bits in a vector of integer products: 16 where 512 bits are at hand."""
        wide = {"+avx512vnni", "+avx512bw"} <= set(self.features.split(","))
        return 16 if wide and self.dot == "vnni" else 8

    @property
    def tiles(self) -> bool:
        """Whether AMX multiplies 16 rows of bytes and of bfloat16 at once."""
        wanted = {"+amx-tile", "+amx-int8", "+amx-bf16", "+avx512vbmi"}
        return wanted <= set(self.features.split(",")) and self.lanes == 16

    @property
    def moves_bits(self) -> bool:
        """Whether one instruction moves bits within bytes (GFNI), in vectors of any width here, and
        shifts are no faster: on Zen 4 prompts are by 6 % with these, and decoding by 4 %."""
        known = self.is_x86 and {"+gfni", "+avx2"} <= set(self.features.split(","))
        return known and self.cpu != "znver4"

    @property
    def unpacks_beside(self) -> bool:
        """Whether codes are unpacked while others are multiplied: where vectors have 512 bits,
        AMD's have two pipes beside the two that multiply, and Intel's have none."""
        return self.lanes == 16 and self.cpu.startswith("znver")

    @property
    def bypasses(self) -> bool:
        """Whether what is asked for past the caches comes as fast as what is kept: on AMD's, but
        not on Zen 4, where one thread then decodes a tenth slower with 512 bits. Intel's then have
        16 lines on their way instead of 48, and half the bytes a second."""
        return self.cpu.startswith("znver") and self.cpu != "znver4"

    @property
    def is_x86(self) -> bool:
        """Whether x86 intrinsics may be emitted."""
        return self.triple.startswith(X86)

    @property
    def is_arm(self) -> bool:
        """Whether this is a 64-bit Arm."""
        return self.triple.startswith(ARM)


@cache
def last_cache() -> int:
    """Bytes of the greatest cache, from which on weights are not there for the next step; 32 MB
    where the system does not say (only Linux does)."""
    sizes = [32 << 20]
    for told in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(told.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


def dot_variant(triple: str, features: frozenset[str]) -> str:
    """The best dot product among the features that a processor reports."""
    if triple.startswith(X86):
        if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
            return "vnni"
        return "avx2" if "avx2" in features else "plain"
    if triple.startswith(ARM) and "dotprod" in features:
        return "sdot"
    return "plain"


@cache
def host() -> Isa:
    """The processor that runs this process: as noted by an earlier run, else asked of LLVM."""
    key = _telling()
    found = None if key is None else _noted(key)
    if found is None:
        found = detect()
        if key is not None:
            kept.write(kept.folder("cpu"), NOTE, key, json.dumps(asdict(found)).encode())
    found = limited(found, vector_limit())
    return found if not found.tiles or _tiles_granted() else limited(found, "avx512")


NOT_OF = {"avx512": ("amx",), "avx2": ("amx", "avx512", "avx10", "avxvnni", "gfni")}


def limited(isa: Isa, widest: str) -> Isa:
    """The same x86 target without what came after `widest`, a key of `NOT_OF`; "" leaves all."""
    beyond = NOT_OF.get(widest)
    if beyond is None or not isa.is_x86:
        return isa
    told = ["-" + x[1:] if x[1:].startswith(beyond) else x for x in isa.features.split(",")]
    dot = dot_variant(isa.triple, frozenset(x[1:] for x in told if x.startswith("+")))
    return replace(isa, features=",".join(told), dot=dot)


def _tiles_granted() -> bool:
    """Whether Linux lets this process and its children use AMX, once asked: their state is larger
    than what signal frames were made for."""
    ask, arch_prctl, tile_data = 0x1023, 158, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data)) == 0


def detect() -> Isa:
    """What LLVM finds out about the processor."""
    triple = llvm.get_process_triple()
    features = llvm.get_host_cpu_features()
    if triple.startswith(ARM) and _arm_has_dots():
        features["dotprod"] = True
    present = frozenset(name for name, there in features.items() if there)
    return Isa(triple, llvm.get_host_cpu_name(), features.flatten(), dot_variant(triple, present))


def _arm_has_dots() -> bool:
    """Whether this Arm processor has the dot products of bytes, which LLVM does not tell of: asked
    of Linux; Apple's all have them."""
    hwcap, dots = 16, 1 << 20
    if platform.system() == "Linux":
        ask = ctypes.CDLL(None).getauxval
        ask.restype, ask.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
        return bool(ask(hwcap) & dots)
    return platform.system() == "Darwin"


NOTE = "processor.json"
TELLING = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip


def _telling() -> str | None:
    """What this processor's target is noted under, so that LLVM need not be loaded to ask; None
    where the system does not tell processors apart (only Linux does, in /proc/cpuinfo)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    told = sorted({line for line in lines if line.split(":")[0].strip() in TELLING})
    if not any(line.startswith(("flags", "Features")) for line in told):
        return None
    return "\n".join([platform.machine(), llvmlite.__version__, *told])


def _noted(key: str) -> Isa | None:
    note = kept.read(kept.folder("cpu"), NOTE, key)
    try:
        return None if note is None else Isa(**json.loads(note))
    except (ValueError, TypeError):  # whole, but of another version
        return None
