"""Safetensors files: a strict reader over a memory map.

Own code because the reference library has no NumPy type for bfloat16 and copies what it reads;
the format is one JSON header and flat data. Source: the safetensors README, "Format".
"""

import json
import mmap
import os
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.dtype import BF16, E4M3, E5M2, E8M0, F16, F32, F64, I8, I16, I32, I64, DType
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor

TYPES: dict[str, DType] = {
    "F64": F64, "F32": F32, "F16": F16, "BF16": BF16,
    "I64": I64, "I32": I32, "I16": I16, "I8": I8, "BOOL": I8, "U8": I8,
    "F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": E8M0,
}  # fmt: skip
MAX_HEADER = 100 << 20


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of one file, as read-only windows. Raises FormatError."""
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size < 8:
                raise FormatError(f"{path}: {size} bytes are no safetensors file")
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return parse_safetensors(mapped, str(path))


def parse_safetensors(data: mmap.mmap | bytes, where: str) -> dict[str, RawTensor]:
    """The tensors in `data`."""
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(len(data) - 8, MAX_HEADER):
        raise FormatError(f"{where}: header of {length} bytes in a file of {len(data)}")
    header = json_object(data[8 : 8 + length], where)
    start = 8 + length
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = _tensor(data, where, name, entry, start)
    return found


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises FormatError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise FormatError(f"{where}: a key stands twice among {sorted(keys)[:5]}")
        return keys

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _tensor(data: mmap.mmap | bytes, where: str, name: str, entry: Any, start: int) -> RawTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(f"{where}: tensor {name!r} has no dtype, shape and data_offsets")
    dtype = TYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise FormatError(f"{where}: tensor {name!r} has unknown dtype {shown(entry['dtype'])}")
    shape, span = _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    if shape is None or span is None or len(span) != 2 or len(shape) > 8:
        raise FormatError(f"{where}: tensor {name!r}: shape or offsets are not counts")
    nbytes = prod(shape) * dtype.block_bytes
    if span[1] - span[0] != nbytes or start + span[1] > len(data):
        raise FormatError(
            f"{where}: tensor {name!r}: {dtype}{list(shape)} needs {nbytes} bytes, but the file "
            f"gives {span[0]} to {span[1]} of {len(data) - start}"
        )
    count = prod(shape)
    values = (
        np.frombuffer(data, dtype.np, count, start + span[0]) if count else np.zeros(0, dtype.np)
    )
    return RawTensor(name, dtype, shape, values.reshape(shape))


def _naturals(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 62 for v in value):
        return None
    return tuple(value)
