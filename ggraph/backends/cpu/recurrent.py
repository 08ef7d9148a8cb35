"""Kernels of layers that carry a state: short convolutions and gated delta nets.

`ggraph.ops.recurrent` says what the course of a text's rows is. Both walk it from the state that
text has for certain, over replayed rows of the log and a row's forerunners, with one order of
operations: a node of a draft tree gets the bits that it has as text.

Legend: m rows, n channels or columns of values, L rows of the log, R most replayed rows, P
remembered inputs, K = P + 1; H heads of values, G of keys, D numbers per key, V per value.
"""

from collections.abc import Callable
from itertools import pairwise

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import F32X8, I32, I64, Kernel, Val, Var, kernel

MAX_KEY = 256  # numbers of a key
MAX_KERNEL = 8  # inputs that a convolution sees
MAX_ROWS = 512  # of a step


def _entry(k: Kernel, table: Val, i: Val) -> Val:
    return k.cast("sext", k.load(table + i * 4, I32), I64)


def _each_replayed(k: Kernel, body: Callable[[Val], None]) -> None:
    """`body(row of the log)` for the rows that became text, in order; -1 ends them."""
    replay, r, limit = k.words("replay r limit")
    at, row = k.var(0), k.var(-1)

    def goes_on() -> Val:
        row.value = -1
        with k.when(at.value < r):
            row.value = _entry(k, replay, at.value)
        return k.select(row.value < limit, row.value, -1) >= 0

    with k.while_(goes_on):
        body(row.value)
        at.value = at.value + 1


def _follow(
    k: Kernel, t: Val, last: Var, base: Callable[[], None], row: Callable[[Val], None]
) -> None:
    """Bring what is carried to the forerunner of row t, which is there already in a chain."""
    parents = k.arg("parents")
    before = k.minimum(_entry(k, parents, t), t - 1)
    with k.when(before.ne(last.value)):
        base()
        path, count, at = k.scratch(MAX_ROWS * 8), k.var(0), k.var(before)
        with k.while_(lambda: at.value >= 0):
            k.store(path + count.value * 8, at.value)
            at.value = k.minimum(_entry(k, parents, at.value), at.value - 1)
            count.value = count.value + 1
        with k.while_(lambda: count.value > 0):
            count.value = count.value - 1
            row(k.load(path + count.value * 8, I64))
    last.value = t


def _push(k: Kernel, window: list[Var], value: Val) -> None:
    """The oldest input leaves, the newest comes."""
    for older, newer in pairwise(window):
        older.value = newer.value
    window[-1].value = value


def _eight(k: Kernel, at: Val, left: Val | None) -> Val:
    return k.load(at, F32X8) if left is None else words.load_tail(k, at, left)


def _channels(k: Kernel, body: Callable[[Val, Val | None], None]) -> None:
    """`body(first channel, how many are left)` for this thread's eights of channels."""
    n = k.arg("n")
    for unit in k.share((n + 7) // 8):
        c = unit * 8
        with k.if_else(c + 8 <= n) as (whole, part):
            with whole:
                body(c, None)
            with part:
                body(c, n - c)


def _remembered(k: Kernel, window: list[Var], c: Val, left: Val | None) -> None:
    """The inputs before the step's first row: the state's (zeros where a text begins), then those
    that were replayed. The newest stands last."""
    state, log, n = k.words("state log n")
    for i, held in enumerate(window):
        held.value = k.const(0.0, F32X8)
        with k.when(k.load(k.arg("past"), I32).ne(0)):
            held.value = _eight(k, state + (n * i + c) * 4, left)
    _each_replayed(k, lambda row: _push(k, window, _eight(k, log + (row * n + c) * 4, left)))


def _conv(k: Kernel, taps: int) -> None:
    """y[t] = the last `taps` inputs of row t's course by w, oldest first."""
    x, w, y, m, n = k.words("x w y m n")

    def channels(c: Val, left: Val | None) -> None:
        window = [k.var(k.const(0.0, F32X8)) for _ in range(taps - 1)]
        weights = [_eight(k, w + (n * j + c) * 4, left) for j in range(taps)]
        last = k.var(-2)

        def row(t: Val) -> None:
            _push(k, window, _eight(k, x + (t * n + c) * 4, left))

        for t in k.loop(0, m):
            _follow(k, t, last, lambda: _remembered(k, window, c, left), row)
            own = _eight(k, x + (t * n + c) * 4, left)
            total = weights[-1] * own
            for held, weight in zip(window, weights, strict=False):
                total = words.fma(k, held.value, weight, total)
            _push(k, window, own)
            at = y + (t * n + c) * 4
            if left is None:
                k.store(at, total)
            else:
                words.store_tail(k, at, total, left)

    _channels(k, channels)


def _conv_next(k: Kernel, taps: int) -> None:
    """y = the last taps - 1 inputs of text: the state's own bytes."""
    x, y, n, certain = k.words("x y n certain")

    def channels(c: Val, left: Val | None) -> None:
        window = [k.var(k.const(0.0, F32X8)) for _ in range(taps - 1)]
        _remembered(k, window, c, left)
        for t in k.loop(0, k.minimum(_entry(k, certain, k.const(0, I64)), k.arg("m"))):
            _push(k, window, _eight(k, x + (t * n + c) * 4, left))
        for i, held in enumerate(window):
            at = y + (n * i + c) * 4
            if left is None:
                k.store(at, held.value)
            else:
                words.store_tail(k, at, held.value, left)

    _channels(k, channels)


def _by_taps(k: Kernel, body: Callable[[Kernel, int], None]) -> None:
    for taps in range(2, MAX_KERNEL + 1):
        with k.when(k.arg("taps").eq(taps)):
            body(k, taps)


@kernel("state log x w y parents replay past m n taps r limit")
def ssm_conv(k: Kernel) -> None:
    """Rows by a short convolution; w is [K, n]."""
    _by_taps(k, _conv)


@kernel("state log x y replay past certain m n taps r limit")
def ssm_conv_next(k: Kernel) -> None:
    """What the convolution remembers of a text."""
    _by_taps(k, _conv_next)


def _load_tile(k: Kernel, tile: Val, h: Val, j: Val) -> None:
    """Eight columns of head h's state, zeros where a text begins."""
    state, d, v = k.words("state d v")
    known = k.load(k.arg("past"), I32).ne(0)
    for i in k.loop(0, d):
        held = k.var(k.const(0.0, F32X8))
        with k.when(known):
            held.value = k.load(state + ((h * d + i) * v + j) * 4, F32X8)
        k.store(tile + i * 32, held.value)


def _advance(k: Kernel, tile: Val, row: Val, h: Val, j: Val, q: Val | None = None) -> Val:
    """The tile after a row; what q finds in it, where q is given. Four sums, in a fixed order."""
    d, v, heads, groups = k.words("d v heads groups")
    key, values = row + (h % groups) * d * 4, row + groups * d * 4
    gates = values + heads * v * 4
    fade = k.splat(k.lane(words.exp(k, words.broadcast(k, gates + h * 4)), 0), 8)
    beta = words.broadcast(k, gates + (heads + h) * 4)
    whole = d // 4 * 4

    def walk(each: Callable[[Val, Val], Val]) -> Val:
        """The sum over i of each(i, address in the tile)."""
        sums = [k.var(k.const(0.0, F32X8)) for _ in range(4)]
        for i in k.loop(0, whole, 4):
            for u, total in enumerate(sums):
                total.value = total.value + each(i + u, tile + (i + u) * 32)
        for i in k.loop(whole, d):
            sums[0].value = sums[0].value + each(i, tile + i * 32)
        a, b, c, e = (s.value for s in sums)
        return (a + b) + (c + e)

    def faded(i: Val, at: Val) -> Val:
        held = k.load(at, F32X8) * fade
        k.store(at, held)
        return held * words.broadcast(k, key + i * 4)

    known = walk(faded)
    change = (k.load(values + (h * v + j) * 4, F32X8) - known) * beta

    def corrected(i: Val, at: Val) -> Val:
        held = words.fma(k, words.broadcast(k, key + i * 4), change, k.load(at, F32X8))
        k.store(at, held)
        return held * words.broadcast(k, q + i * 4) if q is not None else held

    return walk(corrected)


def _base(k: Kernel, tile: Val, h: Val, j: Val) -> None:
    """The state after the replayed rows."""
    log, width = k.words("log width")
    _load_tile(k, tile, h, j)

    def row(at: Val) -> None:
        _advance(k, tile, log + at * width * 4, h, j)

    _each_replayed(k, row)


@kernel("state log rows q y parents replay past m heads groups d v width r limit")
def delta_net(k: Kernel) -> None:
    """y[t, h] = what q finds in head h's state after row t."""
    rows, q, y, m, heads, groups, d, v, width = k.words("rows q y m heads groups d v width")
    tile = k.scratch(MAX_KEY * 32)
    for item in k.share(heads * (v // 8)):
        h, j = item // (v // 8), item % (v // 8) * 8
        last = k.var(-2)

        def follow(t: Val, h: Val = h, j: Val = j) -> None:
            _advance(k, tile, rows + t * width * 4, h, j)

        for t in k.loop(0, m):
            _follow(k, t, last, lambda h=h, j=j: _base(k, tile, h, j), follow)  # type: ignore[misc]
            asked = q + (t * groups + h % groups) * d * 4
            found = _advance(k, tile, rows + t * width * 4, h, j, asked)
            k.store(y + ((t * heads + h) * v + j) * 4, found)


@kernel("state log rows y replay past certain m heads groups d v width r limit")
def delta_net_next(k: Kernel) -> None:
    """y, the state's own bytes = the state after the rows that are text."""
    rows, y, m, heads, d, v, width = k.words("rows y m heads d v width")
    tile = k.scratch(MAX_KEY * 32)
    count = k.minimum(_entry(k, k.arg("certain"), k.const(0, I64)), m)
    for item in k.share(heads * (v // 8)):
        h, j = item // (v // 8), item % (v // 8) * 8
        _base(k, tile, h, j)
        for t in k.loop(0, count):
            _advance(k, tile, rows + t * width * 4, h, j)
        for i in k.loop(0, d):
            k.store(y + ((h * d + i) * v + j) * 4, k.load(tile + i * 32, F32X8))
