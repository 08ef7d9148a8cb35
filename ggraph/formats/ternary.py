"""Ternary blocks: 256 values of -d, 0 and d; TQ1_0 five to a byte, TQ2_0 four.

Legend: N blocks; float32 [N, 256], uint8 [N, block_bytes]; a *trit* is 0, 1 or 2 for -d, 0 and d.

TQ1_0 holds a byte's trits as the fraction q / 3^5 of 256, rounded up, so that each product with 3
carries the next trit out at the top. Bit for bit as the `gguf` package writes and reads them.
Source: ggml `ggml-quants.c`.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
PARTS = ((0, 32, 5), (160, 16, 5), (240, 4, 4))  # first value, bytes, trits in each byte


def _trits(x: Array) -> tuple[Array, Array]:
    """Trits uint8 [N, 256], and d as the two bytes of a float16."""
    d = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        scaled = x * np.where(d == 0, np.float32(0), np.float32(1) / d)
    size = np.floor(np.abs(scaled) + np.float32(0.5))  # halves away from zero
    trits: Array = (np.sign(scaled) * size + 1).astype(np.uint8)
    return trits, d.astype(np.float16).view(np.uint8)


def half(b: Array) -> Array:
    """Two bytes of each block as float32 [N, 1]."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _values(trits: Array, d: Array) -> Array:
    values: Array = (trits.astype(np.float32) - 1) * half(d)
    return values


def write_tq1_0(x: Array) -> Array:
    """[N, 256] -> [N, 54]."""
    trits, d = _trits(x)
    packed = []
    for first, width, count in PARTS:
        group = trits[:, first : first + width * count].reshape(-1, count, width)
        powers = 3 ** np.arange(4, 4 - count, -1)  # four trits count as five, the last one 0
        q = (group * powers[:, None]).sum(axis=1)
        packed.append(((q * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate([*packed, d], axis=1)


def read_tq1_0(b: Array) -> Array:
    """[N, 54] -> [N, 256]."""
    found, at = [], 0
    for _, width, count in PARTS:
        powers = (3 ** np.arange(count)).astype(np.uint8)
        rest = b[:, None, at : at + width] * powers[:, None]  # uint8: what is carried out is gone
        trits = (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8)
        found.append(trits.reshape(len(b), -1))
        at += width
    return _values(np.concatenate(found, axis=1), b[:, at:])


def write_tq2_0(x: Array) -> Array:
    """[N, 256] -> [N, 66]."""
    trits, d = _trits(x)
    four = trits.reshape(-1, 2, 4, 32) << (2 * np.arange(4, dtype=np.uint8))[:, None]
    return np.concatenate([np.bitwise_or.reduce(four, axis=2).reshape(-1, 64), d], axis=1)


def read_tq2_0(b: Array) -> Array:
    """[N, 66] -> [N, 256]."""
    bytes_ = b[:, :64].reshape(-1, 2, 1, 32)
    trits = bytes_ >> (2 * np.arange(4, dtype=np.uint8))[:, None] & np.uint8(3)
    return _values(trits.reshape(-1, 256), b[:, 64:])
