"""Kernels of gated delta nets and of state spaces, whose state is a matrix per head.

Legend: as in `courses.py`; H heads of values, G of keys, D numbers per key, V per value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, I64, Kernel, Val, Var, kernel, vec
from ggraph.backends.cpu.kernels.blocks import ask
from ggraph.backends.cpu.kernels.courses import (
    MAX_ROWS,
    each_changed,
    each_replayed,
    end_of,
    entry,
    follow,
    owners,
    slot_of_only_row,
    walk,
)
from ggraph.backends.cpu.kernels.elementwise import row_sum
from ggraph.backends.cpu.runtime.pages import LINE

MAX_KEY = 256  # numbers of a key
ABREAST = 4  # vectors of columns: between two rows all of them wait for the same sums
FEWER = ABREAST, 2, 1  # as many where values have no such width: Nemotron has some of 80 numbers
NET = (
    "state log rows y ends change parents replay past certain slots m heads groups d v width r "
    "limit"
)

Sums = list[Val]  # of some columns


def _row_of(k: Kernel, t: Val) -> Val:
    """Where a row of the step begins."""
    rows, width = k.words("rows width")
    return rows + t * width * 4


@dataclass(frozen=True)
class _Tile:
    """Columns j and on of head h's state, in the cache of a core: `count` vectors of `lanes` of
    each of its d rows. What happens to a column is the same whatever stands beside it."""

    k: Kernel
    corrects: bool
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

    def column(self, whole: Val) -> Val:
        """Where the columns stand among those of all heads."""
        return whole + (self.h * self.k.arg("v") + self.j) * 4

    def leave(self, whole: Val, slot: Val) -> None:
        """Put the columns where they stand in the whole state of a slot."""
        for i in self.k.loop(0, self.k.arg("d")):
            self.store(self.given(whole, slot, i), self.vectors(self.row(i)))

    def standing(self, slot: Val) -> Callable[[Val], Val]:
        """Where row i of a slot's whole state stands. Beside each row as many bytes of the next
        head are asked for, as they lie: memory gives less where columns are read one by one."""
        k, (state, heads, d, v) = self.k, self.k.words("state heads d v")
        nbytes = 4 * self.lanes * self.count
        ahead = state + (((slot * heads + self.h + 1) * v + self.j) * d) * 4

        def at(i: Val) -> Val:
            for line in range(0, nbytes, LINE):
                ask(k, ahead + (i * nbytes + line))
            return self.given(state, slot, i)

        return at

    def load(self, slot: Val) -> None:
        """A slot's columns, zeros where a text begins."""
        k, d, at = self.k, self.k.arg("d"), self.standing(slot)
        with k.if_else(entry(k, k.arg("past"), slot).ne(0)) as (known, new):
            with known:
                for i in k.loop(0, d):
                    self.store(self.row(i), self.vectors(at(i)))
            with new:
                for i in k.loop(0, d):
                    zero = k.const(0.0, vec(F32, self.lanes))
                    self.store(self.row(i), [zero] * self.count)

    def _sums(self, count: int, each: Callable[[Val, Sequence[Sequence[Var]]], None]) -> list[Sums]:
        """For each of `count` sums, every column's over rows i, which `each(i, sums)` adds to."""
        zero = self.k.const(0.0, vec(F32, self.lanes))
        sums = [[self.k.var(zero) for _ in range(self.count)] for _ in range(count)]
        for i in self.k.loop(0, self.k.arg("d")):
            each(i, sums)
        return [[total.value for total in own] for own in sums]

    def group(self, groups: Val) -> Val:
        """Whose keys and queries this head has."""
        return self.h % groups if self.corrects else self.h * groups // self.k.arg("heads")

    def key(self, row: Val) -> Val:
        """Where the key of this head's values begins in a row."""
        d, groups = self.k.words("d groups")
        return self.k.opaque(row + self.group(groups) * d * 4)

    def _add(self, vector: Val, i: Val, held: Sequence[Val], sums: Sequence[Var]) -> None:
        """What number i of a vector finds in row i of the state."""
        share = words.broadcast(self.k, vector + i * 4, self.lanes)
        for total, own in zip(sums, held, strict=True):
            total.value = words.fma(self.k, own, share, total.value)

    def query(self, t: Val) -> Val:
        """Where this head's query of a row of the step begins."""
        q, qs, d, groups = self.k.words("q qs d groups")
        return self.k.opaque(q + t * qs + self.group(groups) * d * 4)

    def asks(self, t: Val) -> list[Val]:
        """The vectors that find something in the state before a row of the step: its query, and
        its key of a net that corrects."""
        key = [self.key(_row_of(self.k, t))] if self.corrects else []
        return [self.query(t), *key]

    def find(self, at: Callable[[Val], Val], *vectors: Val) -> list[Sums]:
        """What vectors of d numbers find in the state, whose row i stands where `at` says."""

        def each(i: Val, sums: Sequence[Sequence[Var]]) -> None:
            held = self.vectors(at(i))
            for vector, own in zip(vectors, sums, strict=True):
                self._add(vector, i, held, own)

        return self._sums(len(vectors), each)

    def _meeting(self, a: Val, b: Val) -> Val:
        """One vector of d numbers times another."""
        k = self.k

        def eight(i: Val, left: Val | None) -> Val:
            return words.load_some(k, a + i * 4, left) * words.load_some(k, b + i * 4, left)

        return k.splat(row_sum(k, k.arg("d"), eight), self.lanes)

    def _parts(self, row: Val) -> tuple[Val, Val]:
        """Where a row's values begin, and its gates."""
        d, v, heads, groups = self.k.words("d v heads groups")
        values = row + groups * d * 4
        return values, values + heads * v * 4

    def fade(self, row: Val) -> Val:
        """What a row leaves of the state."""
        gate = words.broadcast(self.k, self._parts(row)[1] + self.h * 4)
        return self.k.splat(self.k.lane(words.exp(self.k, gate), 0), self.lanes)

    def change(self, row: Val, fade: Val, known: Sequence[Val] = ()) -> Sums:
        """What is added to the state where a row's key is 1, if that found `known` before."""
        (values, gates), heads = self._parts(row), self.k.arg("heads")
        beta = words.broadcast(self.k, gates + (heads + self.h) * 4, self.lanes)
        told = self.vectors(self.column(values))
        if self.corrects:
            return [(t - s * fade) * beta for t, s in zip(told, known, strict=True)]
        return [t * beta for t in told]

    def _changed(self, row: Val, fade: Val, change: Sums) -> Callable[[Val, Val], Sums]:
        """Row i of the state after a row, of what stands at an address before it."""
        key = self.key(row)

        def after(at: Val, i: Val) -> Sums:
            share = words.broadcast(self.k, key + i * 4, self.lanes)
            old = self.vectors(at)
            return [words.fma(self.k, share, c, o * fade) for c, o in zip(change, old, strict=True)]

        return after

    def correct(self, row: Val, fade: Val, change: Sums, *asked: Val) -> list[Sums]:
        """The state after a row that changes it so; what `asked` vectors find in it."""
        after = self._changed(row, fade, change)

        def each(i: Val, sums: Sequence[Sequence[Var]]) -> None:
            held = after(self.row(i), i)
            self.store(self.row(i), held)
            for vector, own in zip(asked, sums, strict=True):
                self._add(vector, i, held, own)

        return self._sums(len(asked), each)

    def correct_whole(self, whole: Val, slot: Val, row: Val, change: Sums) -> None:
        """The same where the columns stand in the whole state of a slot."""
        after = self._changed(row, self.fade(row), change)
        for i in self.k.loop(0, self.k.arg("d")):
            at = self.k.opaque(self.given(whole, slot, i))
            self.store(at, after(at, i))

    def tell(self, t: Val, found: Sums, known: Sequence[Val] = ()) -> tuple[Val, Sums]:
        """Store what row t's query finds, of what that and its key found in the state before it,
        and the row's change where that is asked for. Gives its fade and the change.

        What is found after a row is what was found before, faded, and the change times what the
        query has of the key: so an only row goes through the state once, where it stands."""
        k, row, (y, rank_1, heads, v) = self.k, _row_of(self.k, t), self.k.words("y change heads v")
        fade, share = self.fade(row), self._meeting(self.key(row), self.query(t))
        change = self.change(row, fade, known)
        with k.when(rank_1.ne(0)):
            self.store(self.column(rank_1), change)
        after = [words.fma(k, share, c, o * fade) for c, o in zip(change, found, strict=True)]
        self.store(self.column(y + t * heads * v * 4), after)
        return fade, change

    def advance(self, row: Val) -> None:
        """The state after a row."""
        fade = self.fade(row)
        known = self.find(self.row, self.key(row)) if self.corrects else []
        self.correct(row, fade, self.change(row, fade, *known))

    def base(self, slot: Val) -> None:
        """A slot's state after the replayed rows."""
        log, width = self.k.words("log width")
        self.load(slot)

        def row(at: Val) -> None:
            self.advance(log + at * width * 4)

        each_replayed(self.k, slot, row)


def _tiles(k: Kernel, corrects: bool, body: Callable[[_Tile], None]) -> None:
    """`body(tile)` for this thread's share: some of the widest vectors beside each other, so that
    whole lines of memory are used up, or eight columns where values have no such width. Only state
    spaces take widths between: no delta net is known that needs one."""
    heads, v = k.words("heads v")
    room = k.scratch(MAX_KEY * 4 * ABREAST * k.isa.lanes)

    def shared(lanes: int, count: int) -> None:
        width = lanes * count
        for item in k.share(heads * (v // width)):
            h, j = item // (v // width), item % (v // width) * width
            body(_Tile(k, corrects, room, h, j, lanes, count))

    def widest(counts: Sequence[int]) -> None:
        """As many vectors as values are made of, most first, or eight columns."""
        if not counts:
            shared(8, 1)
            return
        with k.if_else((v % (counts[0] * k.isa.lanes)).eq(0)) as (fits, odd):
            with fits:
                shared(k.isa.lanes, counts[0])
            with odd:
                widest(counts[1:])

    widest([ABREAST] if corrects else [n for n in FEWER if n * k.isa.lanes > 8])


def _walked(k: Kernel, tile: _Tile, slot: Val, last: Val) -> None:
    """A slot's state after the rows up to `last`."""
    walk(k, last, MAX_ROWS, lambda _: tile.base(slot), lambda t: tile.advance(_row_of(k, t)))


def _net(k: Kernel, corrects: bool) -> None:
    """y[t, h] = what q finds in head h of its text's state after row t; `ends`, unless 0, of the
    slots that the step changes = what delta_net_next makes of them; `change`, unless 0, = what the
    only row adds to the state where its key is 1."""
    owner, slot, first = owners(k), _changed_once(k), k.const(0, I64)

    def found(tile: _Tile) -> None:
        with k.if_else(slot >= 0) as (one, more):
            with one:
                tile.tell(first, *tile.find(tile.standing(slot), *tile.asks(first)))
            with more:
                _by_walk(tile, owner)

    _tiles(k, corrects, found)


def _by_walk(tile: _Tile, owner: Val) -> None:
    """The same of any rows, whose state is walked to."""
    k, (m, ends) = tile.k, tile.k.words("m ends")
    last, asked_for = k.var(m), k.var(-1)  # row that has found what is known
    zero = k.const(0.0, vec(F32, tile.lanes))
    known = [[k.var(zero) for _ in range(tile.count)] for _ in range(1 + tile.corrects)]

    def know(sums: Sequence[Sums]) -> None:
        for variables, values in zip(known, sums, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.value = value

    def elsewhere(slot: Val, end: Val) -> None:
        """A slot that ends in none of its own rows of the step."""
        own = k.load(owner + k.maximum(end, 0) * 8, I64)
        with k.when(k.select(end >= 0, own, -1).ne(slot)):
            _walked(k, tile, slot, end)
            tile.leave(ends, slot)
            last.value = k.select(end < 0, -1 - slot, m)

    with k.when(ends.ne(0)):
        each_changed(k, elsewhere)
    for t in k.loop(0, m):
        moved = follow(k, t, last, MAX_ROWS, tile.base, lambda t: tile.advance(_row_of(k, t)))
        with k.when(k.select(moved, t + 1, asked_for.value).ne(t)):
            know(tile.find(tile.row, *tile.asks(t)))
        fade, change = tile.tell(t, *([v.value for v in each] for each in known))
        row = _row_of(k, t)
        with k.if_else(t + 1 < m) as (more, end):
            with more:  # what the next row finds is found on the way
                know(tile.correct(row, fade, change, *tile.asks(t + 1)))
                asked_for.value = t + 1
            with end, k.when(ends.ne(0)):
                tile.correct(row, fade, change)
        slot = k.load(owner + t * 8, I64)
        with k.when(k.select(ends.ne(0), end_of(k, slot), -1).eq(t)):
            tile.leave(ends, slot)


def _changed_once(k: Kernel) -> Val:
    """The slot whose state differs by `change` alone after the step; -1 where there is none."""
    found = k.var(-1)
    with k.when(k.arg("change").ne(0)):  # else there may be no row
        found.value = slot_of_only_row(k)
    return found.value


def _net_next(k: Kernel, corrects: bool) -> None:
    """y, the state's own bytes = each slot's state after the rows that are text; they lie at `ends`
    already, unless that is 0, or a step's only row adds `change` to one, unless that is 0."""
    y, ends, change = k.words("y ends change")
    once = _changed_once(k)

    def after(tile: _Tile) -> None:
        def state(slot: Val, last: Val) -> None:
            with k.if_else(ends.ne(0)) as (known, unknown):
                with known:
                    for i in k.loop(0, k.arg("d")):
                        held = tile.vectors(tile.given(ends, slot, i))
                        tile.store(tile.given(y, slot, i), held)
                with unknown, k.if_else(slot.eq(once)) as (one, more):
                    with one:
                        tile.correct_whole(
                            y, slot, _row_of(k, last), tile.vectors(tile.column(change))
                        )
                    with more:
                        _walked(k, tile, slot, last)
                        tile.leave(y, slot)

        each_changed(k, state)

    _tiles(k, corrects, after)


kernel("q qs " + NET, name="delta_net")(partial(_net, corrects=True))
kernel(NET, name="delta_net_next")(partial(_net_next, corrects=True))
kernel("q qs " + NET, name="state_space")(partial(_net, corrects=False))
kernel(NET, name="state_space_next")(partial(_net_next, corrects=False))
