"""Activations to int8 blocks, alone and fused with what comes before. Floor 6.

A quantised row is a list of blocks of 40 bytes: 32 codes, their scale, and scale * sum of codes
(the weights' minimums multiply it). scale = max |x| / 127, as ggml's Q8 types, but kept in float32.

Legend: m rows, k columns.
"""

from collections.abc import Sequence

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import F32, F32X8, I8, I32, I32X8, Kernel, Val, kernel, vec
from ggraph.backends.cpu.tiles import BLOCK, X_BLOCK, X_SCALE, X_SUM


def quantise_block(k: Kernel, x: Sequence[Val], out: Val) -> None:
    """Store 32 numbers (four x8 vectors) as one block at `out`."""
    sizes = [words.absolute(k, v) for v in x]
    pairs = k.maximum(sizes[0], sizes[1]), k.maximum(sizes[2], sizes[3])
    largest = words.hmax(k, k.maximum(*pairs))
    scale = largest * (1.0 / 127.0)
    inverse = k.select(largest > 0.0, k.const(127.0, F32) / largest, 0.0)
    factor = k.splat(inverse, 8)
    ints = [k.cast("fptosi", words.round_even(k, v * factor), I32X8) for v in x]
    total = k.intrinsic(
        "llvm.vector.reduce.add.v8i32", I32, (ints[0] + ints[1]) + (ints[2] + ints[3])
    )
    for i, v in enumerate(ints):
        k.store(out + 8 * i, k.cast("trunc", v, vec(I8, 8)))
    k.store(out + X_SCALE, scale)
    k.store(out + X_SUM, scale * k.cast("sitofp", total, F32))


def load_block(k: Kernel, x: Val) -> list[Val]:
    """32 float32 as four x8 vectors."""
    return [k.load(x + 32 * i, F32X8) for i in range(BLOCK // 8)]


@kernel("x out m k xs os")
def quantise(k: Kernel) -> None:
    """out[m] = quantised rows of x[m, k]."""
    x, out, m, columns, xs, os = k.words("x out m k xs os")
    rows, blocks = k.grid(m, columns // BLOCK)
    for r in k.loop(*rows):
        for b in k.loop(*blocks):
            block = load_block(k, x + xs * r + b * (BLOCK * 4))
            quantise_block(k, block, out + os * r + b * X_BLOCK)


__all__ = ["load_block", "quantise", "quantise_block"]
