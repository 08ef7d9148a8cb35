"""Activations to int8 blocks, alone and fused with what comes before.

A quantised row is a list of blocks of 44 bytes: 32 codes, their scale, scale * sum of codes (the
weights' minimums multiply it), and the sum of each half of the codes as int16 (what products lift
weights by is taken off with it). scale = max |x| / 127, as ggml's Q8 types, but kept in float32.

Legend: m rows, k columns.
"""

from collections.abc import Sequence
from functools import reduce

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import F32, I8, I16, I32, Kernel, Val, kernel, vec
from ggraph.backends.cpu.tiles import BLOCK, X_BLOCK, X_SCALE, X_SUM, X_SUMS


def quantise_block(k: Kernel, x: Sequence[Val], out: Val) -> None:
    """Store 32 numbers, in vectors of one width, as one block at `out`."""
    lanes = x[0].v.type.count
    largest = largest_size(k, x)
    scale = largest * (1.0 / 127.0)
    inverse = k.select(largest > 0.0, k.const(127.0, F32) / largest, 0.0)
    factor = k.splat(inverse, lanes)
    ints = [k.cast("fptosi", words.round_even(k, v * factor), vec(I32, lanes)) for v in x]
    half = len(ints) // 2
    sums = [
        k.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", I32, reduce(lambda a, b: a + b, part))
        for part in (ints[:half], ints[half:])
    ]
    for i, v in enumerate(ints):
        k.store(out + lanes * i, k.cast("trunc", v, vec(I8, lanes)))
    k.store(out + X_SCALE, scale)
    k.store(out + X_SUM, scale * k.cast("sitofp", sums[0] + sums[1], F32))
    for i, v in enumerate(sums):
        k.store(out + X_SUMS + 2 * i, k.cast("trunc", v, I16))


def largest_size(k: Kernel, x: Sequence[Val]) -> Val:
    """The largest absolute value in vectors of one width."""
    return words.hmax(k, reduce(k.maximum, [words.absolute(k, v) for v in x]))


def load_block(k: Kernel, x: Val, lanes: int = 8) -> list[Val]:
    """32 float32 in vectors of `lanes`."""
    return [k.load(x + 4 * i, vec(F32, lanes)) for i in range(0, BLOCK, lanes)]


@kernel("x out m k xs os")
def quantise(k: Kernel) -> None:
    """out[m] = quantised rows of x[m, k]."""
    x, out, m, columns, xs, os = k.words("x out m k xs os")
    rows, blocks = k.grid(m, columns // BLOCK)
    for r in k.loop(*rows):
        for b in k.loop(*blocks):
            block = load_block(k, x + xs * r + b * (BLOCK * 4), k.isa.lanes)
            quantise_block(k, block, out + os * r + b * X_BLOCK)


__all__ = ["largest_size", "load_block", "quantise", "quantise_block"]
