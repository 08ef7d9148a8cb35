"""Kernels that turn raw GGUF rows into tiles, and tiles back into float rows.

`pack_<type>` fills the tiles of `tiles.py` from the checkpoint's bytes; `rows_<layout>` dequantises
chosen rows of a packed matrix (embedding lookup), bit-exact to the `gguf` package.

Legend: n rows, k columns; a row's lane is its number within the tile.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import Block
from ggraph.backends.cpu.codes import READERS, Codes, Reader
from ggraph.backends.cpu.simd import (
    F16,
    F32,
    F32X8,
    I8,
    I16,
    I32,
    I64,
    KERNELS,
    Kernel,
    KernelSpec,
    Val,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.tiles import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    LAYOUTS,
    TILE,
    FloatLayout,
    Layout,
)
from ggraph.dtype import DType

PACK_ARGS = ("raw", "out", "n", "k", "row_bytes")
ROWS_ARGS = ("w", "ids", "y", "n", "k", "m", "ys")
NOT_A_NUMBER = float("nan")
OF_EACH = 0x01010101  # a bit of each of the four codes in a word
WORDS = vec(I32, GROUPS)


def _word_at(block: Block, lane: Val, stored: int) -> Val:
    """Address of the four bytes of `lane` in a stored group."""
    return block.codes_at + stored * GROUP_BYTES + lane * GROUP


def _store_block(k: Kernel, block: Block, lane: Val, read: Codes) -> None:
    """Put one row's block into its lane of the tile."""
    size = lane * block.layout.scale.nbytes
    for i, number in enumerate(read.supers):
        k.store(block.run + i * (2 * TILE) + lane * 2, number)
    for sub, scale in enumerate(read.scales):
        k.store(block.scale_at(sub) + size, scale)
    if read.minimum is not None:
        k.store(block.minimum_at + size, read.minimum)
    codes = k.cast("bitcast", read.codes, WORDS)
    low = first = 0
    for bits in block.layout.planes:
        plane = (codes >> low) & (((1 << bits) - 1) * OF_EACH)
        for stored in range(bits):
            groups = range(stored, GROUPS, bits)
            word = reduce(or_, (k.lane(plane, g) << (g - stored) for g in groups))
            k.store(_word_at(block, lane, first + stored), word)
        low, first = low + bits, first + bits


def _fill_zero(k: Kernel, address: Val, nbytes: Val) -> None:
    for i in k.loop(0, nbytes):
        k.store(address + i, k.const(0, I8))


def _pack_tile(k: Kernel, layout: Layout, read: Reader, tile: Val, first: Val) -> None:
    raw, n, row_bytes, columns = k.words("raw n row_bytes k")
    runs = columns // (BLOCK * layout.blocks)
    with k.when(first + TILE > n):  # padding rows stay zero
        _fill_zero(k, tile, runs * layout.run_bytes)
    for lane in k.loop(0, k.minimum(n - first, k.const(TILE, I64))):
        row = raw + (first + lane) * row_bytes
        for run in k.loop(0, runs):
            for j in k.loop(0, layout.blocks):
                block = Block(k, layout, tile + run * layout.run_bytes, j)
                _store_block(k, block, lane, read(k, row, run * layout.blocks + j))


def _pack_quantised(k: Kernel, layout: Layout, read: Reader) -> None:
    out, n, columns = k.words("out n k")
    step = columns // (BLOCK * layout.blocks) * layout.run_bytes
    for t in k.share((n + (TILE - 1)) // TILE):
        _pack_tile(k, layout, read, out + t * step, t * TILE)


def _pack_float(k: Kernel, layout: FloatLayout) -> None:
    raw, out, n, columns, row_bytes = k.words("raw out n k row_bytes")
    size, tile_rows = layout.element_bytes, layout.tile
    number = I16 if size == 2 else I32
    for t in k.share((n + (tile_rows - 1)) // tile_rows):
        tile = out + t * (columns * (tile_rows * size))
        for lane in k.loop(0, tile_rows):
            row = t * tile_rows + lane
            inside = row < n  # padding rows become zero
            source = raw + k.select(inside, row, 0) * row_bytes
            for c in k.loop(0, columns):
                value = k.load(source + c * size, number)
                k.store(tile + (c * tile_rows + lane) * size, k.select(inside, value, 0))


def _register_pack(dtype: DType, layout: Layout | FloatLayout) -> KernelSpec:
    def build(k: Kernel) -> None:
        if isinstance(layout, FloatLayout):
            _pack_float(k, layout)
        else:
            _pack_quantised(k, layout, READERS[dtype])

    spec = KernelSpec(f"pack_{dtype.name}", PACK_ARGS, build)
    KERNELS[spec.name] = spec
    return spec


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
            value = value + k.splat(k.lane(block.minimums(lane, 1), 0), 8)
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
        if layout.element == "bf16":
            bits = k.cast("zext", k.load(at, I16), I32) << 16
            value = k.cast("bitcast", bits, F32)
        elif layout.element == "f16":
            value = k.cast("fpext", k.load(at, F16), F32)
        else:
            value = k.load(at, F32)
        k.store(y + c * 4, value)


def _register_rows(layout: Layout | FloatLayout) -> KernelSpec:
    def build(k: Kernel) -> None:
        ids, y, n, columns, m, ys = k.words("ids y n k m ys")
        for r in k.share(m):
            row = k.cast("sext", k.load(ids + r * 4, I32), I64)
            target = y + ys * r
            with k.if_else(Val(k, k.b.icmp_unsigned("<", row.v, n.v))) as (known, unknown):
                with known:
                    if isinstance(layout, FloatLayout):
                        _float_row(k, layout, row, target)
                    else:
                        _quantised_row(k, layout, row, target)
                with unknown:  # a row that does not exist must be seen, not read
                    for c in k.loop(0, columns):
                        k.store(target + c * 4, k.const(NOT_A_NUMBER, F32))

    spec = KernelSpec("rows_" + layout.name, ROWS_ARGS, build)
    KERNELS[spec.name] = spec
    return spec


PACK = {dtype: _register_pack(dtype, layout) for dtype, layout in LAYOUTS.items()}
ROWS = {layout.name: _register_rows(layout) for layout in LAYOUTS.values()}
