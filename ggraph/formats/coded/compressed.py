"""compressed-tensors: FP8 and FP4, integers of 8 bits, and of 4 or 8 bits packed into words.

Legend: [n, k] the weight, G groups of columns.

`config_groups` say which modules have which codes, and how far a scale goes: the tensor, a channel
(row), a group of columns, a tile. Scales of activations are passed over: they are computed with as
they are. Source: the library's `pack_quantized`, `naive_quantized` and `quant_args`.
"""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

from ggraph.dtype import I8, I32, I64
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.fp4 import mxfp4, nvfp4
from ggraph.formats.coded.weight import (
    Family,
    Integers,
    Told,
    coded,
    count,
    fields,
    fp8_codes,
    groups,
    numbers,
    numbers_by_row,
    part,
    scaled,
    shaped,
    words,
)
from ggraph.formats.lazy_array import Array, LazyArray, Storage

PLAIN, PACKED, SCALE, ZERO = ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point"
SHAPE, GROUP_OF, WHOLE = ".weight_shape", ".weight_g_idx", ".weight_global_scale"
UNUSED = tuple(
    f".{what}_{kind}" for what in ("input", "output", "k", "v", "q")
    for kind in ("scale", "zero_point", "global_scale")
)  # fmt: skip
ORDERED = (True, "group", "dynamic")  # orders of columns in which groups do not stand in line
KNOWN = "float of 8 bits, or of 4 in groups of 16 or 32, int of 4 or 8"


def compressed(told: Told) -> Family:
    """The family of a config. FormatError for other codes, and for weights turned or left out."""
    for key in ("transform_config", "sparsity_config"):
        more = told.get(key)
        if isinstance(more, Mapping) and more and more.get("format") != "dense":
            raise FormatError(f"{key} is {shown(more)}: not read")
    schemes = _schemes(told.get("config_groups"))

    def weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
        scheme = _scheme_of(name, schemes)
        if scheme["type"] == "float" and scheme["num_bits"] == 4:
            return _of_fp4(name, parts, scheme)
        if scheme["type"] == "float":
            return _of_floats(name, parts, scheme)
        return _of_integers(name, parts, scheme)

    ends = (PLAIN, PACKED, SCALE, ZERO, SHAPE, GROUP_OF, WHOLE)
    return Family(ends, weight, UNUSED, plain=PLAIN)


def _schemes(told: object) -> list[tuple[list[str], Told]]:
    """Targets, and how their weights are coded, of each group. FormatError."""
    found: list[tuple[list[str], Told]] = []
    for group in told.values() if isinstance(told, Mapping) else ():
        scheme = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(scheme, Mapping):
            continue  # of activations or caches alone
        pair = (scheme.get("type", "int"), scheme.get("num_bits", 8))
        small = pair == ("float", 4) and scheme.get("group_size") in (16, 32)
        if pair not in (("float", 8), ("int", 4), ("int", 8)) and not small:
            raise FormatError(f"codes are {shown(pair[0])} of {pair[1]} bits: expected {KNOWN}")
        targets = [str(t) for t in group.get("targets") or ()]
        found.append((targets, {**scheme, "type": pair[0], "num_bits": pair[1]}))
    if not found:
        raise FormatError(f"config_groups is {shown(told)}: expected groups of weights")
    return found


def _scheme_of(name: str, schemes: list[tuple[list[str], Told]]) -> Told:
    """That of the first group that names the module, else of the first that names its class."""
    for targets, scheme in schemes:
        for target in targets:
            form = target.removeprefix("re:")
            try:
                named = re.match(form, name) if form != target else target == name
            except re.error as error:
                raise FormatError(f"target {shown(target)}: {error}") from None
            if named:
                return scheme
    for targets, scheme in schemes:
        if "Linear" in targets or len(schemes) == 1:
            return scheme
    raise FormatError(f"no group of config_groups is for {name!r}")


def _tile(scheme: Told, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that share a scale. FormatError."""
    strategy = scheme.get("strategy") or ("group" if scheme.get("group_size") else "tensor")
    if strategy == "tensor":
        return n, k
    if strategy == "channel":
        return 1, k
    if strategy == "group":
        return 1, groups(count(scheme, "group_size"), k)[0]
    tile = scheme.get("block_structure")
    if strategy != "block" or not isinstance(tile, list) or len(tile) != 2:
        raise FormatError(f"strategy is {shown(strategy)} with block_structure {shown(tile)}")
    told = dict(zip(("rows", "columns"), tile, strict=True))
    rows, columns = count(told, "rows"), count(told, "columns")
    if min(rows, columns) < 1:
        raise FormatError(f"block_structure is {shown(tile)}: expected two counts")
    return rows, columns


def _grid(t: RawTensor, tile: tuple[int, int], n: int, k: int) -> RawTensor:
    """The tensor as one number for each tile of [n, k]: [ceil(n / rows), ceil(k / columns)]."""
    whole = (ceil(n / tile[0]), ceil(k / tile[1]))
    short = [(), (1,)] if whole == (1, 1) else [whole[:1]] if whole[1] == 1 else []
    shaped(t, whole, *short)
    return RawTensor(t.name, t.dtype, whole, t.data.reshape(whole))


def _of_floats(name: str, parts: Mapping[str, RawTensor], scheme: Told) -> RawTensor:
    codes, table = fp8_codes(part(name, parts, PLAIN))
    *_, n, k = codes.shape
    tile = _tile(scheme, n, k)
    scale = _grid(part(name, parts, SCALE), tile, n, k)
    if ZERO in parts and parts[ZERO].float32().any():
        raise FormatError(f"{parts[ZERO].name!r}: zeros of FP8 that are not 0")
    return scaled(f"{name}{PLAIN}", codes, table, numbers(scale), tile)


def _of_fp4(name: str, parts: Mapping[str, RawTensor], scheme: Told) -> RawTensor:
    packed, scale = part(name, parts, PACKED), part(name, parts, SCALE)
    if ZERO in parts:
        raise FormatError(f"{parts[ZERO].name!r}: zeros of FP4")
    if scheme["group_size"] == 32:
        return mxfp4(f"{name}{PLAIN}", packed, scale)
    held = shaped(part(name, parts, WHOLE), (1,), ())
    divisor = numbers(held)
    if not (divisor > 0).all():
        raise FormatError(f"{held.name!r}: expected a number above 0")
    return nvfp4(f"{name}{PLAIN}", packed, scale, 1 / divisor)


def _of_integers(name: str, parts: Mapping[str, RawTensor], scheme: Told) -> RawTensor:
    bits = int(scheme.get("num_bits", 8))
    codes = _codes(name, parts, bits)
    n, k = codes.shape
    rows, size = tile = _tile(scheme, n, k)
    scale: Storage = numbers_by_row(_grid(part(name, parts, SCALE), tile, n, k))
    zero = None
    if not scheme.get("symmetric", True):
        zero = _zero(part(name, parts, ZERO), bits, tile, n, k)
    if scheme.get("actorder") in ORDERED:
        part(name, parts, GROUP_OF)
    each = np.arange(n) // rows  # the scale's row of each row
    of = _groups_of(parts[GROUP_OF], k, scale.shape[1]) if GROUP_OF in parts else None
    if rows > 1:
        scale, zero = np.asarray(scale)[each], None if zero is None else zero[each]
    return Integers(codes, bits, scale, size, zero, of).tensor(f"{name}{PLAIN}")


def _codes(name: str, parts: Mapping[str, RawTensor], bits: int) -> LazyArray:
    """Codes uint8 [n, k], 0 the least of them."""
    if PACKED not in parts:
        held = _int8(part(name, parts, PLAIN))
        return coded(held.shape, lambda i, j: _from_int8(held[i:j], bits), held)
    told = shaped(part(name, parts, SHAPE), (2,))
    if told.dtype not in (I32, I64):
        raise FormatError(f"{told.name!r}: expected two counts, got {told.dtype}")
    n, k = (int(v) for v in told.data)
    packed = part(name, parts, PACKED)
    shaped(packed, (n, ceil(k * bits / 32)))
    held = words(packed)
    return coded((n, k), lambda i, j: fields(held[i:j], bits)[:, :k], held)


def _int8(t: RawTensor) -> Array:
    if t.dtype is not I8 or len(t.shape) != 2:
        raise FormatError(f"{t.name!r}: expected a matrix of i8, got {t.dtype}{list(t.shape)}")
    return t.data


def _from_int8(held: Array, bits: int) -> Array:
    return held.view(np.uint8) + np.uint8(1 << (bits - 1))


def _zero(t: RawTensor, bits: int, tile: tuple[int, int], n: int, k: int) -> Array:
    """Zeros as codes, one for each tile: int8, or packed down the rows."""
    if t.dtype is not I32:
        held = _grid(t, tile, n, k)
        return _from_int8(_int8(held), bits)
    rows, columns = ceil(n / tile[0]), ceil(k / tile[1])
    shaped(t, (ceil(rows * bits / 32), columns))
    return fields(words(t), bits, down=True)[:rows]


def _groups_of(t: RawTensor, k: int, most: int) -> Array | None:
    """The group of each column; -1 in all of them where none was written. FormatError."""
    of: Any = shaped(t, (k,)).data
    if t.dtype not in (I32, I64):
        raise FormatError(f"{t.name!r}: expected numbers of groups, got {t.dtype}")
    if (of == -1).all():
        return None
    if not 0 <= of.min() <= of.max() < most:
        raise FormatError(f"{t.name!r}: expected numbers of {most} groups, got {shown(of)}")
    return np.asarray(of)
