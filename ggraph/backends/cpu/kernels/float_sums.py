"""What columns of a matrix of plain numbers add to the sums of some rows of floats.

Legend: count rows handled at once; a part is what one vector holds of a tile's outputs.
"""

from collections.abc import Iterable, Sequence

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import Kernel, Num, Val
from ggraph.backends.cpu.kernels.blocks import prefetch
from ggraph.backends.cpu.kernels.elements import numbers
from ggraph.backends.cpu.kernels.passes import floats, homes
from ggraph.backends.cpu.kernels.sums import parts_of
from ggraph.backends.cpu.kernels.tiles import HALF, FloatLayout

FLOAT_ROWS = {8: 3, 16: 8}  # of x per pass, by lanes
FLOAT_AHEAD = 1024  # as `blocks.ahead` takes it: their lines are used up faster than codes'

Columns = Iterable[tuple[Val, Sequence[Val]]]  # numbers of them, each with the rows' addresses


def float_sums(
    k: Kernel, layout: FloatLayout, home: Val, tile: Val, count: int, columns: Columns,
    ahead: Num, *, begun: bool = False, near: bool = False,
) -> None:  # fmt: skip
    """Sums of the products of `tile` with `count` rows, in registers, then in `home`, where they
    may have `begun`; what lies `ahead` bytes further is asked for, as by `prefetch`."""
    step, parts = layout.element_bytes, parts_of(k, layout.tile)
    waiting = homes(k, home, layout.tile, count)
    values = [h.value for h in waiting] if begun else [k.const(0.0, floats(k))] * len(waiting)
    sums = [k.var(v) for v in values]
    full = k.isa.is_x86 and k.isa.lanes == HALF and count == FLOAT_ROWS[HALF]
    for c, places in columns:
        at = tile + c * (layout.tile * step)
        prefetch(k, at + ahead, layout.tile * step, near=near)
        ones = [words.broadcast(k, place, k.isa.lanes) for place in places]
        for p in parts:
            w = numbers(k, layout.name, at + p * k.isa.lanes * step, k.isa.lanes)
            own = sums[p * count :][:count]
            new = [words.fma(k, w, one, s.value) for s, one in zip(own, ones, strict=True)]
            if full:  # no register is left for another w
                new = k.settle(new)
            for total, value in zip(own, new, strict=True):
                total.value = value
            k.keep_order()
    for held, total in zip(waiting, sums, strict=True):
        held.value = total.value
