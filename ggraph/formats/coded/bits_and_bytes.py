"""bitsandbytes: 4 bits by a table, in blocks of the flat weight, and 8 bits by rows.

Legend: N values of a weight in blocks of B; two codes in a byte, the first one high.

A value is table[code] times the scale of its block. Those scales may be codes of 8 bits themselves,
by a table, a scale for 256 of them, and what was taken from all. 8 bits: weight * SCB / 127, a row
at a time. Source: bitsandbytes `functional.QuantState.from_dict`, `int8_vectorwise_dequant`.
"""

from collections.abc import Mapping
from math import ceil, prod

import numpy as np

from ggraph.dtype import I8
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.weight import (
    Family,
    Integers,
    Told,
    coded,
    count,
    halves,
    numbers,
    part,
    shaped,
)
from ggraph.formats.lazy_array import Array
from ggraph.formats.safetensors import json_object

PLAIN, SCALE, TABLE = ".weight", ".weight.absmax", ".weight.quant_map"
NESTED_SCALE, NESTED_TABLE = ".weight.nested_absmax", ".weight.nested_quant_map"
STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
ROWS, FORM = ".SCB", ".weight_format"


def bits_and_bytes(told: Told) -> Family:
    """The family of a config."""
    ends = (PLAIN, SCALE, TABLE, NESTED_SCALE, NESTED_TABLE, *STATES, ROWS, FORM)
    return Family(ends, _weight, plain=PLAIN)


def _weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    return _of_rows(name, parts) if ROWS in parts else _of_table(name, parts)


def _of_rows(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    t = part(name, parts, PLAIN)
    if t.dtype is not I8 or len(t.shape) != 2:
        raise FormatError(f"{t.name!r}: expected a matrix of i8, got {t.dtype}{list(t.shape)}")
    n, k = t.shape
    if FORM in parts and parts[FORM].data.any():
        raise FormatError(f"{parts[FORM].name!r}: weights in tiles, expected rows (0)")
    scale = numbers(shaped(part(name, parts, ROWS), (n,))).reshape(n, 1) / np.float32(127)
    held = t.data
    codes = coded((n, k), lambda i, j: held[i:j].view(np.uint8) ^ 128, held)
    return Integers(codes, 8, scale, k).tensor(t.name)


def _of_table(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
    held, state = part(name, parts, PLAIN), _state(name, parts)
    shape = _shape(state)
    size, packed = count(state, "blocksize"), np.ascontiguousarray(held.data).reshape(-1)
    packed = packed.view(np.uint8)
    total = prod(shape)
    if size < 1 or packed.size != ceil(total / 2):
        raise FormatError(
            f"{held.name!r}: {packed.size} bytes for {list(shape)} of 4 bits in blocks of {size}"
        )
    table = numbers(shaped(part(name, parts, TABLE), (16,)))
    scale = _scales(name, parts, state, ceil(total / size))

    def values(i: int, j: int) -> Array:
        first, stop = i * shape[1], j * shape[1]
        own = packed[first // 2 : -(-stop // 2)]
        codes = np.stack([own >> 4, own & 15], axis=1).reshape(-1)[first % 2 :][: stop - first]
        rows = table[codes] * scale[np.arange(first, stop) // size]
        return rows.reshape(j - i, -1)

    most = float(np.abs(table).max() * np.abs(scale).max(initial=0.0))
    return halves(held.name, shape, most, values, packed)


def _state(name: str, parts: Mapping[str, RawTensor]) -> Told:
    """What the library wrote down of a weight, JSON in bytes. FormatError."""
    found = [parts[end] for end in STATES if end in parts]
    if len(found) != 1 or found[0].dtype is not I8:
        raise FormatError(f"{name + STATES[0]!r}: expected one state in bytes, got {shown(found)}")
    return json_object(found[0].data.tobytes(), found[0].name)


def _shape(state: Told) -> tuple[int, int]:
    told = state.get("shape")
    if not isinstance(told, list) or len(told) != 2:
        raise FormatError(f"shape is {shown(told)}: expected two counts")
    n, k = (count({"shape": v}, "shape") for v in told)
    if min(n, k) < 0:
        raise FormatError(f"shape is {shown(told)}: expected two counts")
    return n, k


def _scales(name: str, parts: Mapping[str, RawTensor], state: Told, blocks: int) -> Array:
    """The scale of each block, float32 [blocks]. FormatError."""
    held = shaped(part(name, parts, SCALE), (blocks,))
    if NESTED_SCALE not in parts:
        return numbers(held)
    size, offset = count(state, "nested_blocksize"), state.get("nested_offset")
    if size < 1 or held.dtype is not I8 or not isinstance(offset, (int, float)):
        raise FormatError(f"{held.name!r}: {held.dtype} in blocks of {size}, less {shown(offset)}")
    table = numbers(shaped(part(name, parts, NESTED_TABLE), (256,)))
    own = numbers(shaped(part(name, parts, NESTED_SCALE), (ceil(blocks / size),)))
    each: Array = table[held.data.view(np.uint8)] * own[np.arange(blocks) // size]
    return each + np.float32(offset)
