"""A part of a kernel as a function of its own, which it calls.

Registers are given out function by function: within a whole kernel, innermost loops lose some of
theirs to what lives around them. And what is called from several places is compiled once.
"""

from collections.abc import Callable

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import I64, Kernel, Val

Body = Callable[..., None]


def call(k: Kernel, name: str, body: Body, *values: Val) -> None:
    """Have `body` done with words, by the routine called `name`; the first call of it emits it.
    The body may ask for the instruction's words, and use no other value that was made outside."""
    inside = k.module.globals.get(name) or _emitted(k, name, body, len(values))
    k.b.call(inside, [v.v for v in (k.instruction, k.thread, k.threads, *values)])


def _emitted(k: Kernel, name: str, body: Body, count: int) -> ir.Function:
    function = ir.Function(k.module, ir.FunctionType(ir.VoidType(), [I64] * (3 + count)), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    outside = k.function, k.b, k.instruction, k.thread, k.threads
    k.function, k.b = function, ir.IRBuilder(function.append_basic_block("entry"))
    k.instruction, k.thread, k.threads, *words = (Val(k, a) for a in function.args)
    body(*words)
    k.b.ret_void()
    k.function, k.b, k.instruction, k.thread, k.threads = outside
    return function
