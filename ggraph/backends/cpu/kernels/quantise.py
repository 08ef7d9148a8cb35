"""Activations to int8 blocks, alone and fused with what comes before.

A quantised row is a list of blocks of 48 bytes: 32 codes, their scale, scale * sum of codes (the
weights' minimums multiply it), and four sums of codes as int16 (what products lift weights by is
taken off with them): of each half those in the first two of every four columns, then the others.
scale = max |x| / 127, as ggml's Q8 types, but kept in float32.

Legend: m rows, k columns.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, I8, I16, Kernel, Val, kernel, vec
from ggraph.backends.cpu.codegen.words import FOLDED
from ggraph.backends.cpu.kernels.tiles import BLOCK, X_BLOCK, X_SCALE, X_SUM, X_SUMS


def quantise_blocks(k: Kernel, blocks: Sequence[Sequence[Val]], out: Val) -> None:
    """Store up to four times 32 numbers, in vectors of one width, as blocks that begin at `out`.
    What is found across a block's lanes is found for four blocks at once."""
    given = (list(blocks) * FOLDED)[:FOLDED]
    lanes, half = blocks[0][0].v.type.count, len(blocks[0]) // 2
    sizes = [reduce(k.maximum, [words.size_bits(k, v) for v in x]) for x in given]
    largest = k.cast("bitcast", words.folded4(k, sizes, k.maximum), vec(F32, FOLDED))
    scales = largest * (1.0 / 127.0)
    inverses = k.select(largest > 0.0, k.const(127.0, largest.v.type) / largest, 0.0)
    whole = [
        [words.rounded(k, v * k.splat(k.lane(inverses, i), lanes)) for v in x]
        for i, x in enumerate(given)
    ]
    halves = [(reduce(add, x[:half]), reduce(add, x[half:])) for x in whole]
    sums = words.fours(k, [words.neighbours(k, a, b, add) for a, b in halves], add)
    whole_sums = reduce(
        add, [k.shuffle(sums, sums, range(i, FOLDED * FOLDED, FOLDED)) for i in range(FOLDED)]
    )
    products = scales * k.cast("sitofp", whole_sums, scales.v.type)
    short = k.cast("trunc", sums, vec(I16, FOLDED * FOLDED))
    for i, ints in enumerate(whole[: len(blocks)]):
        at = out + i * X_BLOCK
        for j, v in enumerate(ints):
            k.store(at + lanes * j, k.cast("trunc", v, vec(I8, lanes)))
        for place, found in ((X_SCALE, scales), (X_SUM, products)):
            k.store(at + place, k.lane(found, i))
        k.store(at + X_SUMS, k.shuffle(short, short, range(FOLDED * i, FOLDED * i + FOLDED)))


def in_fours(
    k: Kernel, part: tuple[Val, Val], numbers: Callable[[Val], Sequence[Val]], out: Val
) -> None:
    """Quantise a part of a row's blocks, first and end, to the row at `out`."""
    first, end = part
    whole = first + (end - first) // FOLDED * FOLDED
    for b in k.loop(first, whole, FOLDED):
        quantise_blocks(k, [numbers(b + i) for i in range(FOLDED)], out + b * X_BLOCK)
    for b in k.loop(whole, end):
        quantise_blocks(k, [numbers(b)], out + b * X_BLOCK)


def largest_size(k: Kernel, x: Sequence[Val]) -> Val:
    """The largest absolute value in vectors of one width; not a number where one is none."""
    return k.cast(
        "bitcast", words.hmax(k, reduce(k.maximum, [words.size_bits(k, v) for v in x])), F32
    )


def load_block(k: Kernel, x: Val, lanes: int = 8) -> list[Val]:
    """32 float32 in vectors of `lanes`."""
    return [k.load(x + 4 * i, vec(F32, lanes)) for i in range(0, BLOCK, lanes)]


@kernel("x out m k xs os")
def quantise(k: Kernel) -> None:
    """out[m] = quantised rows of x[m, k]."""
    x, out, m, columns, xs, os = k.words("x out m k xs os")
    rows, blocks = k.grid(m, columns // BLOCK)
    for r in k.loop(*rows):
        row = x + xs * r

        def numbers(b: Val, row: Val = row) -> list[Val]:
            return load_block(k, row + b * (BLOCK * 4), k.isa.lanes)

        in_fours(k, blocks, numbers, out + os * r)
