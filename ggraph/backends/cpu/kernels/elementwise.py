"""Norms and other row kernels on float32 rows, for what every token needs; the rest is `nest.py`.

Every kernel works on m rows of n numbers with row strides in bytes and shares rows, or pieces of
rows, among threads; a row's sums have one fixed order. A stride of 0 repeats one row.

Legend: m rows, n columns, xs / ys row strides in bytes.
"""

from collections.abc import Callable

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import (
    F32,
    F32X8,
    I32,
    Kernel,
    Val,
    kernel,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.kernels.quantise import in_fours, load_block
from ggraph.backends.cpu.kernels.tiles import BLOCK
from ggraph.ops.unary import GELU_INNER, GELU_OUTER

Emit2 = Callable[[Kernel, Val, Val], Val]


def in_eights(k: Kernel, start: Val, stop: Val, body: Callable[[Val, Val | None], None]) -> None:
    """`body(column, left)` for 8 columns at a time; `left` is given for the last, partial one."""
    whole = start + (stop - start) // 8 * 8
    for c in k.loop(start, whole, 8):
        body(c, None)
    with k.when(whole < stop):
        body(whole, stop - whole)


def in_parts(k: Kernel, body: Callable[[Val, Val, Val], None]) -> None:
    """`body(row, first column, end column)` for this thread's part of each row of the m x n
    matrix."""
    m, n = k.words("m n")
    rows, (first, end) = k.grid(m, (n + (BLOCK - 1)) // BLOCK)
    for r in k.loop(*rows):
        body(r, first * BLOCK, k.minimum(end * BLOCK, n))


def _binary(name: str, emit: Emit2) -> None:
    @kernel("a b y m n as bs ys", name=name)
    def build(k: Kernel) -> None:
        a, b, y, a_step, bs, ys = k.words("a b y as bs ys")

        m, n = k.words("m n")
        rows, blocks = k.grid(m, (n + (BLOCK - 1)) // BLOCK)
        for r in k.loop(*rows):

            def eight(c: Val, left: Val | None, r: Val = r) -> None:
                first = words.load_some(k, a + a_step * r + c * 4, left)
                second = words.load_some(k, b + bs * r + c * 4, left)
                words.store_some(k, y + ys * r + c * 4, emit(k, first, second), left)

            in_eights(k, blocks[0] * BLOCK, k.minimum(blocks[1] * BLOCK, n), eight)


def _swiglu(k: Kernel, gate: Val, up: Val) -> Val:
    return gate * words.sigmoid(k, gate) * up


def _geglu(k: Kernel, gate: Val, up: Val) -> Val:
    """Step by step as `unary.gelu_of`, and so with the bits of its loop nest."""
    inner = gate * GELU_OUTER * (gate * GELU_INNER * gate + 1.0)
    return gate / (words.exp(k, inner * -2.0) + 1.0) * up


UNITS: dict[str, Emit2] = {"swiglu": _swiglu, "geglu": _geglu}  # in any number of lanes


def row_sum(k: Kernel, n: Val, emit: Callable[[Val, Val | None], Val]) -> Val:
    """Sum over n columns of emit(column, left): four interleaved sums of 8 lanes, fixed order."""
    zero = k.const(0.0, F32X8)
    sums = [k.var(zero) for _ in range(4)]
    whole = n // 32 * 32
    for c in k.loop(0, whole, 32):
        for i, s in enumerate(sums):
            s.value = s.value + emit(c + 8 * i, None)

    def eight(c: Val, left: Val | None) -> None:
        sums[0].value = sums[0].value + emit(c, left)

    in_eights(k, whole, n, eight)
    a, b, c, d = (s.value for s in sums)
    return words.hsum(k, (a + b) + (c + d))


def _rms_factor(k: Kernel, x: Val, n: Val, eps: Val) -> Val:
    """1 / sqrt(mean of squares + eps) of one row."""

    def square(c: Val, left: Val | None) -> Val:
        v = words.load_some(k, x + c * 4, left)
        return v * v

    mean = row_sum(k, n, square) / k.cast("uitofp", n, F32)
    return k.const(1.0, F32) / words.of_floats(k, "sqrt", mean + eps)


@kernel("x w y m n xs ys eps:f")
def rms_norm(k: Kernel) -> None:
    """y = x / rms(x) * w; w = 0 means no weight."""
    x, w, y, m, n, xs, ys, eps = k.words("x w y m n xs ys eps")
    for r in k.share(m):
        row, out = x + xs * r, y + ys * r
        factor = k.splat(_rms_factor(k, row, n, eps), 8)

        def plain(
            c: Val, left: Val | None, row: Val = row, out: Val = out, f: Val = factor
        ) -> None:
            words.store_some(k, out + c * 4, words.load_some(k, row + c * 4, left) * f, left)

        def weighted(c: Val, left: Val | None, out: Val = out) -> None:
            here, weight = (words.load_some(k, at + c * 4, left) for at in (out, w))
            words.store_some(k, out + c * 4, here * weight, left)

        in_eights(k, k.same(0, n), n, plain)
        with k.when(w.ne(0)):
            in_eights(k, k.same(0, n), n, weighted)


@kernel("x w out m n xs os eps:f")
def rms_norm_quantise(k: Kernel) -> None:
    """out = quantised rows of x / rms(x) * w; n is whole blocks of 32."""
    x, w, out, m, n, xs, os, eps = k.words("x w out m n xs os eps")
    lanes = k.isa.lanes
    rows, blocks = k.grid(m, n // BLOCK)
    for r in k.loop(*rows):
        row = x + xs * r
        factor = k.splat(_rms_factor(k, row, n, eps), lanes)  # of the whole row, by every thread

        def normed(b: Val, row: Val = row, factor: Val = factor) -> list[Val]:
            at = b * (BLOCK * 4)
            pairs = zip(load_block(k, row + at, lanes), load_block(k, w + at, lanes), strict=True)
            return [v * factor * u for v, u in pairs]

        in_fours(k, blocks, normed, out + os * r)


def _quantised(name: str, emit: Emit2) -> None:
    """out = quantised rows of a unit of a and b; n is whole blocks of 32."""

    @kernel("a b out m n as bs os", name=name)
    def build(k: Kernel) -> None:
        a, b, out, m, n, a_step, bs, os = k.words("a b out m n as bs os")
        rows, blocks = k.grid(m, n // BLOCK)
        for r in k.loop(*rows):

            def gated(i: Val, r: Val = r) -> list[Val]:
                gates = load_block(k, a + a_step * r + i * (BLOCK * 4), k.isa.lanes)
                ups = load_block(k, b + bs * r + i * (BLOCK * 4), k.isa.lanes)
                return [emit(k, g, u) for g, u in zip(gates, ups, strict=True)]

            in_fours(k, blocks, gated, out + os * r)


for _unit, _emit in UNITS.items():
    _binary(_unit, _emit)
    _quantised(_unit + "_quantise", _emit)


@kernel("x mask y m n xs ms ys scale:f")
def soft_max(k: Kernel) -> None:
    """y = softmax(x * scale + mask) over each row; mask = 0 means none; an all -inf row gives 0,
    and one with something that is no number nothing else."""
    x, mask, y, m, n, xs, ms, ys, factor = k.words("x mask y m n xs ms ys scale")
    for r in k.share(m):
        out = y + ys * r
        top = k.var(k.const(float("-inf"), F32X8))

        def biased(c: Val, left: Val | None, r: Val = r, out: Val = out, top=top) -> None:  # type: ignore[no-untyped-def]
            value = k.var(words.load_some(k, x + xs * r + c * 4, left) * k.splat(factor, 8))
            with k.when(mask.ne(0)):
                value.value = value.value + words.load_some(k, mask + ms * r + c * 4, left)
            words.store_some(k, out + c * 4, value.value, left)
            shown = value.value
            if left is not None:
                shown = k.select(words.tail_mask(k, left), shown, float("-inf"))
            top.value = k.maximum(shown, top.value)

        in_eights(k, k.same(0, n), n, biased)
        largest = k.maximum(words.hmax(k, top.value), words.LOWEST)

        def raised(c: Val, left: Val | None, out: Val = out, largest: Val = largest) -> Val:
            value = words.exp_below(k, words.load_some(k, out + c * 4, left) - k.splat(largest, 8))
            if left is not None:
                value = k.select(words.tail_mask(k, left), value, 0.0)
            words.store_some(k, out + c * 4, value, left)
            return value

        total = row_sum(k, n, raised)
        share = k.select(total.eq(0.0), k.const(0.0, F32), k.const(1.0, F32) / total)

        def scaled(c: Val, left: Val | None, out: Val = out, share: Val = share) -> None:
            value = words.load_some(k, out + c * 4, left) * k.splat(share, 8)
            words.store_some(k, out + c * 4, value, left)

        in_eights(k, k.same(0, n), n, scaled)


SCANS = 4  # of a row at once: each step of one waits for the step before


@kernel("x y m n xs")
def argmax(k: Kernel) -> None:
    """y[m] int32: the first column with the row's largest value (0 where nothing compares)."""
    x, y, m, n, xs = k.words("x y m n xs")
    lanes = k.isa.lanes
    kind, step = vec(F32, lanes), lanes * SCANS
    for r in k.share(m):
        row, whole = x + xs * r, n // step * step
        scans = [
            (k.var(k.const(float("-inf"), kind)), k.var(k.const(0, vec(I32, lanes))))
            for _ in range(SCANS)
        ]
        for c in k.loop(0, whole, step):
            first = k.splat(k.cast("trunc", c, I32), lanes)
            for i, (best, at) in enumerate(scans):
                value = k.load(row + c * 4 + i * (lanes * 4), kind)
                better = value > best.value
                here = first + k.consts(range(i * lanes, (i + 1) * lanes), I32)
                at.value = k.select(better, here, at.value)
                best.value = k.select(better, value, best.value)
        top, where = k.var(k.const(float("-inf"), F32)), k.var(k.const(0, I32))
        for best, at in scans:
            for i in range(lanes):
                value, lane = k.lane(best.value, i), k.lane(at.value, i)
                first = value.eq(top.value)
                with k.when(k.select(first, lane < where.value, value > top.value)):
                    top.value, where.value = value, lane
        for c in k.loop(whole, n):
            with k.when(k.load(row + c * 4, F32) > top.value):
                top.value, where.value = k.load(row + c * 4, F32), k.cast("trunc", c, I32)
        k.store(y + r * 4, where.value)
