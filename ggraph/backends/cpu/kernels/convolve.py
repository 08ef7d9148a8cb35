"""Convolution with packed kernels: y[n, o, p] = sum over columns c of W[o, c] * x[place of p, c].

As a product of matrices (`matmul.py`), but a row of x is not laid out: the place of an output in
the image, and that of a column in the place, are found by strides. A thread takes tiles of outputs
for a chunk of places; results are turned, since an output's places lie side by side.

Legend: n outputs, k columns (i channels, h rows and w columns of a kernel), m places of an image,
across of them in a row; strides in bytes: xn of an image, xr and xc of places, si, sh and sw of
columns.
"""

from collections.abc import Iterator
from functools import partial

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import Kernel, Val, kernel
from ggraph.backends.cpu.kernels.blocks import ahead
from ggraph.backends.cpu.kernels.float_sums import FLOAT_AHEAD, FLOAT_ROWS, float_sums
from ggraph.backends.cpu.kernels.passes import floats, in_passes, of_height
from ggraph.backends.cpu.kernels.tiles import ALL_LAYOUTS, FloatLayout

ARGS = "w x y n k images m across i h width xn xr xc si sh sw"
CHUNK = 64  # places that a thread takes at a time


def _columns(k: Kernel) -> Iterator[tuple[Val, Val]]:
    """Every column, with its place in bytes."""
    channels, h, w, si, sh, sw = k.words("i h width si sh sw")
    for i in k.loop(0, channels):
        for r in k.loop(0, h):
            first, place = (i * h + r) * w, i * si + r * sh
            for c in k.loop(0, w):
                yield first + c, place + c * sw


def _starts(k: Kernel, image: Val, first: Val, count: int) -> list[Val]:
    """Where `count` places from `first` on begin."""
    across, xr, xc = k.words("across xr xc")
    row, column = first // across, first % across
    starts = []
    for _ in range(count):
        starts.append(k.opaque(image + row * xr + column * xc))
        over = column + 1 >= across
        row, column = k.select(over, row + 1, row), k.select(over, k.same(0, row), column + 1)
    return starts


def _write(k: Kernel, layout: FloatLayout, home: Val, y: Val, left: Val, places: Val) -> None:
    """The sums of the places of a chunk for the tile's outputs, `left` of which there are: each
    output's places lie side by side, a page or more from the next one's."""
    lanes, step, width = k.isa.lanes, k.arg("m") * 4, layout.tile * 4
    for h in k.loop(0, k.minimum(left, layout.tile), lanes):
        for p in k.loop(0, places, lanes):
            rows = [k.load(home + (p + r) * width + h * 4, floats(k)) for r in range(lanes)]
            at, outputs, rest = y + step * h + p * 4, left - h, places - p
            whole = (rest >= lanes) & (outputs >= lanes)
            with k.if_else(whole) as (all_of_it, part):
                with all_of_it:
                    for j, value in enumerate(words.turned(k, rows)):
                        k.store(at + step * j, value)
                with part:
                    for j, value in enumerate(words.turned(k, rows)):
                        with k.when(outputs > j):
                            words.store_tail(k, at + step * j, value, rest)


def _chunk(k: Kernel, layout: FloatLayout, home: Val, image: Val, t: Val, chunk: Val) -> None:
    """Tile `t` for a chunk of the places of an image."""
    w, x, y, n, columns, m, xn = k.words("w x y n k m xn")
    tile = w + t * (columns * (layout.tile * layout.element_bytes))
    begin = chunk * CHUNK
    most, places = FLOAT_ROWS[k.isa.lanes], k.minimum(m - begin, CHUNK)
    for first, rows in in_passes(k, most, places):
        for count in of_height(k, rows, most):
            starts = _starts(k, x + image * xn, begin + first, count)
            own = home + first * (layout.tile * 4)
            numbers = ((c, [s + place for s in starts]) for c, place in _columns(k))
            float_sums(k, layout, own, tile, count, numbers, ahead(k, FLOAT_AHEAD))
    output = image * n + t * layout.tile
    _write(k, layout, home, y + (output * m + begin) * 4, n - t * layout.tile, places)


def _build(k: Kernel, layout: FloatLayout) -> None:
    n, images, m = k.words("n images m")
    home = k.scratch(CHUNK * layout.tile * 4)
    tiles, chunks = (n + (layout.tile - 1)) // layout.tile, (m + (CHUNK - 1)) // CHUNK
    for item in k.share(images * tiles * chunks):
        rest = item // chunks
        _chunk(k, layout, home, rest // tiles, rest % tiles, item % chunks)


for _layout in ALL_LAYOUTS:
    if isinstance(_layout, FloatLayout):
        kernel(ARGS, name="convolve_" + _layout.name)(partial(_build, layout=_layout))
