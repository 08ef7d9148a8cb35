"""Kernels of layers that carry a state: short convolutions and gated delta nets.

`ggraph.ops.recurrent` says what the course of a text's rows is. Both walk it from the state that
text has for certain, over replayed rows of the log and a row's forerunners, with one order of
operations: a node of a draft tree gets the bits that it has as text.

Legend: m rows, n channels or columns of values, L rows of the log, R most replayed rows, P
remembered inputs, K = P + 1; H heads of values, G of keys, D numbers per key, V per value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import F32, F32X8, I32, I64, Kernel, Val, Var, kernel, vec

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


@dataclass(frozen=True)
class _Tile:
    """Columns j and on of head h's state, in the cache of a core: `count` vectors of `lanes` of
    each of its d rows. What happens to a column is the same whatever stands beside it."""

    k: Kernel
    at: Val
    h: Val
    j: Val
    lanes: int
    count: int

    def vectors(self, address: Val) -> list[Val]:
        """The columns' numbers at an address."""
        kind = vec(F32, self.lanes)
        return [self.k.load(address + u * 4 * self.lanes, kind) for u in range(self.count)]

    def store(self, address: Val, values: Sequence[Val]) -> None:
        """The other way."""
        for u, value in enumerate(values):
            self.k.store(address + u * 4 * self.lanes, value)

    def row(self, i: Val) -> Val:
        """Where row i stands."""
        return self.at + i * (4 * self.lanes * self.count)

    def given(self, whole: Val, i: Val) -> Val:
        """Where row i stands in a whole state."""
        d, v = self.k.words("d v")
        return whole + ((self.h * d + i) * v + self.j) * 4

    def load(self) -> None:
        """The state's columns, zeros where a text begins."""
        k, (state, d) = self.k, self.k.words("state d")
        with k.if_else(k.load(k.arg("past"), I32).ne(0)) as (known, new):
            with known:
                for i in k.loop(0, d):
                    self.store(self.row(i), self.vectors(self.given(state, i)))
            with new:
                for i in k.loop(0, d):
                    zero = k.const(0.0, vec(F32, self.lanes))
                    self.store(self.row(i), [zero] * self.count)

    def _sums(self, each: Callable[[Val, list[Var]], None]) -> list[Val]:
        """Each column's sum over the rows i, which `each(i, totals)` adds to; four totals in turn,
        put together in a fixed order."""
        k, d = self.k, self.k.arg("d")
        zero = k.const(0.0, vec(F32, self.lanes))
        turns = [[k.var(zero) for _ in range(self.count)] for _ in range(4)]
        whole = d // 4 * 4
        for i in k.loop(0, whole, 4):
            for t, totals in enumerate(turns):
                each(i + t, totals)
        for i in k.loop(whole, d):
            each(i, turns[0])
        columns = zip(*turns, strict=True)
        return [(a.value + b.value) + (c.value + e.value) for a, b, c, e in columns]

    def advance(self, row: Val, q: Val | None = None) -> list[Val]:
        """The state after a row; what q finds in it, where q is given."""
        k, (d, v, heads, groups) = self.k, self.k.words("d v heads groups")
        key, values = row + (self.h % groups) * d * 4, row + groups * d * 4
        gates = values + heads * v * 4
        gate = words.exp(k, words.broadcast(k, gates + self.h * 4))
        fade = k.splat(k.lane(gate, 0), self.lanes)
        beta = words.broadcast(k, gates + (heads + self.h) * 4, self.lanes)

        def seen(i: Val, totals: list[Var]) -> None:
            share = words.broadcast(k, key + i * 4, self.lanes)
            for total, held in zip(totals, self.vectors(self.row(i)), strict=True):
                total.value = words.fma(k, held, share, total.value)

        known = self._sums(seen)
        told = self.vectors(values + (self.h * v + self.j) * 4)
        change = [(t - s * fade) * beta for t, s in zip(told, known, strict=True)]

        def corrected(i: Val, totals: list[Var]) -> None:
            share = words.broadcast(k, key + i * 4, self.lanes)
            old = self.vectors(self.row(i))
            held = [words.fma(k, share, c, o * fade) for c, o in zip(change, old, strict=True)]
            self.store(self.row(i), held)
            if q is not None:
                asked = words.broadcast(k, q + i * 4, self.lanes)
                for total, new in zip(totals, held, strict=True):
                    total.value = words.fma(k, new, asked, total.value)

        return self._sums(corrected)

    def base(self) -> None:
        """The state after the replayed rows."""
        log, width = self.k.words("log width")
        self.load()

        def row(at: Val) -> None:
            self.advance(log + at * width * 4)

        _each_replayed(self.k, row)


def _tiles(k: Kernel, body: Callable[[_Tile], None]) -> None:
    """`body(tile)` for this thread's share: two of the widest vectors beside each other, so that
    whole lines of memory are used up, or eight columns where values have no such width."""
    heads, v = k.words("heads v")
    room = k.scratch(MAX_KEY * 4 * 2 * k.isa.lanes)

    def shared(lanes: int, count: int) -> None:
        width = lanes * count
        for item in k.share(heads * (v // width)):
            h, j = item // (v // width), item % (v // width) * width
            body(_Tile(k, room, h, j, lanes, count))

    with k.if_else((v % (2 * k.isa.lanes)).eq(0)) as (wide, narrow):
        with wide:
            shared(k.isa.lanes, 2)
        with narrow:
            shared(8, 1)


@kernel("state log rows q y parents replay past m heads groups d v width r limit")
def delta_net(k: Kernel) -> None:
    """y[t, h] = what q finds in head h's state after row t."""
    rows, q, y, m, heads, groups, d, v, width = k.words("rows q y m heads groups d v width")

    def found(tile: _Tile) -> None:
        last = k.var(-2)

        def follow(t: Val) -> None:
            tile.advance(rows + t * width * 4)

        for t in k.loop(0, m):
            _follow(k, t, last, tile.base, follow)
            asked = q + (t * groups + tile.h % groups) * d * 4
            given = tile.advance(rows + t * width * 4, asked)
            tile.store(y + ((t * heads + tile.h) * v + tile.j) * 4, given)

    _tiles(k, found)


@kernel("state log rows y replay past certain m heads groups d v width r limit")
def delta_net_next(k: Kernel) -> None:
    """y, the state's own bytes = the state after the rows that are text."""
    rows, y, m, d, width = k.words("rows y m d width")
    count = k.minimum(_entry(k, k.arg("certain"), k.const(0, I64)), m)

    def after(tile: _Tile) -> None:
        tile.base()
        for t in k.loop(0, count):
            tile.advance(rows + t * width * 4)
        for i in k.loop(0, d):
            tile.store(tile.given(y, i), tile.vectors(tile.row(i)))

    _tiles(k, after)
