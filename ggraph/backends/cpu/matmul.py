"""y[m, n] = x[m, k] . W[n, k]^T (+ residual), for every packed layout.

A thread takes a share of the weight tiles and meets each tile with all rows of x, up to `ROWS` at a
time, so that unpacking is shared. A row's sums are formed in the same order whatever m, the row's
position or the thread count: bits never depend on the batch.

Legend: m rows of x, n outputs, k inputs; M rows handled at once; d scale, z minimum; a part is
what one vector holds of a tile's outputs (8, or all 16 where vectors have 512 bits).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from llvmlite import ir

from ggraph.backends.cpu import words
from ggraph.backends.cpu.simd import (
    F32,
    F32X8,
    I8,
    I32,
    I64,
    KERNELS,
    STREAM,
    Kernel,
    KernelSpec,
    Val,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.tiles import (
    BLOCK,
    GROUP,
    HALF,
    LAYOUTS,
    TILE,
    X_BLOCK,
    X_SCALE,
    X_SUM,
    FloatLayout,
    Layout,
    Packed,
)  # fmt: skip

ROWS = {8: 5, 16: 12}  # rows of x per pass, by lanes: vectors of 512 bits have twice the registers
FLOAT_ROWS = {8: 3, 16: 8}
AHEAD = 2048  # bytes between use and prefetch; from 8192 on, some lines have left the nearest cache
FLOAT_AHEAD = 1024  # the same for float weights, whose lines are used up faster
# The same where several rows multiply 512 bits: arithmetic and memory take about as long then, and
# what comes late adds to both.
FAR_AHEAD, FAR_ROWS = 8192, 3
ARGS = "w x y n k m xs ys add adds"
ID_ARGS = "w x y ids n k m u xs xu ys es experts"
Pass = Callable[[int, Val, Val], None]


def _parts(k: Kernel, tile: int = TILE) -> range:
    """The vectors that a tile's outputs are spread over."""
    return range(tile // k.isa.lanes)


def _floats(k: Kernel) -> ir.VectorType:
    return vec(F32, k.isa.lanes)


def _prefetch(k: Kernel, address: Val, nbytes: int) -> None:
    """Ask for the cache lines that `nbytes` at `address` touch: to be read once, or to be kept."""
    with k.if_else(k.flag(STREAM)) as (once, again):
        for branch, keep in ((once, 0), (again, 3)):
            with branch:
                for line in range(0, nbytes, 64):
                    at = k.pointer(address + line)
                    k.intrinsic("llvm.prefetch.p0", ir.VoidType(), at, I32(0), I32(keep), I32(1))


def _ahead(k: Kernel, count: int, few: int) -> int:
    """Bytes between use and prefetch in a pass of `count` rows; `few` in one of few."""
    return FAR_AHEAD if k.isa.lanes > HALF and count >= FAR_ROWS else few


def _codes(k: Kernel, layout: Layout, block: Val, group: int) -> list[Val]:
    """Weights of columns 4 * group .. + 3, one vector of bytes for each part of the tile."""
    width = k.isa.lanes * GROUP

    def load(stored: int) -> list[Val]:
        first = layout.codes_at + stored * TILE * GROUP
        return [k.load(block + (first + p * width), vec(I8, width)) for p in _parts(k)]

    raw = load(group % GROUP if layout.nibbles else group)
    if not layout.nibbles:
        return raw
    if group < BLOCK // GROUP // 2:
        codes = [words.low_nibbles(r) for r in raw]
    else:
        codes = [words.high_nibbles(k, r) for r in raw]
    if not layout.fifth:
        return codes
    planes = load(layout.groups)  # anew by every group: registers hold sums
    return [c | words.fifth_bits(k, p, group) for c, p in zip(codes, planes, strict=True)]


def _load_scales(k: Kernel, layout: Layout, first: Val) -> list[Val]:
    """A tile's scales or minimums as float32, by part."""
    lanes = k.isa.lanes
    at = [first + p * lanes * layout.scale_bytes for p in _parts(k)]
    if layout.scale_bytes == 2:
        return [words.load_f16(k, a, lanes) for a in at]
    return [k.load(a, _floats(k)) for a in at]


def _integer_sums(k: Kernel, layout: Layout, block: Val, rows: list[Val], sub: int) -> list[Val]:
    """For each (part, row) the int32 sums of code products over one scale's columns."""
    parts = _parts(k)
    offsets = [words.Offset(k, layout.signed) for _ in parts]
    dots = [[words.Dot(k, layout.bits, layout.signed) for _ in rows] for _ in parts]
    per_sub = BLOCK // GROUP // layout.subs
    for group in range(sub * per_sub, (sub + 1) * per_sub):
        weights = _codes(k, layout, block, group)
        for p in parts:
            offsets[p].step(weights[p])
        for r, x in enumerate(rows):
            four = words.broadcast4(k, x + GROUP * group, k.isa.lanes)
            for p in parts:
                dots[p][r].step(weights[p], four)
        words.Dot.settle([dots[p][r] for p in parts for r in range(len(rows))])
        k.keep_order()
    return [offsets[p].less(dots[p][r].result()) for p in parts for r in range(len(rows))]


def _minimums(k: Kernel, layout: Layout, block: Val) -> list[Val]:
    if layout.stored_minimum:
        return _load_scales(k, layout, block + layout.minimum_at)
    return [scales * float(-layout.zero) for scales in _load_scales(k, layout, block)]


def _block(k: Kernel, layout: Layout, block: Val, rows: list[Val], sums: list[Val]) -> None:
    """Add one block's products to the sums of every (part, row)."""
    kind, parts = _floats(k), _parts(k)
    for sub in range(layout.subs):
        ints = _integer_sums(k, layout, block, rows, sub)
        scales = _load_scales(k, layout, block + sub * TILE * layout.scale_bytes)
        totals = []
        for r, x in enumerate(rows):
            one = words.broadcast(k, x + X_SCALE, k.isa.lanes)
            for p in parts:
                product = k.cast("sitofp", ints[p * len(rows) + r], kind)
                home = sums[p * len(rows) + r]
                totals.append(words.fma(k, product, scales[p] * one, k.load(home, kind)))
            k.keep_order()
        if layout.has_minimum:
            k.keep_order()
            totals = _less_minimums(k, layout, block, rows, totals)
        for i, total in enumerate(totals):
            k.store(sums[i % len(parts) * len(rows) + i // len(parts)], total)


def _less_minimums(
    k: Kernel, layout: Layout, block: Val, rows: list[Val], totals: list[Val]
) -> list[Val]:
    """Totals of every (row, part) and what the minimums add."""
    minimums = _minimums(k, layout, block)
    sums = [words.broadcast(k, x + X_SUM, k.isa.lanes) for x in rows]
    n = len(minimums)
    return [words.fma(k, minimums[i % n], sums[i // n], total) for i, total in enumerate(totals)]


def _homes(k: Kernel, home: Val, tile: int, count: int) -> list[Val]:
    """Addresses of the sums of each (part, row); a row's outputs are contiguous."""
    lanes = k.isa.lanes
    return [home + (r * tile + p * lanes) * 4 for p in _parts(k, tile) for r in range(count)]


def _quantised_pass(k: Kernel, layout: Layout, home: Val) -> Pass:
    """The sums stay on the stack, one load and one store per block: registers hold codes."""
    blocks = k.arg("k") // BLOCK
    xs = k.arg("xs")

    def run(count: int, tile: Val, x: Val) -> None:
        """Sums of `count` rows from `x` with `tile`'s weights, left in `home`."""
        sums = _homes(k, home, TILE, count)
        for at in sums:
            k.store(at, k.const(0.0, _floats(k)))
        starts = [k.opaque(x + xs * r) for r in range(count)]
        ahead = _ahead(k, count, AHEAD)
        for b in k.loop(0, blocks):
            block = tile + b * layout.block_bytes
            _prefetch(k, block + ahead, layout.block_bytes)
            rows = [start + b * X_BLOCK for start in starts]
            _block(k, layout, block, rows, sums)

    return run


def _load_floats(k: Kernel, layout: FloatLayout, address: Val) -> Val:
    if layout.element == "f16":
        return words.load_f16(k, address, k.isa.lanes)
    if layout.element == "bf16":
        return words.load_bf16(k, address, k.isa.lanes)
    return k.load(address, _floats(k))


def _float_pass(k: Kernel, layout: FloatLayout, home: Val) -> Pass:
    columns, xs = k.words("k xs")
    step, parts = layout.element_bytes, _parts(k, layout.tile)

    def run(count: int, tile: Val, x: Val) -> None:
        """The same with float weights and float activations, sums in registers."""
        sums = [[k.var(0, _floats(k)) for _ in range(count)] for _ in parts]
        starts = [k.opaque(x + xs * r) for r in range(count)]
        ahead = _ahead(k, count, FLOAT_AHEAD)
        for c in k.loop(0, columns):
            at = tile + c * (layout.tile * step)
            _prefetch(k, at + ahead, layout.tile * step)
            ones = [words.broadcast(k, start + c * 4, k.isa.lanes) for start in starts]
            for p in parts:
                w = _load_floats(k, layout, at + p * k.isa.lanes * step)
                for total, one in zip(sums[p], ones, strict=True):
                    total.value = words.fma(k, w, one, total.value)
                k.keep_order()
        for at, total in zip(_homes(k, home, layout.tile, count), chain(*sums), strict=True):
            k.store(at, total.value)

    return run


def _write_row(k: Kernel, tile: int, home: Val, y: Val, add: Val, left: Val) -> None:
    """Store a row's outputs of a tile at `y`, adding the residual at `add` unless that is 0."""
    for h in range(tile // HALF):
        value = k.var(k.load(home + h * HALF * 4, F32X8))
        at = h * HALF * 4
        rest = left - h * HALF
        with k.when(add.ne(0)):
            value.value = value.value + words.load_tail(k, add + at, rest)
        with k.if_else(rest >= HALF) as (whole, part):
            with whole:
                k.store(y + at, value.value)
            with part:
                words.store_tail(k, y + at, value.value, rest)


@dataclass(frozen=True)
class Walk:
    """How a layout is walked: rows of a tile and of a pass, bytes of a tile, home of the sums."""

    tile: int
    rows: int
    tile_bytes: Val
    home: Val
    run: Pass


def _write_tile(k: Kernel, walk: Walk, y: Val, add: Val, count: int) -> None:
    """The same for `count` rows of a whole tile, without a question for each."""
    ys, adds = k.words("ys adds")
    with k.if_else(add.ne(0)) as (some, none):
        for branch, residual in ((some, True), (none, False)):
            with branch:
                for r in range(count):
                    for at in range(0, walk.tile * 4, HALF * 4):
                        value = k.load(walk.home + (r * walk.tile * 4 + at), F32X8)
                        if residual:
                            value = value + k.load(add + adds * r + at, F32X8)
                        k.store(y + ys * r + at, value)


def _group(k: Kernel, walk: Walk, t: Val, first: Val, count: int) -> None:
    """Rows first .. first + count - 1 of x with tile t."""
    w, x, y, n, xs, ys, add, adds = k.words("w x y n xs ys add adds")
    walk.run(count, w + t * walk.tile_bytes, x + xs * first)
    column, left = t * (walk.tile * 4), n - t * walk.tile
    out = y + ys * first + column
    residual = k.select(add.eq(0), add, add + adds * first + column)
    with k.if_else(left >= walk.tile) as (whole, part):
        with whole:
            _write_tile(k, walk, out, residual, count)
        with part:
            for r in k.loop(0, count):
                own = k.select(add.eq(0), add, residual + adds * r)
                home = walk.home + r * (walk.tile * 4)
                _write_row(k, walk.tile, home, out + ys * r, own, left)


def _next_rows(k: Kernel, walk: Walk, left: Val) -> Val:
    """Rows of the next pass: as many as it can take, but the last two passes share alike."""
    alike = k.select(left <= 2 * walk.rows - 2, (left + 1) // 2, walk.rows)
    return k.select(left <= walk.rows, left, alike)


def _groups(k: Kernel, walk: Walk, t: Val) -> None:
    """All rows of x with tile t."""
    m, first = k.arg("m"), k.var(0)
    with k.while_(lambda: first.value < m):
        rows = _next_rows(k, walk, m - first.value)
        for count in range(1, walk.rows + 1):
            with k.when(rows.eq(count)):
                _group(k, walk, t, first.value, count)
        first.value = first.value + rows


def _walk(k: Kernel, walk: Walk) -> None:
    """Loops over this thread's tiles and, for each, over groups of rows."""
    n = k.arg("n")
    for t in k.share((n + (walk.tile - 1)) // walk.tile):
        _groups(k, walk, t)


def _walk_experts(k: Kernel, walk: Walk) -> None:
    """The same for m pairs of a token and one of its u experts, each with that expert's tiles.

    An id that is no expert's gives a row that is not a number.
    """
    w, x, y, ids, n, m, u = k.words("w x y ids n m u")
    xs, xu, ys, es, experts = k.words("xs xu ys es experts")
    for t in k.share((n + (walk.tile - 1)) // walk.tile):
        column, left = t * (walk.tile * 4), n - t * walk.tile
        for pair in k.loop(0, m):
            expert = k.cast("sext", k.load(ids + pair * 4, I32), I64)
            known = k.select(expert >= 0, k.select(expert < experts, k.const(1, I64), 0), 0)
            with k.if_else(known.ne(0)) as (some, none):
                with some:
                    weights = w + es * expert + t * walk.tile_bytes
                    walk.run(1, weights, x + xs * (pair // u) + xu * (pair % u))
                with none:
                    for at in _homes(k, walk.home, walk.tile, 1):
                        k.store(at, k.const(float("nan"), _floats(k)))
            _write_row(k, walk.tile, walk.home, y + ys * pair + column, k.const(0, I64), left)


def _build(k: Kernel, layout: Packed, walk_rows: Callable[[Kernel, Walk], None]) -> None:
    columns = k.arg("k")
    rows = (FLOAT_ROWS if isinstance(layout, FloatLayout) else ROWS)[k.isa.lanes]
    home = k.scratch(rows * layout.tile * 4)
    if isinstance(layout, FloatLayout):
        size = columns * (layout.tile * layout.element_bytes)
        run = _float_pass(k, layout, home)
    else:
        size = columns // BLOCK * layout.block_bytes
        run = _quantised_pass(k, layout, home)
    walk_rows(k, Walk(layout.tile, rows, size, home, run))


def _register(
    name: str, args: str, layout: Packed, walk_rows: Callable[[Kernel, Walk], None]
) -> KernelSpec:
    def build(k: Kernel) -> None:
        _build(k, layout, walk_rows)

    KERNELS[name] = KernelSpec(name, tuple(args.split()), build)
    return KERNELS[name]


MATMUL = {a.name: _register("matmul_" + a.name, ARGS, a, _walk) for a in LAYOUTS.values()}
MATMUL_ID = {
    a.name: _register("matmul_id_" + a.name, ID_ARGS, a, _walk_experts) for a in LAYOUTS.values()
}
