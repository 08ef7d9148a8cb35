"""Kernels of gated delta nets, whose state is a matrix per head.

Legend: as in `courses.py`; H heads of values, G of keys, D numbers per key, V per value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import ask
from ggraph.backends.cpu.courses import MAX_ROWS, each_changed, each_replayed, entry, follow, walk
from ggraph.backends.cpu.pages import LINE
from ggraph.backends.cpu.simd import F32, Kernel, Val, Var, kernel, vec

MAX_KEY = 256  # numbers of a key


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
        with k.if_else(entry(k, k.arg("past"), slot).ne(0)) as (known, new):
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

        each_replayed(self.k, slot, row)


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

        def on_the_way(t: Val) -> None:
            tile.advance(rows + t * width * 4)

        for t in k.loop(0, m):
            follow(k, t, last, MAX_ROWS, tile.base, on_the_way)
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

            walk(k, last, MAX_ROWS, lambda _: tile.base(slot), row)
            for i in k.loop(0, d):
                tile.store(tile.given(y, slot, i), tile.vectors(tile.row(i)))

        each_changed(k, state)

    _tiles(k, after)
