"""The meaning of A8 blocks: activations in 8 bits.

Legend: N blocks; a block is 32 codes int8, their scale float32, scale * sum of codes float32, which
the minimums of weights are multiplied with, and four sums of codes int16, which what all codes of
weights are raised by is: of each half those in the first two of every four columns, then those in
the other two, as products add them up by pairs. scale = max |x| / 127.
"""

import numpy as np

from ggraph.dtype import A8
from ggraph.formats.lazy_array import Array

CODES = A8.block
SCALE, SUM = CODES, CODES + 4  # bytes from the start of a block


def write_a8(values: Array) -> Array:
    """Blocks uint8 [.., n / 32 * 48] of float32 [.., n]; codes are rounded to the nearest even."""
    x = np.ascontiguousarray(values, np.float32).reshape(-1, CODES)
    largest = np.abs(x).max(axis=1, keepdims=True) if x.size else np.zeros((0, 1), np.float32)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(x * inverse).astype(np.int8)
    scale = largest * np.float32(1 / 127)
    pairs = codes.reshape(-1, 2, CODES // 8, 2, 2)  # half, four columns, pair, column
    sums = pairs.sum(axis=(2, 4), dtype=np.int16).reshape(-1, 4)
    total = scale * sums.sum(axis=1, keepdims=True).astype(np.float32)
    parts = [p.view(np.uint8) for p in (codes, scale, total, sums)]
    return np.concatenate(parts, axis=1).reshape(*values.shape[:-1], -1)


def read_a8(raw: Array) -> Array:
    """float32 [.., n] of blocks uint8 [.., n / 32 * 48]."""
    blocks = np.ascontiguousarray(raw).reshape(-1, A8.block_bytes)
    codes = blocks[:, :CODES].view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(blocks[:, SCALE:SUM]).view(np.float32)
    n = raw.shape[-1] // A8.block_bytes * CODES
    values: Array = (codes * scale).reshape(*raw.shape[:-1], n)
    return values
