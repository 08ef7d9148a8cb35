"""Row kernels whose steps hang together: running sums, orders, the greatest few.

Rows are float32, float16 or bfloat16; one thread does a row. NaN counts as the least value, of
equals the first comes first, as in `ggraph.ops.sort`. Legend: m rows, n columns, xs / ys row
strides in bytes.
"""

from functools import partial

from ggraph.backends.cpu.codegen.simd import (
    F32,
    F64,
    I32,
    I64,
    Kernel,
    Val,
    Var,
    kernel,
)  # fmt: skip
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, FLOATS, number, put


def _cumsum(k: Kernel, kind: str) -> None:
    x, y, m, n, xs, ys = k.words("x y m n xs ys")
    for r in k.share(m):
        total = k.var(0.0, F64)
        for c in k.loop(0, n):
            value = number(k, kind, x + xs * r + c * ELEMENT_BYTES[kind])
            total.value = total.value + k.cast("fpext", value, F64)
            put(k, kind, y + ys * r + c * ELEMENT_BYTES[kind], k.cast("fptrunc", total.value, F32))


class _Row:
    """Keys of a row by index, and the list of indices that is put in order."""

    def __init__(self, k: Kernel, kind: str, x: Val, y: Val) -> None:
        self.k, self.kind, self.x, self.y = k, kind, x, y

    def key(self, i: Val) -> Val:
        """What the order goes by: the greatest first."""
        value = number(self.k, self.kind, self.x + i * ELEMENT_BYTES[self.kind])
        known = self.k.select(value.is_nan(), self.k.const(float("-inf"), F32), value)
        return self.k.select(self.k.arg("rising").ne(0), -known, known)

    def at(self, place: Val) -> Val:
        """The index at a place of the list."""
        return self.k.cast("sext", self.k.load(self.y + place * 4, I32), I64)

    def put(self, place: Val, index: Val) -> None:
        """Write an index to a place of the list."""
        self.k.store(self.y + place * 4, self.k.cast("trunc", index, I32))

    def before(self, a: Val, b: Val) -> Val:
        """Whether index a comes before index b."""
        first, second = self.key(a), self.key(b)
        return (first > second) | (first.eq(second) & (a < b))

    def sift(self, root: Val, end: Val) -> None:
        """Let the index at `root` sink below those that come after it."""
        k = self.k
        place, going = k.var(root), k.var(1)
        with k.while_(lambda: going.value > 0):
            child = k.var(place.value * 2 + 1)
            going.value = 0
            with k.when(child.value < end):
                other = k.minimum(child.value + 1, end - 1)
                later = self.before(self.at(child.value), self.at(other))
                child.value = k.select(later, other, child.value)
                mine, theirs = self.at(place.value), self.at(child.value)
                with k.when(self.before(mine, theirs)):
                    self.put(place.value, theirs)
                    self.put(child.value, mine)
                    place.value = child.value
                    going.value = 1


def _argsort(k: Kernel, kind: str) -> None:
    """Heap sort of indices: the last of the order is at the root."""
    x, y, m, n, xs, ys = k.words("x y m n xs ys")
    for r in k.share(m):
        row = _Row(k, kind, x + xs * r, y + ys * r)
        for c in k.loop(0, n):
            row.put(c, c)
        for i in k.loop(0, n // 2):
            row.sift(n // 2 - 1 - i, n)
        for i in k.loop(0, n):
            last = n - 1 - i
            top, other = row.at(k.const(0, I64)), row.at(last)
            row.put(k.const(0, I64), other)
            row.put(last, top)
            row.sift(k.const(0, I64), last)


def _top_k(k: Kernel, kind: str) -> None:
    """The first of the order, kept sorted while the row is read."""
    x, y, m, n, xs, ys, most = k.words("x y m n xs ys k")
    for r in k.share(m):
        row = _Row(k, kind, x + xs * r, y + ys * r)
        for c in k.loop(0, n):
            held = k.minimum(c, most)
            worst = row.at(k.maximum(held - 1, 0))
            worst = k.select(held > 0, worst, 0)
            with k.when((held < most) | row.before(c, worst)):
                place = k.var(k.minimum(held, most - 1))

                def follows(place: Var = place, row: _Row = row, c: Val = c) -> Val:
                    above = row.at(k.maximum(place.value - 1, 0))
                    above = k.select(place.value > 0, above, 0)
                    return (place.value > 0) & row.before(c, above)

                with k.while_(follows):
                    row.put(place.value, row.at(place.value - 1))
                    place.value = place.value - 1
                row.put(place.value, c)


def _register(kind: str) -> None:
    for name, args, build in (
        ("cumsum", "x y m n xs ys", _cumsum),
        ("argsort", "x y m n xs ys rising", _argsort),
        ("top_k", "x y m n xs ys rising k", _top_k),
    ):
        kernel(args, name=f"{name}_{kind}")(partial(build, kind=kind))


for _kind in FLOATS:
    _register(_kind)
