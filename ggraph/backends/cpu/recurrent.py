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

    def _gate(self, row: Val) -> tuple[Val, Val, Val]:
        """A row's key and values, and by what the state fades."""
        k, (d, v, heads, groups) = self.k, self.k.words("d v heads groups")
        key, values = row + (self.h % groups) * d * 4, row + groups * d * 4
        gate = words.exp(k, words.broadcast(k, values + (heads * v + self.h) * 4))
        return key, values, k.splat(k.lane(gate, 0), self.lanes)

    def change_at(self, t: Val) -> Val:
        """Where the change that row t makes in these columns is kept, as told to its key."""
        heads, v, changes = self.k.words("heads v changes")
        return changes + ((t * heads + self.h) * v + self.j) * 4

    def repeat(self, row: Val, t: Val) -> None:
        """The state after row t of the step, whose change is known."""
        k, (key, _, fade) = self.k, self._gate(row)
        change = self.vectors(self.change_at(t))
        for i in k.loop(0, k.arg("d")):
            share = words.broadcast(k, key + i * 4, self.lanes)
            pairs = zip(change, self.vectors(self.row(i)), strict=True)
            self.store(self.row(i), [words.fma(k, share, c, o * fade) for c, o in pairs])

    def advance(self, row: Val, q: Val | None = None, t: Val | None = None) -> list[Val]:
        """The state after a row; what q finds in it, where q is given. The change is kept where the
        row is row t of the step."""
        k, (v, heads) = self.k, self.k.words("v heads")
        key, values, fade = self._gate(row)
        beta = words.broadcast(k, values + (heads * v + heads + self.h) * 4, self.lanes)

        def seen(i: Val, totals: list[Var]) -> None:
            share = words.broadcast(k, key + i * 4, self.lanes)
            for total, held in zip(totals, self.vectors(self.row(i)), strict=True):
                total.value = words.fma(k, held, share, total.value)

        known = self._sums(seen)
        told = self.vectors(values + (self.h * v + self.j) * 4)
        change = [(one - s * fade) * beta for one, s in zip(told, known, strict=True)]
        if t is not None:
            with k.when(k.arg("changes").ne(0)):
                self.store(self.change_at(t), change)

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


def _delta(k: Kernel, each: Callable[[_Tile, Val, Val], object]) -> None:
    """`each(tile, address of a row, its number)` for all rows of the step, in a state that is as
    the row finds it."""
    rows, m, width = k.words("rows m width")

    def found(tile: _Tile) -> None:
        last = k.var(m)

        def on_the_way(t: Val) -> None:
            tile.advance(rows + t * width * 4)

        for t in k.loop(0, m):
            follow(k, t, last, tile.base, on_the_way)
            each(tile, rows + t * width * 4, t)

    _tiles(k, found)


@kernel("state log rows q y changes parents replay past slots m heads groups d v width r limit")
def delta_net(k: Kernel) -> None:
    """y[t, h] = what q finds in head h of its text's state after row t; changes[t, h] = what is
    told to the row's key there, unless `changes` is 0."""
    q, y, heads, groups, d, v = k.words("q y heads groups d v")

    def each(tile: _Tile, row: Val, t: Val) -> None:
        asked = q + (t * groups + tile.h % groups) * d * 4
        given = tile.advance(row, asked, t)
        tile.store(y + ((t * heads + tile.h) * v + tile.j) * 4, given)

    _delta(k, each)


@kernel("state log rows changes parents replay past slots m heads groups d v width r limit")
def delta_net_changes(k: Kernel) -> None:
    """The changes alone."""
    _delta(k, lambda tile, row, t: tile.advance(row, None, t))


@kernel(
    "state log rows y changes parents replay past certain slots m heads groups d v width r limit"
)
def delta_net_next(k: Kernel) -> None:
    """y, the state's own bytes = each slot's state after the rows that are text, whose changes are
    known."""
    rows, y, d, width = k.words("rows y d width")

    def after(tile: _Tile) -> None:
        def state(slot: Val, last: Val) -> None:
            def row(t: Val) -> None:
                tile.repeat(rows + t * width * 4, t)

            walk(k, last, MAX_ROWS, lambda _: tile.base(slot), row)
            for i in k.loop(0, d):
                tile.store(tile.given(y, slot, i), tile.vectors(tile.row(i)))

        each_changed(k, state)

    _tiles(k, after)
