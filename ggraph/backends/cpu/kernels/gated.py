"""out[m, n] = quantised rows of a gated unit of x . W^T and x . V^T, of many rows.

Sums of both products for some columns of some rows lie beside each other in the second cache, and
become 8 bits from there: neither product is written to memory, or read again.

Legend: m rows of x, n outputs of either matrix, k inputs; a pair is two tiles of each matrix, which
make a block of 32 columns; gates are sums of W's, ups of V's.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import F32, I64, Kernel, Num, Val, kernel, vec
from ggraph.backends.cpu.kernels import amx, opened
from ggraph.backends.cpu.kernels.blocks import ahead
from ggraph.backends.cpu.kernels.elementwise import UNITS, Emit2
from ggraph.backends.cpu.kernels.matmul import AHEAD, quantised_pass, tile_bytes
from ggraph.backends.cpu.kernels.opened import GROUP_ROWS, SIDE, Group
from ggraph.backends.cpu.kernels.passes import ROWS, Rows, in_passes, of_height, rows_from
from ggraph.backends.cpu.kernels.quantise import in_fours
from ggraph.backends.cpu.kernels.sums import add_block
from ggraph.backends.cpu.kernels.tiles import ALL_LAYOUTS, BLOCK, TILE, X_BLOCK, Layout, Packed
from ggraph.backends.cpu.runtime.taking import taken

ARGS = "w v x out n k m xs os"
PAIR = BLOCK // TILE  # tiles of a matrix in a pair


def at_once(isa: Isa, gate: Packed, up: Packed, rows: int) -> bool:
    """Whether a kernel here makes a gated unit of so many rows faster than one product after the
    other: both matrices packed alike, and rows that meet some of their tiles in one go."""
    if not isinstance(gate, Layout) or gate is not up:
        return False
    if amx.takes(isa, gate):
        return rows >= opened.MANY
    return opened.opens(isa, gate) and rows >= opened.least(isa)


def _behind(first: Val, i: Val) -> Val:
    return first + i


class Tiles:
    """Gates, then ups, of the tiles of some pairs: from pair `first` on, `size` bytes each; `base`
    bytes behind either matrix. `unit` is what becomes of a gate and an up."""

    def __init__(
        self, k: Kernel, unit: Emit2, size: Val, first: Val, stop: Val, base: Num = 0
    ) -> None:
        self.k, self.unit, self.size, self.first, self.base = k, unit, size, first, base
        self.pairs, self.each = stop - first, (stop - first) * PAIR

    @property
    def count(self) -> Val:
        """How many there are."""
        return self.each * 2

    def at(self, i: Val) -> Val:
        """Address of number i."""
        k, up = self.k, i >= self.each
        matrix = k.select(up, k.arg("v"), k.arg("w"))
        own = self.first * PAIR + k.select(up, i - self.each, i)
        return matrix + self.base + own * self.size

    def write(self, home: Val, apart: int, rows: Val, row_of: Callable[[Val], Val]) -> None:
        """The results of some rows, by number; sums of tile i lie at `home` + i * `apart`."""
        k, lanes, sides = self.k, self.k.isa.lanes, (home, home + self.each * apart)
        for r in k.loop(0, rows):
            out = k.arg("out") + k.arg("os") * row_of(r) + self.first * X_BLOCK

            def numbers(b: Val, r: Val = r) -> list[Val]:
                at = b * (PAIR * apart) + r * (TILE * 4)
                gates, ups = (
                    [
                        k.load(side + at + (i * apart + lane * 4), vec(F32, lanes))
                        for i in range(PAIR)
                        for lane in range(0, TILE, lanes)
                    ]
                    for side in sides
                )
                return [self.unit(k, g, u) for g, u in zip(gates, ups, strict=True)]

            in_fours(k, (k.const(0, I64), self.pairs), numbers, out)


def _high(k: Kernel, unit: Emit2, layout: Layout, size: Val, pairs: Val) -> None:
    """By AMX: the last height is filled up with the last row."""
    m, most = k.arg("m"), amx.TILES // (2 * PAIR)
    home = k.scratch(amx.MOST * amx.TILES * TILE * 4)
    amx.configure_for(k, layout)
    tiled = amx.Tiled.of(k, layout, home)
    begin, end = k.part(pairs)
    for pair in k.loop(begin, end, most):
        tiles = Tiles(k, unit, size, pair, k.minimum(pair + most, end))
        for first in k.loop(k.const(0, I64), m, amx.MOST):
            rows = k.minimum(m - first, amx.MOST)

            def row_at(i: Val, first: Val = first) -> Val:
                return k.arg("x") + k.arg("xs") * k.minimum(first + i, m - 1)

            heights = (rows + (amx.HEIGHT - 1)) // amx.HEIGHT
            tiled.run(heights, tiles.at, tiles.count, row_at)
            tiles.write(home, amx.APART, rows, partial(_behind, first))
    amx.release(k)


def _opened(k: Kernel, unit: Emit2, layout: Layout, size: Val, pairs: Val) -> None:
    """With blocks that are opened for a group of rows."""
    group = Group.of(k, layout, ahead(k, AHEAD), add_block, 2 * SIDE)
    for pair, stop in opened.sides(k, pairs, SIDE // PAIR):
        tiles = Tiles(k, unit, size, pair, stop)
        for first, rows in in_passes(k, GROUP_ROWS, k.arg("m")):
            row_at = rows_from(k, k.arg("x") + k.arg("xs") * first)
            group.run(tiles.at, tiles.count, rows, row_at)
            tiles.write(group.sums, opened.APART, rows, partial(_behind, first))


def _plain(k: Kernel, unit: Emit2, layout: Layout, size: Val, pairs: Val) -> None:
    """Pair by pair, a few rows at a time."""
    most = ROWS[k.isa.lanes]
    apart = most * TILE * 4
    home, run = k.scratch(2 * PAIR * apart), quantised_pass(k, layout)
    for pair in taken(k, pairs):
        tiles = Tiles(k, unit, size, pair, pair + 1)
        for first, rows in in_passes(k, most, k.arg("m")):
            x = k.arg("x") + k.arg("xs") * first
            for i in k.loop(0, tiles.count):
                for count in of_height(k, rows, most):
                    own = Rows.evenly(k, x, k.arg("xs"), count)
                    run(home + i * apart, tiles.at(i), own)
            tiles.write(home, apart, rows, partial(_behind, first))


def kernel_name(family: str, unit: str, layout: Packed) -> str:
    """What the kernel of a unit and a layout is called; chosen experts' are another family."""
    return f"{family}{unit}_{layout.name}"


def _register(unit: str, layout: Layout) -> None:
    @kernel(ARGS, name=kernel_name("gated_", unit, layout))
    def build(k: Kernel) -> None:
        size, pairs = tile_bytes(k, layout), k.arg("n") // BLOCK
        few = _opened if opened.opens(k.isa, layout) else _plain
        walk = _high if amx.takes(k.isa, layout) else few
        walk(k, UNITS[unit], layout, size, pairs)


PACKED = [a for a in ALL_LAYOUTS if isinstance(a, Layout)]
for _unit, _layout in product(UNITS, PACKED):
    _register(_unit, _layout)
