"""Images between whose pixels new ones are put: bilinear upscaling, by tables of neighbours.

Legend: rows and columns of the result; height and width of the source; s images.
"""

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import (
    F32,
    F32X8,
    I32,
    I32X8,
    I64,
    PTR,
    Kernel,
    Val,
    kernel,
    vec,
)
from ggraph.backends.cpu.kernels.nest import LANES


def _picked(k: Kernel, row: Val, table: Val, left: Val) -> Val:
    """The pixels of a row that the table's next eight entries name; those beyond `left` are 0."""
    lanes = k.intrinsic(
        "llvm.masked.load.v8i32.p0", I32X8, k.pointer(table), I32(1), words.tail_mask(k, left),
        k.const(0, I32X8),
    )  # fmt: skip
    at = k.splat(row, LANES) + k.cast("sext", lanes, vec(I64, LANES)) * 4
    places = Val(k, k.b.inttoptr(at.v, vec(PTR, LANES)))
    name = "llvm.masked.gather.v8f32.v8p0"
    return k.intrinsic(name, F32X8, places, I32(4), words.tail_mask(k, left), k.const(0.0, F32X8))


@kernel("x y images height width rows columns above below down left right across")
def enlarge(k: Kernel) -> None:
    """Each result from the four pixels about it: above and below first, then left and right."""
    x, y, images, height, width, rows, columns = k.words("x y images height width rows columns")
    above, below, down, left, right, across = k.words("above below down left right across")
    for item in k.share(images * rows):
        image, r = x + item // rows * height * width * 4, item % rows
        one, two = (
            image + k.cast("sext", k.load(t + r * 4, I32), I64) * width * 4 for t in (above, below)
        )
        way = k.splat(k.load(down + r * 4, F32), LANES)
        for c in k.loop(0, columns, LANES):
            some, sides = columns - c, []
            for table in (left, right):
                a, b = (_picked(k, row, table + c * 4, some) for row in (one, two))
                sides.append(a * (1.0 - way) + b * way)
            over = words.load_tail(k, across + c * 4, some)
            value = sides[0] * (1.0 - over) + sides[1] * over
            words.store_tail(k, y + (item * columns + c) * 4, value, some)
