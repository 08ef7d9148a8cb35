"""What products share: how rows go by passes, where their sums wait, how they are written.

Legend: a part is what one vector holds of a tile's outputs.
"""

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import F32X8, Kernel, Val
from ggraph.backends.cpu.tiles import HALF


def next_rows(k: Kernel, most: int, left: Val) -> Val:
    """Rows of the next pass: as many as it can take, but the last two passes share alike."""
    alike = k.select(left <= 2 * most - 2, (left + 1) // 2, most)
    return k.select(left <= most, left, alike)


def homes(k: Kernel, home: Val, tile: int, count: int) -> list[Val]:
    """Addresses of the sums of each (part, row); a row's outputs are contiguous."""
    lanes = k.isa.lanes
    return [home + (r * tile + p * lanes) * 4 for p in range(tile // lanes) for r in range(count)]


def write_row(k: Kernel, tile: int, home: Val, y: Val, add: Val, left: Val) -> None:
    """Store a row's outputs of a tile at `y`, adding the residual at `add` unless that is 0."""
    for h in range(tile // HALF):
        value = k.var(k.load(home + h * HALF * 4, F32X8))
        at = h * HALF * 4
        rest = left - h * HALF
        with k.when(add.ne(0)):
            value.value = value.value + words.load_tail(k, add + at, rest)
        with k.if_else(rest >= HALF) as (whole, part):
            with whole:
                k.store(y + at, value.value)
            with part:
                words.store_tail(k, y + at, value.value, rest)
