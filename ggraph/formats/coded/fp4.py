"""E2M1 codes in groups whose scales have 8 bits: NVFP4 and MXFP4, by ModelOpt and others.

Legend: [n, k] the weight; a byte holds two columns, the first one low.

A value of NVFP4 is code * E4M3 of its 16 columns * the tensor's scale; of MXFP4 it is code * E8M0
of its 32 columns. GGUF's blocks hold the same codes and scales in another order, and the tensor's
scale beside them. Source: the OCP's Microscaling Formats 1.0; compressed-tensors' `nvfp4_quantized`
and `mxfp4_quantized`; ModelOpt's `nvfp4_tensor`.
"""

from collections.abc import Mapping

import numpy as np

from ggraph.dtype import E4M3, E8M0, I8, MXFP4, NVFP4, DType
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.weight import (
    Family,
    Told,
    fp8_codes,
    halves,
    numbers,
    part,
    scaled,
    shaped,
)
from ggraph.formats.lazy_array import Array, LazyArray, Read
from ggraph.formats.levels import FP4_VALUES
from ggraph.formats.quants import dequantize

PLAIN, SCALE, SECOND = ".weight", ".weight_scale", ".weight_scale_2"
UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
ALGORITHMS = ("NVFP4", "FP8")
MIXED = "MIXED_PRECISION"


def modelopt(told: Told) -> Family:
    """The family of a config of ModelOpt's, in config.json or in a file of its own. FormatError for
    other codes."""
    held = told.get("quantization", told)
    each = held.get("quantized_layers") if isinstance(held, Mapping) else None
    algorithms = [held.get("quant_algo")] if isinstance(held, Mapping) else [held]
    if algorithms == [MIXED] and isinstance(each, Mapping):
        algorithms = [m.get("quant_algo") if isinstance(m, Mapping) else m for m in each.values()]
    for name in algorithms:
        if name not in ALGORITHMS:
            raise FormatError(f"quant_algo is {shown(name)}: expected {' or '.join(ALGORITHMS)}")
    return Family((SECOND, SCALE, PLAIN), _weight, UNUSED, plain=PLAIN)


def _weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    held, scale = part(name, parts, PLAIN), part(name, parts, SCALE)
    if held.dtype is I8:
        second = numbers(shaped(part(name, parts, SECOND), (), (1,)))
        return nvfp4(held.name, held, scale, second)
    codes, table = fp8_codes(held)
    one = numbers(shaped(scale, (), (1,))).reshape(1, 1)
    return scaled(held.name, codes, table, one, codes.shape[-2:])


def nvfp4(name: str, packed: RawTensor, scale: RawTensor, whole: Array) -> RawTensor:
    """The weight of codes u8 [n, k / 2], a scale for 16 columns and one number for all; in half
    precision where rows are not whole blocks. FormatError."""
    codes, steps = _checked(packed, scale, 16, E4M3, most=0x7E)  # no sign, and a number
    (n, k), whole = (len(codes), 2 * codes.shape[1]), whole.reshape(1).astype(np.float32)

    def blocks(i: int, j: int) -> Array:
        out = np.empty((j - i, k // NVFP4.block, NVFP4.block_bytes), np.uint8)
        out[..., :4] = steps[i:j].reshape(j - i, -1, 4)
        out[..., 4:] = _by_halves(codes[i:j], 16).reshape(j - i, -1, 32)
        return out.reshape(j - i, -1)

    if k % NVFP4.block == 0:
        return RawTensor(name, NVFP4, (n, k), _lazy(NVFP4, n, k, blocks, codes, steps), whole)
    each = dequantize(np.arange(256, dtype=np.uint8), E4M3) * whole

    def values(i: int, j: int) -> Array:
        rows: Array = FP4_VALUES[_columns(codes[i:j])].astype(np.float32) / 2
        rows *= each[steps[i:j]].repeat(16, axis=1)
        return rows

    most = 6 * float(np.abs(each[steps.max(initial=0)]))
    return halves(name, (n, k), most, values, codes, steps)


def mxfp4(name: str, packed: RawTensor, scale: RawTensor) -> RawTensor:
    """The weight of codes u8 [n, k / 2] and a power of two for 32 columns. FormatError."""
    codes, steps = _checked(packed, scale, 32, E8M0, most=0xFE)
    n, k = len(codes), 2 * codes.shape[1]

    def blocks(i: int, j: int) -> Array:
        out = np.empty((j - i, k // MXFP4.block, MXFP4.block_bytes), np.uint8)
        out[..., 0] = steps[i:j]
        out[..., 1:] = _by_halves(codes[i:j], 32)
        return out.reshape(j - i, -1)

    return RawTensor(name, MXFP4, (n, k), _lazy(MXFP4, n, k, blocks, codes, steps))


def _checked(
    packed: RawTensor, scale: RawTensor, group: int, dtype: DType, most: int
) -> tuple[Array, Array]:
    """Codes u8 [n, k / 2] and the bits of their groups' scales, u8 [n, k / group]. FormatError."""
    if packed.dtype is not I8 or len(packed.shape) != 2:
        raise FormatError(
            f"{packed.name!r}: expected a matrix of bytes, got {packed.dtype}{list(packed.shape)}"
        )
    if scale.dtype not in (dtype, I8):
        raise FormatError(f"{scale.name!r}: expected {dtype}, got {scale.dtype}")
    n, half = packed.shape
    if 2 * half % group:
        raise FormatError(f"{packed.name!r}: {2 * half} columns are not whole groups of {group}")
    shaped(scale, (n, 2 * half // group))
    steps = scale.data.view(np.uint8)
    if (steps > most).any():
        raise FormatError(f"{scale.name!r}: a scale is not a finite number from 0 on")
    return packed.data.view(np.uint8), steps


def _lazy(dtype: DType, n: int, k: int, read: Read, *windows: Array) -> LazyArray:
    return LazyArray((n, dtype.row_bytes(k)), np.dtype(np.uint8), read, windows)


def _columns(codes: Array) -> Array:
    """A code for each column: u8 [n, k]."""
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)


def _by_halves(codes: Array, group: int) -> Array:
    """Bytes [n, k / group, group / 2] whose low codes are a group's first half."""
    each = _columns(codes).reshape(len(codes), -1, 2, group // 2)
    found: Array = each[:, :, 0] | each[:, :, 1] << 4
    return found
