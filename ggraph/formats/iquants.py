"""I-quants, NVFP4 and Q1_0: blocks whose bytes are rows of a grid, or scales of eight bits.

Legend: N blocks of 256 values (NVFP4: 64, Q1_0: 128); uint8 [N, block_bytes] in, float32
[N, values] out. An *octet* is eight values that share an index (IQ3: two of them do). All scales
are odd integers times a float16 and a power of two. Bit for bit as the `gguf` package reads them.
Source: ggml `ggml-common.h` and `ggml-quants.c`.
"""

from typing import Any

import numpy as np

from ggraph.formats import grids
from ggraph.formats.grids import Grid
from ggraph.formats.levels import FP4_VALUES
from ggraph.formats.ternary import half

Array = np.ndarray[Any, Any]
SEVENS = np.array([0, 7, 14, 21], np.uint32)  # where the signs of four octets begin in a word
EIGHT = np.arange(8, dtype=np.uint8)


def _words(b: Array, kind: str) -> Array:
    return np.ascontiguousarray(b).view(kind)


def _bits(b: Array) -> Array:
    """[N, n] -> [N, 8 n]: the bits of each byte, low ones first."""
    return (b[:, :, None] >> EIGHT & np.uint8(1)).reshape(len(b), -1)


def _fours(b: Array) -> Array:
    """[N, n] -> [N, 2 n]: each byte's low four bits, then its high ones."""
    return np.stack([b & 15, b >> 4], axis=2).reshape(len(b), -1)


def _eighth(signs: Array) -> Array:
    """Seven signs as eight: an octet has an even number of minuses."""
    odd = np.bitwise_count(signs) & np.uint8(1)
    whole: Array = signs | odd << np.uint8(7)
    return whole


def _from_grid(step: Array, grid: Grid, index: Array, signs: Array, unit: float) -> Array:
    """step [N, s] times numbers of the grid's rows `index` [N, ..], with the signs [N, 32]."""
    sizes = grids.numbers(grid)[index].reshape(len(step), 256).astype(np.float32)
    signed = np.where(_bits(signs) != 0, -sizes, sizes).reshape(*step.shape, -1)
    return ((step * np.float32(unit))[:, :, None] * signed).reshape(-1, 256)


def _odd(n: Array) -> Array:
    """2n + 1, float32."""
    return n.astype(np.float32) * 2 + 1


def read_iq2_xxs(b: Array) -> Array:
    """Per 32 values four indices, then a word: four times seven signs, and a scale."""
    words = _words(b[:, 2:], "<u4").reshape(-1, 8, 2)
    index = _words(words[:, :, 0], "u1").reshape(-1, 32)
    signs = (words[:, :, 1:] >> SEVENS & 127).astype(np.uint8).reshape(-1, 32)
    step = half(b[:, :2]) * _odd(words[:, :, 1] >> 28)
    return _from_grid(step, grids.IQ2_XXS, index, _eighth(signs), 1 / 8)


def read_iq2_xs(b: Array) -> Array:
    """Per octet nine bits of index below seven signs; per 16 values four bits of scale."""
    both = _words(b[:, 2:66], "<u2")
    step = half(b[:, :2]) * _odd(_fours(b[:, 66:]))
    signs = _eighth((both >> 9).astype(np.uint8))
    return _from_grid(step, grids.IQ2_XS, both & 511, signs, 1 / 8)


def read_iq2_s(b: Array) -> Array:
    """Indices, all signs, two upper bits of each index, then scales as in IQ2_XS."""
    upper = b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    index = b[:, 2:34] | upper.reshape(-1, 32).astype(np.uint16) << 8
    step = half(b[:, :2]) * _odd(_fours(b[:, 74:]))
    return _from_grid(step, grids.IQ2_S, index, b[:, 34:66], 1 / 8)


def read_iq3_xxs(b: Array) -> Array:
    """64 indices; then per 32 values a word as in IQ2_XXS."""
    words = _words(b[:, 66:], "<u4")
    signs = (words[:, :, None] >> SEVENS & 127).astype(np.uint8).reshape(-1, 32)
    step = half(b[:, :2]) * _odd(words >> 28)
    return _from_grid(step, grids.IQ3_XXS, b[:, 2:66], _eighth(signs), 1 / 4)


def read_iq3_s(b: Array) -> Array:
    """64 indices, their ninth bits, all signs, then four bits of scale per 32 values."""
    index = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    step = half(b[:, :2]) * _odd(_fours(b[:, 106:]))
    return _from_grid(step, grids.IQ3_S, index, b[:, 74:106], 1)


def _moved(step: Array, index: Array, minus: Array) -> Array:
    """step [N, s] times IQ1's trits of the rows `index` [N, 32], each row an eighth further up, or
    down where `minus` [N, ..]."""
    eighth = np.where(minus, np.float32(-0.125), np.float32(0.125)).repeat(32 // minus.shape[1], 1)
    trits = grids.numbers(grids.IQ1)[index].astype(np.float32) + eighth[:, :, None]
    return (step[:, :, None] * trits.reshape(*step.shape, -1)).reshape(-1, 256)


def read_iq1_s(b: Array) -> Array:
    """32 indices; per 32 values twelve upper bits of four of them, a scale, and whether trits move
    down."""
    upper = _words(b[:, 34:], "<u2")  # [N, 8]
    index = upper[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    index = b[:, 2:34] | index.reshape(-1, 32) << np.uint16(8)
    step = half(b[:, :2]) * _odd(upper >> 12 & 7)
    return _moved(step, index, upper >> 15 != 0)


def read_iq1_m(b: Array) -> Array:
    """32 indices; four bits for each: three upper ones, and whether its trits move down; then words
    of four scales, of which the uppermost four bits are a quarter of the float16."""
    upper, words = _fours(b[:, 32:48]), _words(b[:, 48:], "<u2")  # [N, 32], [N, 4]
    index = b[:, :32] | (upper & 7).astype(np.uint16) << 8
    quarters = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    d = half(np.bitwise_or.reduce(quarters, axis=1, keepdims=True))
    scales = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    return _moved(d * _odd(scales.reshape(-1, 16)), index, upper & 8 != 0)


def ue4m3_halves() -> Array:
    """Half of what each byte means as a scale without sign, float16 [256], exactly. 127 is
    no number and means 0; else the uppermost bit means nothing."""
    codes = np.arange(256) & 127
    steps = np.where(codes < 8, codes, (8 + codes % 8) * np.exp2(np.maximum(codes // 8, 1) - 1.0))
    steps[127] = 0
    return (steps * 2.0**-10).astype(np.float16)


def read_nvfp4(b: Array) -> Array:
    """Four scales; per 16 values eight bytes: first halves low, second halves high."""
    packed = b[:, 4:].reshape(-1, 4, 8)
    values = FP4_VALUES[np.concatenate([packed & 15, packed >> 4], axis=2)].astype(np.float32)
    step = ue4m3_halves()[b[:, :4]].astype(np.float32)
    found: Array = (step[:, :, None] * values).reshape(-1, 64)
    return found


def read_q1_0(b: Array) -> Array:
    """Bits: d where they are set, -d elsewhere."""
    d = half(b[:, :2])
    return np.where(_bits(b[:, 2:]) != 0, d, -d)
