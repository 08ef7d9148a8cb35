"""Helpers of the CPU tests: run one kernel as a flat program, and pack weights."""

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ggraph.backends.cpu.codegen.isa import Isa, host, limited
from ggraph.backends.cpu.codegen.jit import Jit, host_jit
from ggraph.backends.cpu.kernels import (  # noqa: F401
    attention,
    elementwise,
    matmul,
    matmul_id,
    pack,
    quantise,
    slots,
)
from ggraph.backends.cpu.kernels import cache as cache_kernels  # noqa: F401
from ggraph.backends.cpu.kernels.nest import register
from ggraph.backends.cpu.kernels.nest_form import Nest, Operand
from ggraph.backends.cpu.kernels.tiles import FloatLayout, activation_bytes, layout_of, packed_bytes
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler
from ggraph.dtype import A8, DType

Array = np.ndarray[Any, Any]


@cache
def pool(threads: int) -> Pool:
    """One pool per thread count for the whole test run."""
    return Pool(threads)


def call(name: str, threads: int = 2, **values: Any) -> None:
    """Run one kernel to its end."""
    asm = Assembler(host_jit())
    asm.add(name, **values)
    pool(threads).run(asm.freeze())


def sum_of(m: int, n: int, **rows: Any) -> tuple[str, dict[str, Any]]:
    """The kernel of y = a + b on m rows of n floats, and its words; rows: y, a, b, each an array or
    address with the bytes from row to row."""
    flat = tuple(Operand("f32", "v") for _ in "yab")
    steps = (("load", (1,)), ("load", (2,)), ("add", (0, 1)))
    name = register(Nest(2, 0, "kept", flat, steps, "f32", False)).name
    words: dict[str, Any] = {"k0": m, "k1": n}
    for operand, (at, step) in rows.items():
        words |= {operand: at, f"{operand}k0": step, f"{operand}k1": 4}
    return name, words


def variants() -> dict[str, Isa]:
    """What this host can also run: no special products, and vectors of 256 bits."""
    here = host()
    # Without these alone products of 256 bits remain, of AVX-512 where there are no others (Zen 4).
    narrow = replace(here, features=here.features.replace("+avx512bw", "-avx512bw"))
    found = {"plain": replace(here, dot="plain")}
    if here.lanes > 8:
        found["vnni of 256 bits"] = narrow
    if here.tiles:
        found["vnni of 512 bits"] = limited(here, "avx512")
    if here.moves_bits:
        found["no moving of bits"] = replace(here, features=here.features.replace("+gfni", "-gfni"))
    if here.dot == "vnni":
        found["avx2"] = limited(here, "avx2")
    return found


def makers() -> dict[str, Isa]:
    """The same, and with 512 bits what is made for the processors of another maker."""
    here, other = limited(host(), "avx512"), {True: "icelake-server", False: "znver5"}
    wide = {"another maker's": replace(here, cpu=other[here.cpu.startswith("znver")])}
    return variants() | (wide if here.lanes > 8 else {})


def call_with(jit: Jit, name: str, **values: Any) -> None:
    """Run one kernel of another variant on one thread."""
    asm = Assembler(jit)
    asm.add(name, **values)
    code = asm.freeze().code
    entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    entry(jit.address(name))(code.ctypes.data, 0, 1)


def packed_weight(dtype: DType, raw: Array, n: int, k: int) -> Array:
    """The weight's tiles, with room for prefetches after them."""
    out = np.full(packed_bytes(dtype, n, k) + 256, 0xAA, np.uint8)
    call(f"pack_{dtype.name}", raw=raw, out=out, n=n, k=k, row_bytes=raw.shape[1])
    assert (out[-256:] == 0xAA).all(), f"pack_{dtype.name} wrote beyond its tiles"
    return out


def activations(dtype: DType, x: Array) -> tuple[Array, Array]:
    """What the kernel of `dtype` multiplies: its bytes, and their exact float64 meaning."""
    if isinstance(layout_of(dtype), FloatLayout):
        return x, x.astype(np.float64)
    m, k = x.shape
    out = np.zeros((m, activation_bytes(k)), np.uint8)
    call("quantise", x=x, out=out, m=m, k=k, xs=x.strides[0], os=out.strides[0])
    blocks = out.reshape(m, k // 32, A8.block_bytes)
    codes = blocks[..., :32].view(np.int8).astype(np.float64)
    scales = np.ascontiguousarray(blocks[..., 32:36]).view(np.float32)
    return out, (codes * scales).reshape(m, k)


def product(
    dtype: DType, tiles: Array, x: Array, n: int, k: int, threads: int, add: Array | None = None
) -> Array:
    """x . W^T (+ add) by the kernel; three columns beyond n must stay untouched."""
    m = len(x)
    y = np.full((m, n + 3), np.nan, np.float32)
    call(
        "matmul_" + layout_of(dtype).name, threads, w=tiles, x=x, y=y, n=n, k=k, m=m,
        xs=x.strides[0], ys=y.strides[0], add=0 if add is None else add,
        adds=0 if add is None else add.strides[0], unit=1,
    )  # fmt: skip
    assert np.isnan(y[:, n:]).all(), f"matmul of {dtype} wrote beyond column {n}"
    return np.ascontiguousarray(y[:, :n])
