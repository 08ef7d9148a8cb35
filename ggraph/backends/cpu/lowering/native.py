"""C functions of ops from outside, called as kernels: see `ggraph.extend.register_op`."""

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import HEADER_WORDS, I64, Kernel, kernel
from ggraph.backends.cpu.kernels.nest_form import names
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.protocol import Launch
from ggraph.extend import address_of

MOST = 8  # sources of such an op


@kernel("function y yb a ab b bb c cb d db e eb f fb g gb h hb")
def native(k: Kernel) -> None:
    """Call a C function with its operands, pairs of address and bytes, in every thread."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    pointer = k.b.inttoptr(k.arg("function").v, kind.as_pointer())
    operands = k.instruction + 8 * (HEADER_WORDS + 1)
    k.b.call(pointer, [operands.v, k.thread.v, k.threads.v])


def call(low: Lowering, x: Launch) -> bool:
    """The C function of an op that has one, where nothing that it touches has gaps."""
    t = x.result.tensor
    if t.spec is None or t.spec.native is None:
        return False
    refs = (x.result, *x.sources)
    if not all(r.tensor.is_contiguous for r in refs) or len(x.sources) > MOST or t.attrs:
        return False
    words = dict.fromkeys((o + b for o in names(1 + MOST) for b in ("", "b")), 0)
    for name, ref in zip(names(len(refs)), refs, strict=True):
        words |= {name: low.at(ref), name + "b": ref.tensor.nbytes}
    low.add("native", function=address_of(t.spec.native), **words)  # type: ignore[arg-type]
    return True
