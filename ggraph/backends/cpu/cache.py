"""Rows written into a cache or another tensor, and rotary positions. Floor 6.

Legend: m rows, H heads of hd numbers each, nr rotated dimensions (even, <= hd).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ggraph.backends.cpu import words
from ggraph.backends.cpu.quantise import load_block
from ggraph.backends.cpu.simd import (
    F16,
    F32,
    F32X8,
    F64,
    F64X8,
    I8,
    I32,
    I32X8,
    I64,
    KERNELS,
    Kernel,
    KernelSpec,
    Val,
    kernel,
    vec,
)  # fmt: skip
from ggraph.backends.cpu.tiles import Q8_BLOCK, Q8_BYTES, Q8_CODES

MAX_ROTATED = 512  # dimensions of a head that can be rotated
ONE = {"f32": 4, "f16": 2}  # bytes of a number


def number_at(kind: str, row: Val, d: Val) -> Val:
    """Address of number d of a cache row; in block types d begins a block."""
    return row + d // Q8_BLOCK * Q8_BYTES if kind == "q8_0" else row + d * ONE[kind]


def load8(k: Kernel, kind: str, at: Val, i: int) -> Val:
    """Eight cache numbers as float32, `i` after those at the address that `number_at` gave."""
    if kind == "f16":
        return words.load_f16x8(k, at + i * 2)
    if kind == "f32":
        return k.load(at + i * 4, F32X8)
    block = at + i // Q8_BLOCK * Q8_BYTES
    codes = k.load(block + (Q8_CODES + i % Q8_BLOCK), vec(I8, 8))
    scale = k.cast("fpext", k.load(block, F16), F32)
    return k.cast("sitofp", k.cast("sext", codes, I32X8), F32X8) * k.splat(scale, 8)


def _row_of(k: Kernel, index: Val, r: Val) -> Val:
    """The target row of row r: index[r] (int64), or r itself where there is no index."""
    row = k.var(r)
    with k.when(index.ne(0)):
        row.value = k.load(index + r * 8, I64)
    return row.value


@contextmanager
def _inside(k: Kernel, row: Val) -> Iterator[None]:
    """The body runs for rows that the target has; an index beyond it writes nowhere."""
    with k.when(row >= 0), k.when(row < k.arg("limit")):
        yield


def _store8(k: Kernel, kind: str, at: Val, value: Val) -> None:
    k.store(at, k.cast("fptrunc", value, vec(F16, 8)) if kind == "f16" else value)


def _store1(k: Kernel, kind: str, at: Val, value: Val) -> None:
    k.store(at, k.cast("fptrunc", value, F16) if kind == "f16" else value)


def _set_rows(kind: str) -> KernelSpec:
    size = 2 if kind == "f16" else 4

    def build(k: Kernel) -> None:
        x, y, index, m, n, xs, ys = k.words("x y index m n xs ys")
        for r in k.share(m):
            row = _row_of(k, index, r)
            source, target = x + xs * r, y + ys * row
            whole = n // 8 * 8
            with _inside(k, row):
                for c in k.loop(0, whole, 8):
                    _store8(k, kind, target + c * size, k.load(source + c * 4, F32X8))
                for c in k.loop(whole, n):
                    _store1(k, kind, target + c * size, k.load(source + c * 4, F32))

    name = "set_rows_" + kind
    KERNELS[name] = KernelSpec(name, ("x", "y", "index", "m", "n", "xs", "ys", "limit"), build)
    return KERNELS[name]


@kernel("x y index m n xs ys limit")
def set_rows_q8_0(k: Kernel) -> None:
    """Rows of n numbers, whole blocks of 32, as a float16 scale and 32 codes each.

    The bits are those of `ggraph.formats.quantise`: scale = max |x| / 127, halves away from zero.
    """
    x, y, index, m, n, xs, ys = k.words("x y index m n xs ys")
    blocks = n // Q8_BLOCK
    for item in k.share(m * blocks):
        r, b = item // blocks, item % blocks
        row = _row_of(k, index, r)
        with _inside(k, row):
            numbers = load_block(k, x + xs * r + b * (Q8_BLOCK * 4))
            _store_q8(k, numbers, y + ys * row + b * Q8_BYTES)


def _store_q8(k: Kernel, x: Sequence[Val], out: Val) -> None:
    sizes = [words.absolute(k, v) for v in x]
    largest = words.hmax(k, k.maximum(*(k.maximum(*sizes[i : i + 2]) for i in (0, 2))))
    scale = largest / 127.0
    inverse = k.splat(k.select(scale > 0.0, k.const(1.0, F32) / scale, 0.0), 8)
    k.store(out, k.cast("fptrunc", scale, F16))
    for i, v in enumerate(x):
        whole = k.intrinsic("llvm.round.v8f32", F32X8, v * inverse)
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
        pair = words.sin_cos(k, position * freq.value)
        sine, cosine = (k.cast("fptrunc", v, F32X8) * k.splat(scale, 8) for v in pair)
        k.store(table + i * 4, cosine)
        k.store(table + MAX_ROTATED * 4 + i * 4, sine)


def _rotate_halves(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    """Pairs (i, i + nr/2): the form of Qwen and of HF checkpoints."""
    half = k.arg("nr") // 2
    size = 2 if kind == "f16" else 4
    for i in k.loop(0, half):
        a, b = k.load(x + i * 4, F32), k.load(x + (half + i) * 4, F32)
        c, s = k.load(table + i * 4, F32), k.load(table + MAX_ROTATED * 4 + i * 4, F32)
        _store1(k, kind, y + i * size, a * c - b * s)
        _store1(k, kind, y + (half + i) * size, a * s + b * c)


def _rotate_pairs(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    """Pairs (2i, 2i + 1): the form of llama-architecture GGUF files."""
    size = 2 if kind == "f16" else 4
    for i in k.loop(0, k.arg("nr") // 2):
        a, b = k.load(x + i * 8, F32), k.load(x + i * 8 + 4, F32)
        c, s = k.load(table + i * 4, F32), k.load(table + MAX_ROTATED * 4 + i * 4, F32)
        _store1(k, kind, y + i * (2 * size), a * c - b * s)
        _store1(k, kind, y + i * (2 * size) + size, a * s + b * c)


def _rope_head(k: Kernel, kind: str, x: Val, y: Val, table: Val) -> None:
    size = 2 if kind == "f16" else 4
    with k.if_else(k.arg("halves").ne(0)) as (halves, pairs):
        with halves:
            _rotate_halves(k, kind, x, y, table)
        with pairs:
            _rotate_pairs(k, kind, x, y, table)
    for i in k.loop(k.arg("nr"), k.arg("hd")):
        _store1(k, kind, y + i * size, k.load(x + i * 4, F32))


ROPE_ARGS = (
    "x", "y", "pos", "index", "freqs", "factors", "m", "heads", "hd", "nr", "halves",
    "xs", "xh", "ys", "yh", "limit", "mscale:f",
)  # fmt: skip


def _rope(kind: str) -> KernelSpec:
    def build(k: Kernel) -> None:
        x, y, index, m, heads, xs, xh, ys, yh = k.words("x y index m heads xs xh ys yh")
        table = k.scratch(MAX_ROTATED * 8 + 64)
        present = k.var(-1)
        for item in k.share(m * heads):
            r, h = item // heads, item % heads
            with k.when(present.value.ne(r)):
                _angles(k, r, table)
                present.value = r
            row = _row_of(k, index, r)
            with _inside(k, row):
                _rope_head(k, kind, x + xs * r + xh * h, y + ys * row + yh * h, table)

    name = "rope_" + kind
    KERNELS[name] = KernelSpec(name, ROPE_ARGS, build)
    return KERNELS[name]


def _gather(kind: str) -> KernelSpec:
    size, step = (2 if kind == "f16" else 4), (Q8_BLOCK if kind == "q8_0" else 8)

    def one(k: Kernel, at: Val) -> Val:
        return k.cast("fpext", k.load(at, F16), F32) if kind == "f16" else k.load(at, F32)

    def build(k: Kernel) -> None:
        """y[r] = x[ids[r]], rows of n numbers by int32 ids; not a number beyond `limit` rows."""
        x, ids, y, m, n, xs, ys, limit = k.words("x ids y m n xs ys limit")
        whole = n // step * step
        for r in k.share(m):
            chosen = k.cast("sext", k.load(ids + r * 4, I32), I64)
            known = k.select(chosen >= 0, k.select(chosen < limit, k.const(1, I64), 0), 0).ne(0)
            row, out = x + xs * k.select(known, chosen, 0), y + ys * r
            for c in k.loop(0, whole, step):
                at = number_at(kind, row, c)
                for i in range(0, step, 8):
                    value = k.select(known, load8(k, kind, at, i), float("nan"))
                    k.store(out + (c + i) * 4, value)
            if kind != "q8_0":
                for c in k.loop(whole, n):
                    value = one(k, row + c * size)
                    k.store(out + c * 4, k.select(known, value, float("nan")))

    name = "gather_" + kind
    KERNELS[name] = KernelSpec(name, ("x", "ids", "y", "m", "n", "xs", "ys", "limit"), build)
    return KERNELS[name]


GATHER = {kind: _gather(kind) for kind in ("f32", "f16", "q8_0")}
SET_ROWS = {kind: _set_rows(kind) for kind in ("f32", "f16")}
ROPE = {kind: _rope(kind) for kind in ("f32", "f16")}
