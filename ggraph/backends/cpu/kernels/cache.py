"""Rows written into a cache or another tensor, and rotary positions.

Legend: m rows, H heads of hd numbers each, nr rotated dimensions (even, <= hd).
"""

from collections.abc import Iterator, Sequence

from llvmlite import ir

from ggraph.backends.cpu.codegen import angles, words
from ggraph.backends.cpu.codegen.simd import (
    F16,
    F32,
    F32X8,
    F64,
    F64X8,
    I8,
    I32,
    I32X8,
    I64,
    Count,
    Kernel,
    Val,
    kernel,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, FLOATS, number, numbers, put
from ggraph.backends.cpu.kernels.quantise import largest_size, load_block
from ggraph.backends.cpu.kernels.tiles import BLOCK, Q8_BLOCK, Q8_BYTES, Q8_CODES

MAX_ROTATED = 512  # dimensions of a head that can be rotated
MISSING = -(1 << 31)  # an integer of a row that does not exist


def bytes_of(kind: str, count: Count) -> Count:
    """Bytes of so many numbers of a cache row; in block types of whole blocks."""
    return count // Q8_BLOCK * Q8_BYTES if kind == "q8_0" else count * ELEMENT_BYTES[kind]


def number_at(kind: str, row: Val, d: Val) -> Val:
    """Address of number d of a cache row; in block types d begins a block."""
    return row + bytes_of(kind, d)


def scale_at(k: Kernel, block: Val) -> Val:
    """What a block's codes are multiplied by, float32. Loads that are not told it read it
    themselves, each anew where the order of memory accesses is kept."""
    return k.cast("fpext", k.load(block, F16), F32)


def load8(k: Kernel, kind: str, at: Val, i: int, scale: Val | None = None) -> Val:
    """Eight cache numbers as float32, `i` after those at the address that `number_at` gave."""
    if kind == "q8_0":
        return _codes(k, at, i, 8, scale)
    return numbers(k, kind, at + i * ELEMENT_BYTES[kind])


def _codes(k: Kernel, at: Val, i: int, lanes: int, scale: Val | None = None) -> Val:
    """So many numbers of one of the blocks there, from number `i` on."""
    block = at + i // Q8_BLOCK * Q8_BYTES
    codes = k.load(block + (Q8_CODES + i % Q8_BLOCK), vec(I8, lanes))
    one = scale_at(k, block) if scale is None else scale
    return words.floats_of(k, codes) * k.splat(one, lanes)


def load_wide(k: Kernel, kind: str, at: Val, i: int) -> Val:
    """The same, as many as a vector of products holds."""
    if k.isa.lanes == 8:
        return load8(k, kind, at, i)
    if kind == "q8_0":
        return _codes(k, at, i, k.isa.lanes)
    return numbers(k, kind, at + i * ELEMENT_BYTES[kind], k.isa.lanes)


def load_pair(
    k: Kernel, kind: str, first: Val, second: Val, i: int, scales: Sequence[Val] = ()
) -> Val:
    """Eight numbers of each of two rows side by side, as float32."""
    if kind == "f16":
        halves = k.joined(*(k.load(at + i * 2, vec(F16, 8)) for at in (first, second)))
        return k.cast("fpext", halves, vec(F32, 16))
    if kind == "q8_0":
        codes = k.joined(*(k.load(at + (Q8_CODES + i), vec(I8, 8)) for at in (first, second)))
        ones = scales or [scale_at(k, at) for at in (first, second)]
        return words.floats_of(k, codes) * k.joined(*(k.splat(one, 8) for one in ones))
    return k.joined(load8(k, kind, first, i), load8(k, kind, second, i))


def _index(k: Kernel, base: Val, r: Val) -> Val:
    """Index r of an array of int32 or int64, by the word of their bytes."""
    found = k.var(r)
    with k.if_else(k.arg("ib").eq(8)) as (wide, narrow):
        with wide:
            found.value = k.load(base + r * 8, I64)
        with narrow:
            found.value = k.cast("sext", k.load(base + r * 4, I32), I64)
    return found.value


def _row_of(k: Kernel, r: Val) -> Val:
    """The target row of row r: index[r], or r itself where there is no index; -1 where the
    next row has the same target, so that rows which only fill a bucket up cost nothing."""
    m, index = k.words("m index")
    row = k.var(r)
    with k.when(index.ne(0)):
        named = _index(k, index, r)
        following = _index(k, index, k.minimum(r + 1, m - 1))
        row.value = k.select((r + 1 < m) & following.eq(named), k.const(-1, I64), named)
    return row.value


def _targets(k: Kernel, units: Val) -> Iterator[tuple[Val, Val, tuple[Val, Val]]]:
    """This thread's rows, their target rows, and its part of each row's `units`.

    Of several rows for one place the last must stay: where rows are shared out, all that name a
    place are one thread's, in their order. An index beyond the target writes nowhere.
    """
    m, index = k.words("m index")
    rows, parts = k.grid(m, units)
    named, shared_out = index.ne(0), rows[1] - rows[0] < m
    for r in k.loop(k.select(named, k.const(0, I64), rows[0]), k.select(named, m, rows[1])):
        row = _row_of(k, r)
        with k.when(words.within(k, row, k.arg("limit"))):
            owner = k.select(named & shared_out, row % k.threads, k.thread)
            with k.when(owner.eq(k.thread)):
                yield r, row, parts


def _set_rows(kind: str) -> None:
    size = ELEMENT_BYTES[kind]

    @kernel("x y index m n xs ys limit ib", name="set_rows_" + kind)
    def build(k: Kernel) -> None:
        x, y, n, xs, ys = k.words("x y n xs ys")
        for r, row, pieces in _targets(k, (n + (BLOCK - 1)) // BLOCK):
            source, target = x + xs * r, y + ys * row
            start, stop = pieces[0] * BLOCK, k.minimum(pieces[1] * BLOCK, n)
            whole = start + k.maximum(stop - start, 0) // 8 * 8
            for c in k.loop(start, whole, 8):
                put(k, kind, target + c * size, k.load(source + c * 4, F32X8))
            for c in k.loop(whole, stop):
                put(k, kind, target + c * size, k.load(source + c * 4, F32))


@kernel("x y index m n xs ys limit ib")
def set_rows_q8_0(k: Kernel) -> None:
    """Rows of n numbers, whole blocks of 32, as a float16 scale and 32 codes each.

    The bits are those of `ggraph.formats.quantise`: scale = max |x| / 127, halves away from zero.
    """
    x, y, n, xs, ys = k.words("x y n xs ys")
    for r, row, blocks in _targets(k, n // Q8_BLOCK):
        for b in k.loop(*blocks):
            numbers = load_block(k, x + xs * r + b * (Q8_BLOCK * 4))
            _store_q8(k, numbers, y + ys * row + b * Q8_BYTES)


def _store_q8(k: Kernel, x: Sequence[Val], out: Val) -> None:
    largest = largest_size(k, x)
    scale = largest / 127.0
    inverse = k.splat(k.select(scale > 0.0, k.const(1.0, F32) / scale, 0.0), 8)
    k.store(out, k.cast("fptrunc", scale, F16))
    for i, v in enumerate(x):
        whole = words.of_floats(k, "round", v * inverse)
        codes = k.cast("trunc", k.cast("fptosi", whole, I32X8), vec(I8, 8))
        k.store(out + (Q8_CODES + 8 * i), codes)


def _angles(k: Kernel, row: Val, table: Val) -> None:
    """Cosines, then sines, of one row's position into `table` (float32)."""
    positions, freqs, factors, nr, scale = k.words("pos freqs factors nr mscale")
    position = k.splat(k.cast("sitofp", k.load(positions + row * 4, I32), F64), 8)
    half = nr // 2
    for i in k.loop(0, half, 8):
        freq = k.var(k.load(freqs + i * 8, F64X8))
        with k.when(factors.ne(0)):
            inside = words.load_tail(k, factors + i * 4, half - i)
            one = k.select(words.tail_mask(k, half - i), inside, 1.0)
            freq.value = freq.value / k.cast("fpext", one, F64X8)
        pair = angles.sin_cos(k, position * freq.value)
        sine, cosine = (k.cast("fptrunc", v, F32X8) * k.splat(scale, 8) for v in pair)
        k.store(table + i * 4, cosine)
        k.store(table + MAX_ROTATED * 4 + i * 4, sine)


def _turned(k: Kernel, table: Val, i: Val, t: ir.Type, pair: tuple[Val, Val]) -> tuple[Val, Val]:
    """The pairs from `i` on, one or eight, turned by their angles."""
    c, s = k.load(table + i * 4, t), k.load(table + MAX_ROTATED * 4 + i * 4, t)
    a, b = pair
    return a * c - b * s, a * s + b * c


def _rotate_halves(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    """Pairs (i, i + nr/2): the form of Qwen and of HF checkpoints."""
    size, half = ELEMENT_BYTES[kind], k.arg("nr") // 2
    whole = half // 8 * 8

    def some(i: Val, t: ir.Type) -> None:
        pair = k.load(x + i * 4, t), k.load(x + (half + i) * 4, t)
        first, second = _turned(k, table, i, t, pair)
        put(k, kind, y + i * size, first)
        put(k, kind, y + (half + i) * size, second)

    for i in k.loop(0, whole, 8):
        some(i, F32X8)
    for i in k.loop(whole, half):
        some(i, F32)


EVEN, ODD = range(0, 16, 2), range(1, 16, 2)
FRONT, BACK = (0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)


def _rotate_pairs(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    """Pairs (2i, 2i + 1): the form of llama-architecture GGUF files."""
    size, half = ELEMENT_BYTES[kind], k.arg("nr") // 2
    whole = half // 8 * 8
    for i in k.loop(0, whole, 8):
        both = k.load(x + i * 8, F32X8), k.load(x + i * 8 + 32, F32X8)
        turned = _turned(k, table, i, F32X8, (k.shuffle(*both, EVEN), k.shuffle(*both, ODD)))
        for at, lanes in ((0, FRONT), (8, BACK)):
            put(k, kind, y + (i * 2 + at) * size, k.shuffle(*turned, lanes))
    for i in k.loop(whole, half):
        pair = k.load(x + i * 8, F32), k.load(x + i * 8 + 4, F32)
        for at, value in enumerate(_turned(k, table, i, F32, pair)):
            put(k, kind, y + (i * 2 + at) * size, value)


def _rope_head(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    size = ELEMENT_BYTES[kind]
    with k.if_else(k.arg("halves").ne(0)) as (halves, pairs):
        with halves:
            _rotate_halves(k, kind, x, y, table)
        with pairs:
            _rotate_pairs(k, kind, x, y, table)
    for i in k.loop(k.arg("nr"), k.arg("hd")):
        put(k, kind, y + i * size, k.load(x + i * 4, F32))


ROPE_ARGS = "x y pos index freqs factors m heads hd nr halves xs xh ys yh limit ib mscale:f"


def _rope(kind: str) -> None:
    @kernel(ROPE_ARGS, name="rope_" + kind)
    def build(k: Kernel) -> None:
        x, y, heads, xs, xh, ys, yh = k.words("x y heads xs xh ys yh")
        table = k.scratch(MAX_ROTATED * 8 + 64)
        for r, row, parts in _targets(k, heads):
            with k.when(parts[0] < parts[1]):
                _angles(k, r, table)
            for h in k.loop(*parts):
                _rope_head(k, kind, x + xs * r + xh * h, y + ys * row + yh * h, table)


def _gather(kind: str) -> None:
    step = Q8_BLOCK if kind == "q8_0" else 8
    missing = MISSING if kind == "i32" else float("nan")

    def eight(k: Kernel, at: Val, i: int) -> Val:
        return k.load(at + i * 4, I32X8) if kind == "i32" else load8(k, kind, at, i)

    def one(k: Kernel, at: Val) -> Val:
        return k.load(at, I32) if kind == "i32" else number(k, kind, at)

    @kernel("x ids y m n xs ys limit ib", name="gather_" + kind)
    def build(k: Kernel) -> None:
        """y[r] = x[ids[r]], rows of n numbers by int32 ids; beyond `limit` rows not a number, or
        the least integer."""
        x, ids, y, m, n, xs, ys, limit = k.words("x ids y m n xs ys limit")
        whole = n // step * step
        for r in k.share(m):
            chosen = _index(k, ids, r)
            known = words.within(k, chosen, limit)
            row, out = x + xs * k.select(known, chosen, 0), y + ys * r
            for c in k.loop(0, whole, step):
                at = number_at(kind, row, c)
                for i in range(0, step, 8):
                    value = k.select(known, eight(k, at, i), missing)
                    k.store(out + (c + i) * 4, value)
            if kind != "q8_0":
                for c in k.loop(whole, n):
                    value = one(k, number_at(kind, row, c))
                    k.store(out + c * 4, k.select(known, value, missing))


GATHERED = (*FLOATS, "q8_0", "i32")  # kinds of tables
for _kind in GATHERED:
    _gather(_kind)
for _kind in ("f32", "f16"):
    _set_rows(_kind)
    _rope(_kind)
