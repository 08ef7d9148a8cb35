"""y[m, n] = x[m, k] . W[n, k]^T (+ residual), for every packed layout.

A thread takes a share of the weight tiles and meets each tile with all rows of x, up to `ROWS` at a
time, so that unpacking is shared; of many rows, tile after tile as it gets done with one, so that a
thread whose processor is slower, or somebody else's for a while, takes fewer. A row's sums are
formed in the same order whatever m, the row's position or the thread count: bits never depend on
the batch.

Legend: m rows of x, n outputs, k inputs; M rows handled at once; d scale, z minimum; a part is
what one vector holds of a tile's outputs (8, or all 16 where vectors have 512 bits).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ggraph.backends.cpu.codegen import routine
from ggraph.backends.cpu.codegen.simd import F32X8, I64, STREAM, Kernel, Num, Val, kernel
from ggraph.backends.cpu.kernels import amx, opened
from ggraph.backends.cpu.kernels.blocks import FAR_AHEAD, ahead, blocks_of
from ggraph.backends.cpu.kernels.float_sums import FLOAT_AHEAD, FLOAT_ROWS, float_sums
from ggraph.backends.cpu.kernels.opened import GROUP_ROWS, Group
from ggraph.backends.cpu.kernels.passes import (
    ABREAST,
    ABREAST_ROWS,
    ROWS,
    Rows,
    homes,
    in_passes,
    near,
    of_height,
    rows_from,
    write_row,
)
from ggraph.backends.cpu.kernels.places import Places
from ggraph.backends.cpu.kernels.sums import add_block
from ggraph.backends.cpu.kernels.tiles import (
    ALL_LAYOUTS,
    BLOCK,
    HALF,
    TILE,
    FloatLayout,
    Layout,
    Packed,
)
from ggraph.backends.cpu.runtime.taking import taken

MOST = max(*ROWS.values(), *FLOAT_ROWS.values())
# Bytes between use and prefetch where `blocks.ahead` takes no more, or weights come from memory to
# the second cache: 2 KB are 7 to 9 % faster than its 8 there, on weights of 1.2 GB behind a third
# cache of 480 MB, and up to a quarter slower on weights that this keeps.
AHEAD = 2048
EACH_ARGS = "w x y n k m xs ys add adds count ws group xb"
ARGS = "w x y n k m xs ys add adds unit"
Pass = Callable[[Val, Val, Rows], None]  # home of the sums, tile, rows


def _codes_ahead(k: Kernel) -> Num:
    """Bytes between use and prefetch of codes."""
    if k.isa.bypasses:
        return ahead(k, AHEAD)
    return k.select(k.flag(STREAM), k.const(AHEAD, I64), FAR_AHEAD)


def quantised_pass(k: Kernel, layout: Layout, abreast: int = 1) -> Pass:
    """Sums of some rows with a tile, or with some abreast, from zero on, `near` while they grow."""

    def run(home: Val, tile: Val, rows: Rows) -> None:
        """Sums of these rows of x with the weights of `tile` and those abreast, left in `home`."""
        with near(k, homes(k, home, TILE * abreast, rows.count)) as sums:
            for own in sums:
                own.value = 0.0
            asked = _codes_ahead(k)
            tiles = [tile + tile_bytes(k, layout) * i for i in range(abreast)]
            for block, at in blocks_of(k, layout, tiles, asked):
                add_block(k, block, rows.at(at), sums)

    return run


def _float_pass(k: Kernel, layout: FloatLayout) -> Pass:
    def run(home: Val, tile: Val, rows: Rows) -> None:
        columns = ((c, rows.at(c * 4)) for c in k.loop(0, k.arg("k")))
        float_sums(k, layout, home, tile, rows.count, columns, ahead(k, FLOAT_AHEAD))

    return run


def tile_bytes(k: Kernel, layout: Packed) -> Val:
    """Bytes of a tile."""
    if isinstance(layout, FloatLayout):
        return k.arg("k") * (layout.tile * layout.element_bytes)
    return k.arg("k") // (BLOCK * layout.blocks) * layout.run_bytes


@dataclass(frozen=True)
class Walk:
    """How a layout is walked: rows of a tile, most and least ones of a pass, bytes of a tile, home
    of the sums, and whether a pass is called: that takes a fiftieth of the time in which a tile of
    codes comes from memory, and code that has several places once. And how whole heights of rows
    are, where the processor has tiles, or many rows, with blocks opened where unpacking takes turns
    with products, else tiles abreast, or few rows, where several places of memory are better."""

    tile: int
    rows: int
    least: int
    tile_bytes: Val
    home: Val
    run: Pass
    called: bool = False
    tiled: amx.Tiled | None = None
    opened: Group | None = None
    abreast: "Walk | None" = None
    places: Places | None = None

    def from_tile(self, first: Val) -> Callable[[Val], Val]:
        """The addresses of the tiles from the one there on, by number."""
        return lambda i: first + i * self.tile_bytes


@dataclass(frozen=True)
class Bases:
    """Where a product's matrix, rows, results and residual begin."""

    w: Val
    x: Val
    y: Val
    add: Val


def _write_tiles(
    k: Kernel, walk: Walk, y: Val, add: Val, rows: Val | int, tiles: Num = 1, apart: int = 0
) -> None:
    """Rows of y, as far as some whole tiles make them, whose sums lie `apart` bytes from another.
    Row after row: tile after tile every line is of another page, and nobody fetches it ahead."""
    ys, adds, nbytes = k.arg("ys"), k.arg("adds"), walk.tile * 4
    with k.if_else(add.ne(0)) as (some, none):
        for branch, residual in ((some, True), (none, False)):
            with branch:
                for r in k.loop(0, rows):
                    for i in k.loop(0, tiles):
                        for at in range(0, nbytes, HALF * 4):
                            value = k.load(walk.home + i * apart + r * nbytes + at, F32X8)
                            if residual:
                                value = value + k.load(add + adds * r + i * nbytes + at, F32X8)
                            k.store(y + ys * r + i * nbytes + at, value)


def _outputs(k: Kernel, walk: Walk, at: Bases, t: Val, first: Val) -> tuple[Val, Val]:
    """Where tile t writes of row `first`, and what is added to that, 0 for nothing."""
    ys, adds = k.words("ys adds")
    column = t * (walk.tile * 4)
    residual = k.select(at.add.eq(0), at.add, at.add + adds * first + column)
    return at.y + ys * first + column, residual


def _place(k: Kernel, walk: Walk, at: Bases, t: Val, first: Val) -> tuple[Val, Val]:
    """Addresses of tile t, and of row `first` of x."""
    return at.w + t * walk.tile_bytes, at.x + k.arg("xs") * first


def _write(k: Kernel, walk: Walk, at: Bases, t: Val, first: Val, count: Val | int) -> None:
    """Rows first .. first + count - 1 of y, as far as tile t makes them."""
    n, ys, adds = k.words("n ys adds")
    left, (out, residual) = n - t * walk.tile, _outputs(k, walk, at, t, first)
    with k.if_else(left >= walk.tile) as (whole, part):
        with whole:
            _write_tiles(k, walk, out, residual, count)
        with part:
            for r in k.loop(0, count):
                own = k.select(at.add.eq(0), at.add, residual + adds * r)
                home = walk.home + r * (walk.tile * 4)
                write_row(k, walk.tile, home, out + ys * r, own, left)


def _write_beside(
    k: Kernel, walk: Walk, at: Bases, tiles: tuple[Val, Val], first: Val, rows: Val,
    home: Val, apart: int,
) -> None:  # fmt: skip
    """The same of some tiles, whose sums lie `apart` bytes from another, from `home` on."""
    t, stop = tiles
    whole, (out, residual) = k.minimum(stop, k.arg("n") // TILE), _outputs(k, walk, at, t, first)
    _write_tiles(k, replace(walk, home=home), out, residual, rows, whole - t, apart)
    for i in k.loop(whole, stop):
        _write(k, replace(walk, home=home + (i - t) * apart), at, i, first, rows)


def _pass(k: Kernel, walk: Walk, count: int, tile: Val, x: Val) -> None:
    """So many rows of x, from the one at address `x` on, with the tile."""

    def body(home: Val, tile: Val, x: Val) -> None:
        walk.run(home, tile, Rows.evenly(k, x, k.arg("xs"), count))

    if walk.called:
        routine.call(k, f"{k.spec.name}_{walk.tile}_{count}", body, walk.home, tile, x)
    else:
        body(walk.home, tile, x)


def _groups(k: Kernel, walk: Walk, at: Bases, t: Val, begin: Num = 0) -> None:
    """All rows of x from row `begin` on with tile t."""
    for first, rows in in_passes(k, walk.rows, k.arg("m"), begin):
        weights, x = _place(k, walk, at, t, first)
        for count in of_height(k, rows, walk.rows, walk.least):
            _pass(k, walk, count, weights, x)
        _write(k, walk, at, t, first, rows)


def _opened_groups(k: Kernel, walk: Walk, group: Group, at: Bases, tiles: tuple[Val, Val]) -> None:
    """Many rows with some tiles, for a group of which a tile's blocks are opened once."""
    t, stop = tiles
    for first, rows in in_passes(k, GROUP_ROWS, k.arg("m")):
        weights, x = _place(k, walk, at, t, first)
        group.run(walk.from_tile(weights), stop - t, rows, rows_from(k, x))
        _write_beside(k, walk, at, tiles, first, rows, group.sums, opened.APART)


def _walk(k: Kernel, walk: Walk) -> None:
    """Loops over this thread's tiles and, for each, over groups of rows."""
    n, m, unit = k.words("n m unit")
    at, tiles = Bases(*k.words("w x y add")), (n + (walk.tile - 1)) // walk.tile
    if walk.tiled is not None:
        _high_walk(k, walk, walk.tiled, at, k.part(tiles, unit))
        return
    first, end = (k.var(bound) for bound in k.part(tiles, unit))
    with k.when(m >= opened.MANY):
        first.value = tiles  # nothing is left for the loops below, which have code of their own
        for t in _many_rows(k, walk, at, tiles):
            first.value = t
        end.value = tiles
    _few_rows(k, walk, at, (first.value, end.value))


def _few_rows(k: Kernel, walk: Walk, at: Bases, part: tuple[Val, Val]) -> None:
    """A part of the tiles, one by one, or some at once where several places are read."""
    places, (first, end) = walk.places, part
    if places is None:
        for t in k.loop(first, end):
            _groups(k, walk, at, t)
    elif places.most == walk.rows:
        for some in _some_tiles(k, places, part):
            _at_places(k, walk, places, at, some)
    else:
        with k.if_else(k.arg("m") <= places.most) as (few, more):
            with few:
                _at_places(k, walk, places, at, part)
            with more:
                for t in k.loop(first, end):
                    _groups(k, walk, at, t)


def _many_rows(k: Kernel, walk: Walk, at: Bases, tiles: Val) -> Iterator[Val]:
    """Many rows with such of the tiles as no other thread has taken. Gives the tile that is left to
    do, if this thread took it: where tiles come abreast the last one, if none is beside it."""
    if walk.opened is None:
        yield from _abreast_rows(k, walk, at, tiles)
        return
    m, least = k.arg("m"), opened.least(k.isa)
    with k.when(m >= least):
        for some in opened.sides(k, tiles):
            _opened_groups(k, walk, walk.opened, at, some)
    if walk.abreast is not None:
        with k.when(m < least):
            yield from _abreast_rows(k, walk, at, tiles)


def _abreast_rows(k: Kernel, walk: Walk, at: Bases, tiles: Val) -> Iterator[Val]:
    """The same without opening blocks."""
    if walk.abreast is None:
        for t in taken(k, tiles):
            _groups(k, walk, at, t)
        return
    for i in taken(k, (tiles + (ABREAST - 1)) // ABREAST):
        with k.if_else((i + 1) * ABREAST <= tiles) as (whole, rest):
            with whole:
                _groups(k, walk.abreast, at, i)
            with rest:
                yield i * ABREAST


def _high_walk(k: Kernel, walk: Walk, tiled: amx.Tiled, at: Bases, part: tuple[Val, Val]) -> None:
    """Any rows with a part of the tiles."""
    high = k.arg("m") // amx.HEIGHT * amx.HEIGHT
    assert walk.places is not None, "tiles are Intel's"
    for some in _some_tiles(k, walk.places, part):
        _high_groups(k, walk, tiled, at, some, high)
        _at_places(k, walk, walk.places, at, some, high)


def _some_tiles(k: Kernel, places: Places, part: tuple[Val, Val]) -> Iterator[tuple[Val, Val]]:
    """A part of the tiles by what a cache keeps for the next rows; all where there are no more."""
    first, end = part
    t, size = k.var(first), k.select(k.arg("m") <= places.most, end - first, amx.TILES)
    with k.while_(lambda: t.value < end):
        stop = k.minimum(t.value + size, end)
        yield t.value, stop
        t.value = stop


def _at_places(
    k: Kernel, walk: Walk, places: Places, at: Bases, tiles: tuple[Val, Val], begin: Num = 0
) -> None:
    """All rows of x from row `begin` on with some tiles at once, as many at a time as they take."""
    t, stop = tiles
    for first, rows in in_passes(k, places.most, k.arg("m"), begin):

        def write(i: Val, home: Val, first: Val = first, rows: Val = rows) -> None:
            _write(k, replace(walk, home=home), at, t + i, first, rows)

        weights, x = _place(k, walk, at, t, first)
        for count in of_height(k, rows, places.most):
            own = Rows.evenly(k, x, k.arg("xs"), count)
            places.run(weights, stop - t, own if count > 1 else Rows.anywhere(k, [x]), write)


def _high_groups(
    k: Kernel, walk: Walk, tiled: amx.Tiled, at: Bases, tiles: tuple[Val, Val], end: Val
) -> None:
    """The rows of x up to row `end`, whole heights, with some tiles."""
    t, stop = tiles
    for first in k.loop(k.const(0, I64), end, amx.MOST):
        rows = k.minimum(end - first, amx.MOST)
        weights, x = _place(k, walk, at, t, first)
        tiled.run(rows // amx.HEIGHT, walk.from_tile(weights), stop - t, rows_from(k, x))
        _write_beside(k, walk, at, tiles, first, rows, tiled.home, amx.APART)


def _walk_each(k: Kernel, walk: Walk) -> None:
    """The same for `count` products, `group` of which have one matrix."""
    n, m, count, ws, group, xb, ys, adds = k.words("n m count ws group xb ys adds")
    w, x, y, add = k.words("w x y add")
    tiles = (n + (walk.tile - 1)) // walk.tile
    for item in k.share(count * tiles):
        i = item // tiles
        residual = k.select(add.eq(0), add, add + i * m * adds)
        at = Bases(w + i // group * ws, x + i * xb, y + i * m * ys, residual)
        _groups(k, walk, at, item % tiles)


def _tiles_abreast(k: Kernel, layout: Layout, home: Val) -> Walk:
    """Many rows, of which `in_passes` never gives a pass fewer than half of the most."""
    run, size = quantised_pass(k, layout, ABREAST), tile_bytes(k, layout) * ABREAST
    return Walk(
        layout.tile * ABREAST, ABREAST_ROWS, ABREAST_ROWS // 2, size, home, run, called=True
    )


WalkRows = Callable[[Kernel, Walk], None]


def _build(k: Kernel, layout: Packed, walk_rows: WalkRows, most: int, at_places: int) -> None:
    size = tile_bytes(k, layout)
    rows = min((FLOAT_ROWS if isinstance(layout, FloatLayout) else ROWS)[k.isa.lanes], most)
    tiled = amx.takes(k.isa, layout)
    most_sums = amx.MOST * amx.TILES if tiled else max(rows, ABREAST * ABREAST_ROWS)
    home = k.scratch(most_sums * layout.tile * 4)
    places = Places.of(k, layout, size, min(rows, at_places)) if at_places else None
    least = 1 if places is None else 2
    if isinstance(layout, FloatLayout):
        run = _float_pass(k, layout)
        walk_rows(k, Walk(layout.tile, rows, least, size, home, run, called=True, places=places))
        return
    run = quantised_pass(k, layout)
    if not tiled:
        opens = opened.opens(k.isa, layout)
        group = Group.of(k, layout, ahead(k, AHEAD), add_block) if opens else None
        abreast = _tiles_abreast(k, layout, home) if k.isa.lanes > HALF else None
        again = group is None and abreast is None  # few and many rows are done alike
        walk = Walk(layout.tile, rows, least, size, home, run, again, None, group, abreast, places)
        walk_rows(k, walk)
        return
    many = k.arg("m") >= amx.HEIGHT
    with k.when(many):
        amx.configure_for(k, layout)
    tiles = amx.Tiled.of(k, layout, home)
    walk_rows(k, Walk(layout.tile, rows, least, size, home, run, tiled=tiles, places=places))
    with k.when(many):
        amx.release(k)


def register(
    name: str, args: str, layout: Packed, walk_rows: WalkRows, *, most: int = MOST,
    at_places: int = MOST,
) -> None:  # fmt: skip
    """Add the kernel of a layout that walks rows as it is told, up to `most` in a pass; up to
    `at_places` of them read weights at several places at once."""

    @kernel(args, name=name)
    def build(k: Kernel) -> None:
        _build(k, layout, walk_rows, most, at_places)


for _layout in ALL_LAYOUTS:
    register("matmul_" + _layout.name, ARGS, _layout, _walk)
    if isinstance(_layout, FloatLayout):
        register("matmul_each_" + _layout.name, EACH_ARGS, _layout, _walk_each, at_places=0)
