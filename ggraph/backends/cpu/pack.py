"""Kernels that turn raw GGUF rows into tiles, and tiles back into float rows.

`pack_<type>` fills the tiles of `tiles.py` from the checkpoint's bytes; `rows_<layout>` dequantises
chosen rows of a packed matrix (embedding lookup), bit-exact to the `gguf` package.

Legend: n rows, k columns; a row's lane is its number within the tile.
"""

from collections.abc import Iterator

from ggraph.backends.cpu import words
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
from ggraph.backends.cpu.tiles import BLOCK, GROUP, HALF, LAYOUTS, TILE, FloatLayout, Layout
from ggraph.dtype import DType

PACK_ARGS = ("raw", "out", "n", "k", "row_bytes")
ROWS_ARGS = ("w", "ids", "y", "n", "k", "m", "ys")
NOT_A_NUMBER = float("nan")
FIFTHS = 0x01010101  # a bit of each of the four codes in a word


def _code_at(layout: Layout, block: Val, lane: Val, group: int) -> Val:
    """Address of the four bytes of `lane`'s group."""
    within = (lane // HALF) * 32 + (lane % HALF) * 4
    return block + (layout.codes_at + group * 64) + within


def _store_number(k: Kernel, layout: Layout, address: Val, value: Val) -> None:
    k.store(address, k.cast("fptrunc", value, F16) if layout.scale_bytes == 2 else value)


def _store_block(k: Kernel, layout: Layout, block: Val, lane: Val, read: Codes) -> None:
    """Put one row's block into its lane of the tile."""
    size = layout.scale_bytes
    for sub, scale in enumerate(read.scales):
        _store_number(k, layout, block + sub * TILE * size + lane * size, scale)
    if layout.stored_minimum and read.minimum is not None:
        _store_number(k, layout, block + layout.minimum_at + lane * size, read.minimum)
    codes = read.codes
    if layout.fifth:
        k.store(_code_at(layout, block, lane, layout.groups), _fifth_word(k, codes))
        codes = words.low_nibbles(codes)
    if layout.nibbles:
        low, high = (k.shuffle(codes, codes, range(a, a + 16)) for a in (0, 16))
        codes = low | (high << 4)
    as_words = k.cast("bitcast", codes, vec(I32, layout.groups))
    for group in range(layout.groups):
        k.store(_code_at(layout, block, lane, group), k.lane(as_words, group))


def _fifth_word(k: Kernel, codes: Val) -> Val:
    """The fifth bits of 32 codes: bit g of byte c is that of code 4g + c."""
    as_words = k.cast("bitcast", codes, vec(I32, BLOCK // GROUP))
    word = k.const(0, I32)
    for group in range(BLOCK // GROUP):
        word = word | (((k.lane(as_words, group) >> 4) & FIFTHS) << group)
    return word


def _fill_zero(k: Kernel, address: Val, nbytes: Val) -> None:
    for i in k.loop(0, nbytes):
        k.store(address + i, k.const(0, I8))


def _pack_tile(k: Kernel, layout: Layout, read: Reader, tile: Val, first: Val) -> None:
    raw, n, row_bytes = k.words("raw n row_bytes")
    blocks = k.arg("k") // BLOCK
    with k.when(first + TILE > n):  # padding rows stay zero
        _fill_zero(k, tile, blocks * layout.block_bytes)
    for lane in k.loop(0, k.minimum(n - first, k.const(TILE, I64))):
        row = raw + (first + lane) * row_bytes
        for b in k.loop(0, blocks):
            _store_block(k, layout, tile + b * layout.block_bytes, lane, read(k, row, b))


def _pack_quantised(k: Kernel, layout: Layout, read: Reader) -> None:
    out, n = k.words("out n")
    step = k.arg("k") // BLOCK * layout.block_bytes
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


def _load_number(k: Kernel, layout: Layout, address: Val) -> Val:
    if layout.scale_bytes == 2:
        return k.cast("fpext", k.load(address, F16), F32)
    return k.load(address, F32)


def _load_codes(k: Kernel, layout: Layout, block: Val, lane: Val) -> Val:
    """The 32 codes of a row's block in column order, int8 x32."""
    gathered = k.const(0, vec(I32, layout.groups))
    for group in range(layout.groups):
        word = k.load(_code_at(layout, block, lane, group), I32)
        gathered = Val(k, k.b.insert_element(gathered.v, word.v, I32(group)))
    codes = k.cast("bitcast", gathered, vec(I8, layout.groups * 4))
    if not layout.nibbles:
        return codes
    codes = k.shuffle(words.low_nibbles(codes), words.high_nibbles(k, codes), range(BLOCK))
    if not layout.fifth:
        return codes
    word = k.splat(k.load(_code_at(layout, block, lane, layout.groups), I32), BLOCK // GROUP)
    fifths = ((word >> k.consts(range(BLOCK // GROUP), I32)) & FIFTHS) << 4
    return codes | k.cast("bitcast", fifths, vec(I8, BLOCK))


def _numbers(k: Kernel, layout: Layout, block: Val, lane: Val) -> Iterator[Val]:
    """The block's weights, 8 columns at a time: scale * code, then + minimum (two roundings)."""
    size = layout.scale_bytes
    codes = _load_codes(k, layout, block, lane)
    scales = [_load_number(k, layout, block + (s * TILE + lane) * size) for s in range(layout.subs)]
    for first in range(0, BLOCK, 8):
        part = k.shuffle(codes, codes, range(first, first + 8))
        wide = k.cast("sext", part, vec(I32, 8)) - layout.zero
        scale = scales[first * layout.subs // BLOCK]
        value = k.splat(scale, 8) * k.cast("sitofp", wide, F32X8)
        if layout.stored_minimum:
            value = value + k.splat(
                _load_number(k, layout, block + (layout.minimum_at + lane * size)), 8
            )
        yield value


def _quantised_row(k: Kernel, layout: Layout, row: Val, y: Val) -> None:
    blocks = k.arg("k") // BLOCK
    tile = k.arg("w") + row // TILE * (blocks * layout.block_bytes)
    for b in k.loop(0, blocks):
        for i, value in enumerate(_numbers(k, layout, tile + b * layout.block_bytes, row % TILE)):
            k.store(y + b * (BLOCK * 4) + i * 32, value)


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
