"""Matrices that are computed, laid out for products in every run: `lay_<type>`.

The tiles are those of float32 matrices (`tiles.py`). Where a row's columns lie side by side, eight
rows and eight columns at a time are turned in registers; else columns are copied as they lie.

Legend: n rows, k columns; strides in bytes: sb of matrices, sn of rows, sk of columns; ob bytes of
a matrix in tiles.
"""

from functools import partial

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I64, Kernel, Val, kernel
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, FLOATS, number, numbers
from ggraph.backends.cpu.kernels.tiles import HALF, LAYOUTS
from ggraph.dtype import F32

ARGS = "raw out n k count sb sn sk ob"
TILE = LAYOUTS[F32].tile
LINE = TILE * 4  # bytes of a tile's column


def _rows(k: Kernel, kind: str, tile: Val, source: Val, left: Val) -> None:
    """A tile of rows whose columns lie side by side; rows beyond the last repeat it."""
    columns, sn = k.words("k sn")
    size, whole = ELEMENT_BYTES[kind], k.arg("k") // HALF * HALF
    for h in range(0, TILE, HALF):
        lanes = [k.minimum(k.const(h + j, I64), left - 1) for j in range(HALF)]
        rows = [k.opaque(source + lane * sn) for lane in lanes]
        for c in k.loop(0, whole, HALF):
            block = words.turned(k, [numbers(k, kind, row + c * size) for row in rows])
            for j, value in enumerate(block):
                k.store(tile + (c + j) * LINE + h * 4, value)
        for c in k.loop(whole, columns):
            for j, row in enumerate(rows):
                k.store(tile + c * LINE + (h + j) * 4, number(k, kind, row + c * size))


def _columns(k: Kernel, kind: str, tile: Val, source: Val, left: Val) -> None:
    """A tile of rows that lie in any way: column by column."""
    columns, sn, sk = k.words("k sn sk")
    size = ELEMENT_BYTES[kind]
    beside = sn.eq(size) & (left >= TILE)
    for c in k.loop(0, columns):
        at, to = source + c * sk, tile + c * LINE
        with k.if_else(beside) as (vectors, singly):
            with vectors:
                for h in range(0, TILE, HALF):
                    k.store(to + h * 4, numbers(k, kind, at + h * size))
            with singly:
                for lane in k.loop(0, k.minimum(left, TILE)):
                    k.store(to + lane * 4, number(k, kind, at + lane * sn))


def _build(k: Kernel, kind: str) -> None:
    raw, out, n, columns, count = k.words("raw out n k count")
    sb, sn, sk, ob = k.words("sb sn sk ob")
    tiles = (n + (TILE - 1)) // TILE
    for item in k.share(count * tiles):
        i, t = item // tiles, item % tiles
        tile = out + i * ob + t * columns * LINE
        source, left = raw + i * sb + t * TILE * sn, n - t * TILE
        with k.if_else(sk.eq(ELEMENT_BYTES[kind])) as (rows, others):
            with rows:
                _rows(k, kind, tile, source, left)
            with others:
                _columns(k, kind, tile, source, left)


for _kind in FLOATS:
    kernel(ARGS, name="lay_" + _kind)(partial(_build, kind=_kind))
