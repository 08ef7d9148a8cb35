"""Products of one row of x, which memory bounds: a thread reads at several places at once.

What follows a place is asked for by the processor itself, too, but only so many lines of a page at
a time; and every place is in another page. A thread's tiles are cut into parts, of which each has
its place; one block of each part is met in turn. Every tile's sums are formed in the order in which
one tile alone forms them.

Legend: apart: bytes between two places; each: tiles of a part, of which the last may have fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ggraph.backends.cpu.blocks import Block, ask_ahead
from ggraph.backends.cpu.passes import homes
from ggraph.backends.cpu.simd import Kernel, Val
from ggraph.backends.cpu.sums import add_block
from ggraph.backends.cpu.tiles import BLOCK, HALF, TILE, X_BLOCK, Layout

PLACES = 4  # eight may share sets of the nearest cache, and are then slower than one
AHEAD = 512  # bytes between use and prefetch at each place; 384 to 768 are alike
SUMS = TILE * 4  # bytes of a tile's sums


@dataclass(frozen=True)
class Places:
    """Tiles of `tile_bytes`, and where the sums of a tile of each place wait."""

    k: Kernel
    layout: Layout
    tile_bytes: Val
    home: Val

    @staticmethod
    def of(k: Kernel, layout: Layout, tile_bytes: Val) -> "Places | None":
        """On the stack; where one place is as good, or nobody has measured it, none."""
        if not k.isa.bypasses or k.isa.lanes > HALF:
            return None
        return Places(k, layout, tile_bytes, k.scratch(PLACES * SUMS))

    def run(self, tiles: Val, count: Val, row: Val, write: Callable[[Val, Val], None]) -> None:
        """A row of x with `count` tiles; `write` is given the number of each, and its sums."""
        k = self.k
        each, start = (count + (PLACES - 1)) // PLACES, k.opaque(row)
        for i in k.loop(0, each):
            some = (count - i + (each - 1)) // each  # places that have as many tiles
            for s in k.loop(0, some):
                for held in homes(k, self.home + s * SUMS, TILE, 1):
                    held.value = 0.0
            self._tile_of_each(tiles + i * self.tile_bytes, some, each * self.tile_bytes, start)
            for s in k.loop(0, some):
                write(s * each + i, self.home + s * SUMS)

    def _tile_of_each(self, tile: Val, some: Val, apart: Val, row: Val) -> None:
        """The tile at `tile`, and those at the same place of the other parts."""
        k, layout = self.k, self.layout
        for i in k.loop(0, k.arg("k") // (BLOCK * layout.blocks)):
            for j in k.loop(0, layout.blocks):
                x = row + (i * layout.blocks + j) * X_BLOCK
                for s in k.loop(0, some):
                    block = Block(k, layout, tile + i * layout.run_bytes + s * apart, j)
                    ask_ahead(block, AHEAD)
                    add_block(k, block, [x], homes(k, self.home + s * SUMS, TILE, 1))
