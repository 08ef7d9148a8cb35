"""Triangular systems, row by row, eight right sides at a time.

Legend: n unknowns, k right sides, count systems; all without gaps.
"""

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32X8, I64, Kernel, Val, kernel
from ggraph.backends.cpu.kernels.nest import LANES, SUMS


def _known(k: Kernel, row: Val, y: Val, i: Val, left: Val) -> Val:
    """What the unknowns before i give to row i, for `left` right sides from `y` on."""
    step = k.arg("k") * 4
    sums = [k.var(0, F32X8) for _ in range(SUMS)]

    def add(to: int, j: Val) -> None:
        found = words.load_tail(k, y + j * step, left)
        weight = words.broadcast(k, row + j * 4)
        sums[to].value = words.fma(k, weight, found, sums[to].value)

    whole = i // SUMS * SUMS
    for j in k.loop(0, whole, SUMS):
        for s in range(SUMS):
            add(s, j + s)
    for j in k.loop(whole, i):
        add(0, j)
    a, b, c, d = (s.value for s in sums)
    return (a + b) + (c + d)


@kernel("a b y n k count")
def solve_tri(k: Kernel) -> None:
    """x with a x = b."""
    a, b, y, n, columns, count = k.words("a b y n k count")
    pieces, step = (columns + (LANES - 1)) // LANES, columns * 4
    for item in k.share(count * pieces):
        system, first = item // pieces, item % pieces * LANES
        left = k.minimum(columns - first, k.const(LANES, I64))
        sides, found = (at + system * n * step + first * 4 for at in (b, y))
        for i in k.loop(0, n):
            row = a + (system * n + i) * n * 4
            rest = words.load_tail(k, sides + i * step, left) - _known(k, row, found, i, left)
            words.store_tail(k, found + i * step, rest / words.broadcast(k, row + i * 4), left)
