"""Products of few rows of x, which memory bounds: a thread reads at several places at once.

What follows a place is asked for by the processor itself, too, but only so many lines of a page at
a time; and every place is in another page. A thread's tiles are cut into parts, of which each has
its place; one block of each part is met in turn. Every tile's sums are formed in the order in which
one tile alone forms them.

Legend: apart: bytes between two places; each: tiles of a part, of which the last may have fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ggraph.backends.cpu.codegen.simd import Kernel, Val
from ggraph.backends.cpu.kernels.blocks import Block, ask_ahead
from ggraph.backends.cpu.kernels.float_sums import float_sums
from ggraph.backends.cpu.kernels.passes import Held, Rows, homes
from ggraph.backends.cpu.kernels.sums import add_block
from ggraph.backends.cpu.kernels.tiles import BLOCK, HALF, X_BLOCK, FloatLayout, Packed

PLACES = 4
# Bytes between use and prefetch at each place. 512 to 1024 are alike on Zen 3 and 4; 1024 are a
# third faster on Zen 5 without its 512 bits, and 2048 slower on Zen 3 and, by 4 %, on Zen 4; on
# Intel's 1024 to 2048 are alike.
AHEAD = 1024
TURN = 512  # bytes of plain numbers that are met of a place in turn; 2048 are a tenth slower


@dataclass(frozen=True)
class Places:
    """Tiles of `tile_bytes`, met by at most so many rows, and where the sums of a tile of each
    place wait."""

    k: Kernel
    layout: Packed
    tile_bytes: Val
    most: int
    home: Val

    @staticmethod
    def of(k: Kernel, layout: Packed, tile_bytes: Val, most: int) -> "Places | None":
        """On the stack; where one place is as good, as with 512 bits on Zen 5, none. More than one
        row was not measured with 256 bits on these."""
        if k.isa.bypasses and k.isa.lanes > HALF:
            return None
        most = 1 if k.isa.bypasses else most
        home = k.scratch(PLACES * most * layout.tile * 4)
        return Places(k, layout, tile_bytes, most, home)

    def run(self, tiles: Val, count: Val, rows: Rows, write: Callable[[Val, Val], None]) -> None:
        """Rows of x with `count` tiles; `write` is given the number of each, and its sums."""
        k = self.k
        # An odd number of tiles: whole pages apart, places share sets of the nearest cache.
        each = (count + (PLACES - 1)) // PLACES | 1
        meet = self._columns if isinstance(self.layout, FloatLayout) else self._blocks
        for i in k.loop(0, each):
            some = (count - i + (each - 1)) // each  # places that have as many tiles
            for s in k.loop(0, some):
                for held in self._held(s, rows):
                    held.value = 0.0
            meet(tiles + i * self.tile_bytes, some, each * self.tile_bytes, rows)
            for s in k.loop(0, some):
                write(s * each + i, self._home(s))

    def _home(self, s: Val) -> Val:
        return self.home + s * (self.most * self.layout.tile * 4)

    def _held(self, s: Val, rows: Rows) -> list[Held]:
        return homes(self.k, self._home(s), self.layout.tile, rows.count)

    def _blocks(self, tile: Val, some: Val, apart: Val, rows: Rows) -> None:
        """The tile at `tile`, and those at the same place of the other parts."""
        k, layout = self.k, self.layout
        assert not isinstance(layout, FloatLayout)
        for i in k.loop(0, k.arg("k") // (BLOCK * layout.blocks)):
            for j in k.loop(0, layout.blocks):
                x = rows.at((i * layout.blocks + j) * X_BLOCK)
                for s in k.loop(0, some):
                    block = Block(k, layout, tile + i * layout.run_bytes + s * apart, j)
                    ask_ahead(block, AHEAD, near=True)
                    add_block(k, block, x, self._held(s, rows))

    def _columns(self, tile: Val, some: Val, apart: Val, rows: Rows) -> None:
        """The same of plain numbers, some columns at a time."""
        k, layout = self.k, self.layout
        assert isinstance(layout, FloatLayout)
        turn = TURN // (layout.tile * layout.element_bytes)
        for c in k.loop(0, k.arg("k"), turn):
            end = k.minimum(c + turn, k.arg("k"))
            for s in k.loop(0, some):
                columns = ((i, rows.at(i * 4)) for i in k.loop(c, end))
                float_sums(
                    k, layout, self._home(s), tile + s * apart, rows.count, columns, AHEAD,
                    begun=True, near=True,
                )  # fmt: skip
