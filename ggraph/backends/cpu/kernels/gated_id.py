"""out[pair, n] = quantised rows of a gated unit of x . W^T and x . V^T of each pair's expert.

As in `gated.py`, sums of both products become 8 bits from the second cache; as in `matmul_id.py`,
pairs of an expert meet its tiles together.

Legend: as there; `es` bytes from an expert's matrix to the next one's, of W as of V.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from ggraph.backends.cpu.codegen.simd import Kernel, Val
from ggraph.backends.cpu.kernels import amx, opened
from ggraph.backends.cpu.kernels.elementwise import UNITS, Emit2
from ggraph.backends.cpu.kernels.gated import PACKED, PAIR, Tiles, kernel_name
from ggraph.backends.cpu.kernels.matmul import Walk, register
from ggraph.backends.cpu.kernels.matmul_id import (
    HIGH,
    MOST_ROWS,
    SORTED,
    Chosen,
    Doing,
    Part,
    each_expert,
    expert_at,
    expert_passes,
    high_rows,
    opened_rows,
    pairs_in_passes,
)
from ggraph.backends.cpu.kernels.tiles import BLOCK, TILE

ARGS = "w v x out ids n k m u xs xu os es experts"


def _walk(unit: Emit2, k: Kernel, walk: Walk) -> None:
    pairs = k.arg("n") // BLOCK
    most = (opened.SIDE if walk.tiled is None else amx.TILES) // (2 * PAIR)
    pieces = (pairs + (most - 1)) // most
    each = (pairs + (pieces - 1)) // pieces
    walk = replace(walk, called=True)
    few = partial(_few_rows, k, unit, walk, k.scratch(2 * PAIR * _apart(walk)))
    least = SORTED + 1  # never
    if walk.tiled is not None:
        least = HIGH
    elif walk.opened is not None:
        least = opened.least(k.isa)
    each_expert(k, Doing(pairs, each, least, partial(_many_rows, k, unit, walk), few))


def _apart(walk: Walk) -> int:
    """Bytes between the sums of two tiles of few rows."""
    return walk.rows * TILE * 4


def _tiles(k: Kernel, unit: Emit2, walk: Walk, pairs: Part, own: Chosen) -> Tiles:
    return Tiles(k, unit, walk.tile_bytes, *pairs, expert_at(k, own))


def _many_rows(k: Kernel, unit: Emit2, walk: Walk, pairs: Part, own: Chosen) -> Iterator[Val]:
    """Many pairs of an expert with some of its tiles, none of which is left."""
    tiles = _tiles(k, unit, walk, pairs, own)
    if walk.tiled is not None:
        for some in high_rows(k, walk.tiled, own, tiles.at, tiles.count):
            tiles.write(walk.tiled.home, amx.APART, some.count, some.pair)
    elif walk.opened is not None:
        for some in opened_rows(k, walk.opened, own, tiles.at, tiles.count):
            tiles.write(walk.opened.sums, opened.APART, some.count, some.pair)
    yield from ()


def _few_rows(k: Kernel, unit: Emit2, walk: Walk, home: Val, pairs: Part, own: Chosen) -> None:
    """Pairs of one expert with some of its tiles, a few at a time."""
    for pair in k.loop(*pairs):
        tiles = _tiles(k, unit, walk, (pair, pair + 1), own)
        for some in pairs_in_passes(k, walk.rows, own):
            for i in k.loop(0, tiles.count):
                here = replace(walk, home=home + i * _apart(walk))
                expert_passes(k, here, tiles.at(i), some)
            tiles.write(home, _apart(walk), some.count, some.pair)


for (_name, _unit), _layout in product(UNITS.items(), PACKED):
    _kernel = kernel_name("gated_id_", _name, _layout)
    register(_kernel, ARGS, _layout, partial(_walk, _unit), most=MOST_ROWS, at_places=0)
