"""Kernels of layers that carry a state: short convolutions and gated delta nets.

`ggraph.ops.recurrent` says what the course of a text's rows is. Both walk it from the state that
text has for certain, over replayed rows of the log and a row's forerunners, with one order of
operations: a node of a draft tree gets the bits that it has as text.

Legend: `slots` texts with a state each, m rows, n channels or columns of values, L rows of the
log, R most replayed rows, P remembered inputs, K = P + 1; H heads of values, G of keys, D numbers
per key, V per value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import ask
from ggraph.backends.cpu.pages import LINE
from ggraph.backends.cpu.simd import F32, F32X8, I32, I64, Kernel, Val, Var, kernel, vec

MAX_KEY = 256  # numbers of a key
MAX_KERNEL = 8  # inputs that a convolution sees
MAX_ROWS = 512  # of a step


def _entry(k: Kernel, table: Val, i: Val) -> Val:
    return k.cast("sext", k.load(table + i * 4, I32), I64)


def _each_replayed(k: Kernel, slot: Val, body: Callable[[Val], None]) -> None:
    """`body(row of the log)` for a slot's rows that became text, in order; -1 ends them."""
    replay, r, limit = k.words("replay r limit")
    at, row = k.var(0), k.var(-1)

    def goes_on() -> Val:
        row.value = -1
        with k.when(at.value < r):
            row.value = _entry(k, replay, slot * r + at.value)
        return k.select(row.value < limit, row.value, -1) >= 0

    with k.while_(goes_on):
        body(row.value)
        at.value = at.value + 1


def _before(k: Kernel, row: Val) -> Val:
    """The row before one of this step in its course; below 0: -1 - its slot."""
    return k.minimum(_entry(k, k.arg("parents"), row), row - 1)


def _walk(
    k: Kernel, row: Val, most: int, base: Callable[[Val], None], each: Callable[[Val], None]
) -> None:
    """A course up to `row`, which is `base(slot)` where that is below 0, else base and `each(row)`
    for the last `most` rows of this step, the last one last."""
    path, count, at = k.scratch(most * 8), k.var(0), k.var(row)
    with k.while_(lambda: k.select(count.value < most, at.value, -1) >= 0):
        k.store(path + count.value * 8, at.value)
        at.value = _before(k, at.value)
        count.value = count.value + 1
    base(k.minimum(-1 - at.value, k.arg("slots") - 1))
    with k.while_(lambda: count.value > 0):
        count.value = count.value - 1
        each(k.load(path + count.value * 8, I64))


def _follow(
    k: Kernel, t: Val, last: Var, base: Callable[[Val], None], each: Callable[[Val], None]
) -> None:
    """Bring what is carried to the forerunner of row t, which is there already in a chain."""
    before = _before(k, t)
    with k.when(before.ne(last.value)):
        _walk(k, before, MAX_ROWS, base, each)
    last.value = t


def _each_changed(k: Kernel, body: Callable[[Val, Val], None]) -> None:
    """`body(slot, its last certain row)` for the slots that the step changes."""
    past, replay, certain = k.words("past replay certain")
    for slot in k.loop(0, k.arg("slots")):
        last = k.minimum(_entry(k, certain, slot), k.arg("m") - 1)
        became = k.maximum(last, _entry(k, replay, slot * k.arg("r")))
        begun = _entry(k, past, slot)
        with k.when(k.select(begun.ne(0), became, 0) >= 0):
            body(slot, last)


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


def _remembered(k: Kernel, window: list[Var], slot: Val, c: Val, left: Val | None) -> None:
    """The inputs before the step's first row: the state's (zeros where a text begins), then those
    that were replayed. The newest stands last."""
    state, log, n = k.words("state log n")
    with k.if_else(_entry(k, k.arg("past"), slot).ne(0)) as (known, new):
        with known:
            for i, held in enumerate(window):
                at = (slot * len(window) + i) * n + c
                held.value = _eight(k, state + at * 4, left)
        with new:
            for held in window:
                held.value = k.const(0.0, F32X8)
    _each_replayed(k, slot, lambda row: _push(k, window, _eight(k, log + (row * n + c) * 4, left)))


def _conv(k: Kernel, taps: int) -> None:
    """y[t] = the last `taps` inputs of row t's course by w, oldest first."""
    x, w, y, m, n = k.words("x w y m n")

    def channels(c: Val, left: Val | None) -> None:
        window = [k.var(k.const(0.0, F32X8)) for _ in range(taps - 1)]
        weights = [_eight(k, w + (n * j + c) * 4, left) for j in range(taps)]
        last = k.var(m)

        def row(t: Val) -> None:
            _push(k, window, _eight(k, x + (t * n + c) * 4, left))

        for t in k.loop(0, m):
            _follow(k, t, last, lambda slot: _remembered(k, window, slot, c, left), row)
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
    """y = the last taps - 1 inputs of every text: the state's own bytes."""
    x, y, n = k.words("x y n")

    def channels(c: Val, left: Val | None) -> None:
        window = [k.var(k.const(0.0, F32X8)) for _ in range(taps - 1)]

        def after(slot: Val, last: Val) -> None:
            def row(t: Val) -> None:
                _push(k, window, _eight(k, x + (t * n + c) * 4, left))

            _walk(k, last, taps - 1, lambda _: _remembered(k, window, slot, c, left), row)
            for i, held in enumerate(window):
                at = y + ((slot * len(window) + i) * n + c) * 4
                if left is None:
                    k.store(at, held.value)
                else:
                    words.store_tail(k, at, held.value, left)

        _each_changed(k, after)

    _channels(k, channels)


def _by_taps(k: Kernel, body: Callable[[Kernel, int], None]) -> None:
    for taps in range(2, MAX_KERNEL + 1):
        with k.when(k.arg("taps").eq(taps)):
            body(k, taps)


@kernel("state log x w y parents replay past slots m n taps r limit")
def ssm_conv(k: Kernel) -> None:
    """Rows by a short convolution; w is [K, n]."""
    _by_taps(k, _conv)


@kernel("state log x y parents replay past certain slots m n taps r limit")
def ssm_conv_next(k: Kernel) -> None:
    """What the convolution remembers of each text."""
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

    def given(self, whole: Val, slot: Val, i: Val) -> Val:
        """Where row i stands in the whole state of a slot."""
        heads, d, v = self.k.words("heads d v")
        return whole + (((slot * heads + self.h) * d + i) * v + self.j) * 4

    def load(self, slot: Val) -> None:
        """A slot's columns, zeros where a text begins. Beside each row as many bytes of the next
        head are asked for, as they lie: memory gives less where columns are read one by one."""
        k, (state, heads, d, v) = self.k, self.k.words("state heads d v")
        nbytes = 4 * self.lanes * self.count
        ahead = state + (((slot * heads + self.h + 1) * v + self.j) * d) * 4
        with k.if_else(_entry(k, k.arg("past"), slot).ne(0)) as (known, new):
            with known:
                for i in k.loop(0, d):
                    for line in range(0, nbytes, LINE):
                        ask(k, ahead + (i * nbytes + line))
                    self.store(self.row(i), self.vectors(self.given(state, slot, i)))
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

    def base(self, slot: Val) -> None:
        """A slot's state after the replayed rows."""
        log, width = self.k.words("log width")
        self.load(slot)

        def row(at: Val) -> None:
            self.advance(log + at * width * 4)

        _each_replayed(self.k, slot, row)


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


@kernel("state log rows q y parents replay past slots m heads groups d v width r limit")
def delta_net(k: Kernel) -> None:
    """y[t, h] = what q finds in head h of its text's state after row t."""
    rows, q, y, m, heads, groups, d, v, width = k.words("rows q y m heads groups d v width")

    def found(tile: _Tile) -> None:
        last = k.var(m)

        def follow(t: Val) -> None:
            tile.advance(rows + t * width * 4)

        for t in k.loop(0, m):
            _follow(k, t, last, tile.base, follow)
            asked = q + (t * groups + tile.h % groups) * d * 4
            given = tile.advance(rows + t * width * 4, asked)
            tile.store(y + ((t * heads + tile.h) * v + tile.j) * 4, given)

    _tiles(k, found)


@kernel("state log rows y parents replay past certain slots m heads groups d v width r limit")
def delta_net_next(k: Kernel) -> None:
    """y, the state's own bytes = each slot's state after the rows that are text."""
    rows, y, d, width = k.words("rows y d width")

    def after(tile: _Tile) -> None:
        def state(slot: Val, last: Val) -> None:
            def row(t: Val) -> None:
                tile.advance(rows + t * width * 4)

            _walk(k, last, MAX_ROWS, lambda _: tile.base(slot), row)
            for i in k.loop(0, d):
                tile.store(tile.given(y, slot, i), tile.vectors(tile.row(i)))

        _each_changed(k, state)

    _tiles(k, after)
