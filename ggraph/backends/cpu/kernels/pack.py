"""Kernels that turn raw GGUF rows into tiles, and tiles back into float rows.

`pack_<type>` fills the tiles of `tiles.py` from the checkpoint's bytes; `rows_<layout>` dequantises
chosen rows of a packed matrix (embedding lookup), bit-exact to the `gguf` package.

Legend: n rows, k columns; a row's lane is its number within the tile.
"""

from collections.abc import Iterator, Sequence

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import (
    F32,
    F32X8,
    I8,
    I16,
    I32,
    I64,
    Kernel,
    Val,
    kernel,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.kernels.blocks import Block
from ggraph.backends.cpu.kernels.codes import READERS, Codes
from ggraph.backends.cpu.kernels.elements import number
from ggraph.backends.cpu.kernels.grids import GRIDDED
from ggraph.backends.cpu.kernels.tiles import (
    ALL_LAYOUTS,
    BLOCK,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    HALF,
    LAYOUTS,
    TILE,
    FloatLayout,
    Layout,
    Scale,
)
from ggraph.dtype import DType

READ = READERS | GRIDDED
PACK_ARGS = "raw out n k row_bytes"
ROWS_ARGS = "w ids y n k m ys"
NOT_A_NUMBER = float("nan")
OF_EACH = 0x01010101  # a bit of each of the four codes in a word
WORDS = vec(I32, GROUPS)
PIECE = 16  # bytes of a row of plain numbers that are turned at once


def _word_at(block: Block, lane: Val, stored: int) -> Val:
    """Address of the four bytes of `lane` in a stored group."""
    return block.codes_at + stored * GROUP_BYTES + lane * GROUP


def _staged(k: Kernel, layout: Layout, codes: Val, to: Val, lane: Val) -> None:
    """Put the words of a row's block into the stage: per plane, row by row."""
    codes, low = k.cast("bitcast", codes, WORDS), 0
    for bits in layout.planes:
        plane, count = (codes >> low) & (((1 << bits) - 1) * OF_EACH), GROUPS
        while count > bits:  # the second half of the groups lies above the first
            count //= 2
            halves = [k.shuffle(plane, plane, range(i, i + count)) for i in (0, count)]
            plane = halves[0] | (halves[1] << count)
        k.store(to + lane * (bits * GROUP), plane)
        low, to = low + bits, to + bits * GROUP_BYTES


def _store_numbers(k: Kernel, block: Block, lane: Val, read: Codes) -> None:
    """Put scales and minimum of one row's block into its lane of the tile; of a tile's rows those
    of the first half come first."""
    size = lane * block.layout.scale.nbytes
    if block.layout.scale is Scale.SIX:
        assert read.minimum is not None, block.layout.name
        k.store(block.scales_of(0) + lane, read.scales[0] | ((read.minimum >> 4) << 6))
        at, lower = block.minimum_at + lane % HALF, read.minimum & 15
        k.store(at, k.select(lane < HALF, lower, k.load(at, I8) | (lower << 4)))
        return
    for sub, scale in enumerate(read.scales):
        k.store(block.scales_of(sub) + size, scale)
    if read.minimum is not None:
        k.store(block.minimum_at + size, read.minimum)


def apart(k: Kernel, rows: Sequence[Val]) -> list[Val]:
    """Lane s of each group of len(rows) lanes, for every s: rows turned to columns by halving."""
    if len(rows) == 1:
        return list(rows)
    lanes = rows[0].v.type.count
    pairs = [(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    halves = ([k.shuffle(a, b, range(i, 2 * lanes, 2)) for a, b in pairs] for i in (0, 1))
    even, odd = (apart(k, half) for half in halves)
    return [v for pair in zip(even, odd, strict=True) for v in pair]


def _store_codes(k: Kernel, block: Block, stage: Val) -> None:
    """Turn the staged words of a tile's rows into groups."""
    line, at = vec(I32, TILE), 0
    for bits in block.layout.planes:
        rows = [k.load(stage + at + i * GROUP_BYTES, line) for i in range(bits)]
        for i, group in enumerate(apart(k, rows)):
            k.store(block.codes_at + at + i * GROUP_BYTES, group)
        at += bits * GROUP_BYTES


def _fill_zero(k: Kernel, address: Val, nbytes: Val | int) -> None:
    for i in k.loop(0, nbytes):
        k.store(address + i, k.const(0, I8))


def _pack_tile(k: Kernel, dtype: DType, layout: Layout, stage: Val, tile: Val, first: Val) -> None:
    raw, n, row_bytes, columns = k.words("raw n row_bytes k")
    read, step = READ[dtype], layout.codes_bytes
    each = dtype.block // BLOCK  # blocks of a block of the file, which is a run, or some of them
    runs = columns // (BLOCK * layout.blocks)
    with k.when(first + TILE > n):  # padding rows stay zero
        _fill_zero(k, tile, runs * layout.run_bytes)
        _fill_zero(k, stage, each * step)
    last = k.minimum(n - first, k.const(TILE, I64))
    for i in k.loop(0, columns // dtype.block):
        run = tile + i * (each // layout.blocks * layout.run_bytes)
        blocks = [
            Block(k, layout, run + own * layout.run_bytes, k.const(j, I64))
            for own in range(each // layout.blocks)
            for j in range(layout.blocks)
        ]
        for lane in k.loop(0, last):
            at = raw + (first + lane) * row_bytes + i * dtype.block_bytes
            for j, block in enumerate(blocks):
                found = read(k, at, j)
                _staged(k, layout, found.codes, stage + j * step, lane)
                _store_numbers(k, block, lane, found)
                for s, value in enumerate(found.supers if j == 0 else ()):
                    k.store(run + s * (2 * TILE) + lane * 2, value)
        for j, block in enumerate(blocks):
            _store_codes(k, block, stage + j * step)


def _pack_quantised(k: Kernel, dtype: DType, layout: Layout) -> None:
    out, n, columns = k.words("out n k")
    stage = k.scratch(dtype.block // BLOCK * layout.codes_bytes)
    step = columns // (BLOCK * layout.blocks) * layout.run_bytes
    for t in k.share((n + (TILE - 1)) // TILE):
        _pack_tile(k, dtype, layout, stage, out + t * step, t * TILE)


def _pack_float(k: Kernel, layout: FloatLayout) -> None:
    raw, out, n, columns, row_bytes = k.words("raw out n k row_bytes")
    size, tile_rows = layout.element_bytes, layout.tile
    number = I16 if size == 2 else I32
    each = PIECE // size
    stage, whole = k.scratch(tile_rows * PIECE), columns // each * each
    for t in k.share((n + (tile_rows - 1)) // tile_rows):
        tile, first = out + t * (columns * (tile_rows * size)), t * tile_rows
        last = k.minimum(n - first, k.const(tile_rows, I64))
        with k.when(last < tile_rows):  # padding rows become zero
            _fill_zero(k, stage, tile_rows * PIECE)
        for c in k.loop(0, whole, each):
            for lane in k.loop(0, last):
                source = raw + (first + lane) * row_bytes + c * size
                k.store(stage + lane * PIECE, k.load(source, vec(I8, PIECE)))
            kind, line = vec(number, tile_rows), tile_rows * size
            rows = [k.load(stage + i * line, kind) for i in range(each)]
            for i, column in enumerate(apart(k, rows)):
                k.store(tile + (c + i) * line, column)
        for lane in k.loop(0, tile_rows):
            row = first + lane
            inside = row < n
            source = raw + k.select(inside, row, 0) * row_bytes
            for c in k.loop(whole, columns):
                value = k.load(source + c * size, number)
                k.store(tile + (c * tile_rows + lane) * size, k.select(inside, value, 0))


def _register_pack(dtype: DType, layout: Layout | FloatLayout) -> None:
    @kernel(PACK_ARGS, name=f"pack_{dtype.name}")
    def build(k: Kernel) -> None:
        if isinstance(layout, FloatLayout):
            _pack_float(k, layout)
        else:
            _pack_quantised(k, dtype, layout)


def _load_codes(k: Kernel, block: Block, lane: Val) -> Val:
    """The 32 codes of a row's block in column order, or their values, int32 x32."""
    found, low, first = k.const(0, WORDS), 0, 0
    for bits in block.layout.planes:
        stored = [k.load(_word_at(block, lane, first + s), I32) for s in range(bits)]
        plane = k.const(0, WORDS)
        for g in range(GROUPS):
            plane = Val(k, k.b.insert_element(plane.v, stored[g % bits].v, I32(g)))
        shifts = k.consts([g // bits * bits for g in range(GROUPS)], I32)
        found = found | (((plane >> shifts) & (((1 << bits) - 1) * OF_EACH)) << low)
        low, first = low + bits, first + bits
    codes = k.cast("bitcast", found, vec(I8, BLOCK))
    if block.layout.values:
        codes = words.look_up(k, block.layout.values, 0, codes)
    return k.cast("zext", codes, vec(I32, BLOCK)) - block.layout.zero


def _numbers(k: Kernel, block: Block, lane: Val) -> Iterator[Val]:
    """The block's weights, 8 columns at a time: scale * code, then + minimum (two roundings)."""
    subs = block.layout.subs
    codes = _load_codes(k, block, lane)
    scales = [k.lane(block.scales(s, lane, 1), 0) for s in range(subs)]
    for first in range(0, BLOCK, 8):
        part = k.shuffle(codes, codes, range(first, first + 8))
        value = k.splat(scales[first * subs // BLOCK], 8) * k.cast("sitofp", part, F32X8)
        if block.layout.stored_minimum:
            minimum = block.minimums(first * subs // BLOCK, lane, 1)
            value = value + k.splat(k.lane(minimum, 0), 8)
        yield value


def _quantised_row(k: Kernel, layout: Layout, row: Val, y: Val) -> None:
    runs = k.arg("k") // (BLOCK * layout.blocks)
    tile = k.arg("w") + row // TILE * (runs * layout.run_bytes)
    for run in k.loop(0, runs):
        for j in k.loop(0, layout.blocks):
            block = Block(k, layout, tile + run * layout.run_bytes, j)
            to = y + (run * layout.blocks + j) * (BLOCK * 4)
            for i, value in enumerate(_numbers(k, block, row % TILE)):
                k.store(to + i * 32, value)


def _float_row(k: Kernel, layout: FloatLayout, row: Val, y: Val) -> None:
    columns, w = k.words("k w")
    tile = w + row // layout.tile * (columns * (layout.tile * layout.element_bytes))
    for c in k.loop(0, columns):
        at = tile + (c * layout.tile + row % layout.tile) * layout.element_bytes
        k.store(y + c * 4, number(k, layout.name, at))


def _register_rows(layout: Layout | FloatLayout) -> None:
    @kernel(ROWS_ARGS, name="rows_" + layout.name)
    def build(k: Kernel) -> None:
        ids, y, n, columns, m, ys = k.words("ids y n k m ys")
        for r in k.share(m):
            row = k.cast("sext", k.load(ids + r * 4, I32), I64)
            target = y + ys * r
            with k.if_else(words.within(k, row, n)) as (known, unknown):
                with known:
                    if isinstance(layout, FloatLayout):
                        _float_row(k, layout, row, target)
                    else:
                        _quantised_row(k, layout, row, target)
                with unknown:  # a row that does not exist must be seen, not read
                    for c in k.loop(0, columns):
                        k.store(target + c * 4, k.const(NOT_A_NUMBER, F32))


for _dtype, _layout in LAYOUTS.items():
    _register_pack(_dtype, _layout)
for _layout in ALL_LAYOUTS:
    _register_rows(_layout)
