"""What one block of a packed matrix adds to the sums of some rows of x.

Legend: M rows handled at once; a part is what one vector holds of the block's outputs (8 of a
tile's, or all 16 where vectors have 512 bits); sub: which part of a block's columns has a scale.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Protocol

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import Kernel, Num, Val
from ggraph.backends.cpu.kernels.blocks import Weights, lifted
from ggraph.backends.cpu.kernels.dots import Dot, widened
from ggraph.backends.cpu.kernels.passes import floats
from ggraph.backends.cpu.kernels.tiles import (
    GROUP,
    GROUPS,
    X_HALF,
    X_SCALE,
    X_SUM,
    X_SUMS,
    Layout,
)  # fmt: skip


class Sum(Protocol):
    """A vector of float32 that is added to, in registers or in memory."""

    @property
    def value(self) -> Val:
        """As it is now."""
        ...

    @value.setter
    def value(self, new: Num) -> None: ...


def parts_of(k: Kernel, outputs: int) -> range:
    """Numbers of the parts."""
    return range(outputs // k.isa.lanes)


def _sums(k: Kernel, layout: Layout, x: Val, sub: int) -> Val:
    """Sums of a scale's activations by pairs of columns."""
    halves = (sub,) if layout.subs == 2 else (0, 1)
    return reduce(add, [words.broadcast2(k, x + X_SUMS + X_HALF * h, k.isa.lanes) for h in halves])


def _integer_sums(k: Kernel, block: Weights, rows: Sequence[Val], sub: int) -> list[Val]:
    """For each (part, row) the int32 sums of code products over one scale's columns."""
    layout, parts = block.layout, parts_of(k, block.outputs)
    zero = layout.zero if lifted(k, layout) else 0
    first = [_sums(k, layout, x, sub) if zero else None for x in rows]
    dots = [[Dot(k, layout.bits, zero, f) for f in first] for _ in parts]
    per_sub = GROUPS // layout.subs
    for group in range(sub * per_sub, (sub + 1) * per_sub):
        weights = [block.codes(group, p) for p in parts]
        for r, x in enumerate(rows):
            four = words.broadcast4(k, x + GROUP * group, k.isa.lanes)
            for p in parts:
                dots[p][r].step(weights[p], four)
        Dot.settle([dots[p][r] for p in parts for r in range(len(rows))])
        k.keep_order()
    return [dots[p][r].result() for p in parts for r in range(len(rows))]


def add_block(k: Kernel, block: Weights, rows: Sequence[Val], sums: Sequence[Sum]) -> None:
    """Add one block's products to the sums of every (part, row)."""
    kind, parts, lanes = floats(k), parts_of(k, block.outputs), k.isa.lanes
    for sub in range(block.layout.subs):
        ints = _integer_sums(k, block, rows, sub)
        scales = [block.scales(sub, p * lanes, lanes) for p in parts]
        totals = []
        for r, x in enumerate(rows):
            one = words.broadcast(k, x + X_SCALE, lanes)
            for p in parts:
                product = k.cast("sitofp", ints[p * len(rows) + r], kind)
                before = sums[p * len(rows) + r].value
                totals.append(words.fma(k, product, scales[p] * one, before))
            k.keep_order()
        if block.layout.stored_minimum:
            k.keep_order()
            totals = _less_minimums(k, block, rows, sub, totals)
        for i, total in enumerate(totals):
            sums[i % len(parts) * len(rows) + i // len(parts)].value = total


def _scaled_sum(k: Kernel, layout: Layout, x: Val, sub: int) -> Val:
    """The sum of a scale's activations, float32."""
    if layout.subs == 1:
        return words.broadcast(k, x + X_SUM, k.isa.lanes)
    total = widened(k, _sums(k, layout, x, sub), 1)
    return words.broadcast(k, x + X_SCALE, k.isa.lanes) * k.cast("sitofp", total, floats(k))


def _less_minimums(
    k: Kernel, block: Weights, rows: Sequence[Val], sub: int, totals: list[Val]
) -> list[Val]:
    """Totals of every (row, part) and what the minimums of a part of the columns add."""
    lanes = k.isa.lanes
    minimums = [block.minimums(sub, p * lanes, lanes) for p in parts_of(k, block.outputs)]
    sums = [_scaled_sum(k, block.layout, x, sub) for x in rows]
    n = len(minimums)
    return [words.fma(k, minimums[i % n], sums[i // n], total) for i, total in enumerate(totals)]
