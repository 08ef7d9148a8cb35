"""y[pair, n] = x[row of pair, k] . W[expert of pair, n, k]^T: products with chosen experts.

Legend: a pair is a token and one of its u experts; m pairs; t number of a tile of outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ggraph.backends.cpu.codegen import routine, words
from ggraph.backends.cpu.codegen.simd import I32, I64, Kernel, Num, Val
from ggraph.backends.cpu.kernels import amx, opened
from ggraph.backends.cpu.kernels.matmul import Walk, register
from ggraph.backends.cpu.kernels.opened import GROUP_ROWS, MANY, SIDE, Group
from ggraph.backends.cpu.kernels.passes import (
    ABREAST,
    Rows,
    homes,
    in_passes,
    of_height,
    write_row,
)
from ggraph.backends.cpu.kernels.places import Places
from ggraph.backends.cpu.kernels.tiles import ALL_LAYOUTS
from ggraph.backends.cpu.runtime.taking import Taking

ARGS = "w x y ids n k m u xs xu ys es experts"
SORTED = 4096  # pairs that are put in order at once; each time the weights are read anew
BUCKETS = 256  # experts whose pairs are counted at once
HIGH = 24  # pairs of an expert that are worth AMX
MOST_ROWS = 6  # every count of rows is code of its own


def _known(k: Kernel, expert: Val) -> Val:
    """Whether an id is an expert's."""
    return words.within(k, expert, k.arg("experts"))


def _by_expert(k: Kernel, first: Val, count: Val) -> tuple[Val, Val]:
    """Address of `count` pairs from `first` on, int32, those of one expert behind one another,
    those of no expert last. And where the address of each one's row of x lies: every tile meets
    them, and takes no time to divide."""
    order, rows, places = (k.scratch(size) for size in (SORTED * 4, SORTED * 8, BUCKETS * 8))
    experts, placed = k.arg("experts"), k.var(0)

    def each_of(base: Val) -> Iterator[tuple[Val, Val]]:
        """The pairs of some experts, each with the address of what is noted for its expert."""
        for pair in k.loop(first, first + count):
            own = k.cast("sext", k.load(k.arg("ids") + pair * 4, I32), I64)
            bucket = k.select(_known(k, own), own, experts) - base
            with k.when(words.within(k, bucket, k.const(BUCKETS, I64))):
                yield pair, places + bucket * 8

    for base in k.loop(0, experts + 1, BUCKETS):
        buckets = k.minimum(experts + 1 - base, BUCKETS)
        for bucket in k.loop(0, buckets):
            k.store(places + bucket * 8, k.const(0, I64))
        for _, at in each_of(base):
            k.store(at, k.load(at, I64) + 1)
        for bucket in k.loop(0, buckets):
            begin, at = placed.value, places + bucket * 8
            placed.value = begin + k.load(at, I64)
            k.store(at, begin)
        for pair, at in each_of(base):
            place = k.load(at, I64)
            k.store(order + place * 4, k.cast("trunc", pair, I32))
            k.store(rows + place * 8, _row_of(k, pair))
            k.store(at, place + 1)
    return order, rows


def _alike(k: Kernel, order: Val, at: Val, count: Val) -> tuple[Val, Val]:
    """The expert of the pair at `at`, and how many from there on have the same."""
    ids, found = k.arg("ids"), k.var(1)

    def expert(i: Val) -> Val:
        pair = k.cast("sext", k.load(order + i * 4, I32), I64)
        return k.cast("sext", k.load(ids + pair * 4, I32), I64)

    def more() -> Val:
        following = k.minimum(at + found.value, count - 1)
        return (at + found.value < count) & expert(following).eq(own)

    own = expert(at)
    with k.while_(more):
        found.value = found.value + 1
    return own, found.value


@dataclass(frozen=True)
class Chosen:
    """Pairs of one expert, or of none: `count` of them, whose numbers begin at `order`, and the
    addresses of their rows of x at `rows`."""

    k: Kernel
    expert: Val
    order: Val
    rows: Val
    count: Val

    def part(self, first: Val, count: Val) -> "Chosen":
        """So many of them, from one on."""
        order, rows = self.order + first * 4, self.rows + first * 8
        return replace(self, order=order, rows=rows, count=count)

    def pair(self, i: Num) -> Val:
        """Number i's number of a pair."""
        return self.k.cast(
            "sext", self.k.load(self.order + self.k.same(i, self.order) * 4, I32), I64
        )

    def row(self, i: Num) -> Val:
        """Address of its row of x."""
        return self.k.load(self.rows + self.k.same(i, self.rows) * 8, I64)


Part = tuple[Val, Val]  # of an expert's tiles, or of what they are taken as: first and end


@dataclass(frozen=True)
class Doing:
    """What is done with the pairs of an expert: `items` of its tiles, or of some together. Those of
    `least` pairs or more are shared out by `each`, as threads get done, and `many` gives the item
    of a part that it leaves to do; else a thread has its part, of which `few` does all."""

    items: Val
    each: Num
    least: int
    many: Callable[[Part, Chosen], Iterator[Val]]
    few: Callable[[Part, Chosen], None]


def each_expert(k: Kernel, do: Doing) -> None:
    """The m pairs of a token and one of its u experts, those of an expert together, one expert
    behind the other as memory likes it."""
    m, items = k.arg("m"), do.items
    done, at = k.var(0), k.var(0)
    pieces, count = Taking(k), k.var(0)
    with k.while_(lambda: done.value < m):
        some = k.minimum(m - done.value, SORTED)
        (order, rows), at.value = _by_expert(k, done.value, some), 0
        with k.while_(lambda: at.value < some):
            expert, alike = _alike(k, order, at.value, some)
            own = Chosen(k, expert, order, rows, some).part(at.value, alike)
            first, end = (k.var(bound) for bound in k.part(items))
            with k.when(_known(k, expert) & (alike >= do.least)):
                before, first.value = count.value, items
                count.value = before + (items + (do.each - 1)) // do.each
                for piece in pieces.before(count.value):
                    begin = (piece - before) * do.each
                    for item in do.many((begin, k.minimum(begin + do.each, items)), own):
                        first.value = item
                end.value = items
            do.few((first.value, end.value), own)
            at.value = at.value + alike
        done.value = done.value + some
    pieces.finish(count.value)


def _walk_experts(k: Kernel, walk: Walk) -> None:
    """Each pair with its expert's tiles; a tile meets all rows that want it, as many at a time as a
    pass takes.

    An id that is no expert's gives a row that is not a number.
    """
    tiles = (k.arg("n") + (walk.tile - 1)) // walk.tile
    many, few = partial(_many_rows, k, walk), partial(_few_rows, k, walk)
    least = MANY if walk.tiled is None else HIGH
    each_expert(k, Doing(tiles, _each(walk, tiles), least, many, few))


def _each(walk: Walk, tiles: Val) -> Num:
    """Tiles of a piece: those whose results are written together, or come abreast; with AMX some
    that are alike, for each of which rows are laid out."""
    if walk.tiled is None:
        return ABREAST if walk.opened is None else SIDE
    pieces = (tiles + (amx.TILES - 1)) // amx.TILES
    return (tiles + (pieces - 1)) // pieces


def _few_rows(k: Kernel, walk: Walk, tiles: Part, own: Chosen) -> None:
    """Pairs of one expert with some of its tiles, one by one."""
    if walk.places is None:
        for t in k.loop(*tiles):
            _rows(k, walk, t, own)
        return
    with k.if_else(own.count.eq(1)) as (one, more):
        with one:
            _one_pair(k, walk, walk.places, tiles, own)
        with more:
            for t in k.loop(*tiles):
                _rows(k, walk, t, own)


def _many_rows(k: Kernel, walk: Walk, tiles: Part, own: Chosen) -> Iterator[Val]:
    """Many pairs of an expert that there is with a piece of its tiles. Gives the tile that is left
    to do: the last one, where tiles come abreast and it has none beside it."""
    first, end = tiles
    tile_at = walk.from_tile(k.arg("w") + expert_at(k, own) + first * walk.tile_bytes)
    if walk.tiled is not None:
        for some in high_rows(k, walk.tiled, own, tile_at, end - first):
            _write_pairs(k, walk, tiles, some, walk.tiled.home, amx.APART)
        return
    if walk.opened is None:
        yield from _abreast_rows(k, walk, tiles, own)
        return
    least = opened.least(k.isa)
    with k.when(own.count >= least):
        for some in opened_rows(k, walk.opened, own, tile_at, end - first):
            _write_pairs(k, walk, tiles, some, walk.opened.sums, opened.APART)
    if walk.abreast is not None:
        with k.when(own.count < least):
            yield from _abreast_rows(k, walk, tiles, own)


def _abreast_rows(k: Kernel, walk: Walk, tiles: Part, own: Chosen) -> Iterator[Val]:
    """Pairs of an expert with a piece of its tiles, abreast where these can be. Gives the one that
    has none beside it."""
    first, end = tiles
    if walk.abreast is None:
        for t in k.loop(first, end):
            _rows(k, walk, t, own)
        return
    for i in k.loop(first // ABREAST, end // ABREAST):
        _rows(k, walk.abreast, i, own)
    with k.when((end % ABREAST).ne(0)):
        yield end - 1


def high_rows(
    k: Kernel, tiled: amx.Tiled, own: Chosen, tile_at: Callable[[Val], Val], tiles: Val
) -> Iterator[Chosen]:
    """Many pairs of an expert with some tiles, by AMX: the last height is filled up with the last
    pair. Gives pairs as their sums are made."""
    for first in k.loop(k.const(0, I64), own.count, amx.MOST):
        some = own.part(first, k.minimum(own.count - first, amx.MOST))
        heights = (some.count + (amx.HEIGHT - 1)) // amx.HEIGHT
        tiled.run(heights, tile_at, tiles, partial(_row_or_last, some))
        yield some


def _row_or_last(some: Chosen, i: Val) -> Val:
    return some.row(some.k.minimum(i, some.count - 1))


def opened_rows(
    k: Kernel, group: Group, own: Chosen, tile_at: Callable[[Val], Val], tiles: Val
) -> Iterator[Chosen]:
    """The same with tiles that are opened for a group of pairs at a time."""
    for some in pairs_in_passes(k, GROUP_ROWS, own):
        group.run(tile_at, tiles, some.count, some.row)
        yield some


def expert_at(k: Kernel, own: Chosen) -> Val:
    """Bytes from the first expert's matrix to this one's."""
    return k.arg("es") * own.expert


def _one_pair(k: Kernel, walk: Walk, places: Places, tiles: Part, own: Chosen) -> None:
    """The only pair of an expert with some of its tiles."""
    (first, end), weights, pair = tiles, k.arg("w") + expert_at(k, own), own.pair(0)
    with k.if_else(_known(k, own.expert)) as (some, none):
        with some:
            row = Rows.anywhere(k, [own.row(0)])
            places.run(
                weights + first * walk.tile_bytes, end - first, row,
                lambda i, home: _write_pair(k, walk, first + i, pair, home),
            )  # fmt: skip
        with none:
            _no_numbers(k, walk, 1)
            for t in k.loop(first, end):
                _write_pair(k, walk, t, pair, walk.home)


def _no_numbers(k: Kernel, walk: Walk, count: int) -> None:
    """Sums of rows that no expert was chosen for."""
    for held in homes(k, walk.home, walk.tile, count):
        held.value = float("nan")


def _write_pairs(k: Kernel, walk: Walk, tiles: Part, own: Chosen, home: Val, apart: int) -> None:
    """Outputs of some pairs by some tiles, whose sums lie `apart` bytes from another."""
    for i in k.loop(0, own.count):
        for t in k.loop(*tiles):
            at = home + (t - tiles[0]) * apart + i * (walk.tile * 4)
            _write_pair(k, walk, t, own.pair(i), at)


def _row_of(k: Kernel, pair: Val) -> Val:
    """Address of a pair's row of x."""
    x, u, xs, xu = k.words("x u xs xu")
    return x + xs * (pair // u) + xu * (pair % u)


def _write_pair(k: Kernel, walk: Walk, t: Val, pair: Val, home: Val) -> None:
    """A pair's outputs of tile t."""
    y, n, ys = k.words("y n ys")
    out, left = y + ys * pair + t * (walk.tile * 4), n - t * walk.tile
    write_row(k, walk.tile, home, out, k.const(0, I64), left)


def _rows(k: Kernel, walk: Walk, t: Val, own: Chosen) -> None:
    """All pairs of one expert with its tile t."""
    weights = k.arg("w") + expert_at(k, own) + t * walk.tile_bytes
    for some in pairs_in_passes(k, walk.rows, own):
        expert_passes(k, walk, weights, some)
        for i in k.loop(0, some.count):
            _write_pair(k, walk, t, some.pair(i), walk.home + i * (walk.tile * 4))


def pairs_in_passes(k: Kernel, most: int, own: Chosen) -> Iterator[Chosen]:
    """Pairs of an expert, as many at a time as a pass takes."""
    return (own.part(*some) for some in in_passes(k, most, own.count))


def expert_passes(k: Kernel, walk: Walk, weights: Val, own: Chosen) -> None:
    """The sums of the pairs of a pass with the tile at `weights`."""
    for count in of_height(k, own.count, walk.rows, walk.least):
        _expert_pass(k, walk, weights, own, count)


def _expert_pass(k: Kernel, walk: Walk, weights: Val, own: Chosen, count: int) -> None:
    def body(home: Val, tile: Val, *rows: Val) -> None:
        walk.run(home, tile, Rows.anywhere(k, rows))

    with k.if_else(_known(k, own.expert)) as (some, none):
        with some:
            rows = [own.row(i) for i in range(count)]
            if walk.called:
                name = f"{k.spec.name}_{walk.tile}_{count}"
                routine.call(k, name, body, walk.home, weights, *rows)
            else:
                body(walk.home, weights, *rows)
        with none:
            _no_numbers(k, walk, count)


for _layout in ALL_LAYOUTS:  # of a mixture's few pairs hardly any share an expert
    _name = "matmul_id_" + _layout.name
    register(_name, ARGS, _layout, _walk_experts, most=MOST_ROWS, at_places=1)
