"""Integers packed into words of 32 bits, turned: `quant_method` awq and gptq.

Legend: n results and k features of a weight; G groups of features; p fields of a word.

GPTQ has qweight i32 [k / p, n], qzeros i32 [G, n / p], scales [G, n] and g_idx i32 [k], the group
of each feature. AWQ has qweight i32 [k, n / p] and the same beside it, its fields in another order.
Source: AutoGPTQ and GPTQModel (`pack_block`, `convert_gptq_v1_to_v2_format`), AutoAWQ
(`packing_utils`, WQLinear_GEMM).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ggraph.dtype import I32, I64
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.coded.weight import (
    Family,
    Integers,
    Told,
    coded,
    count,
    fields,
    groups,
    numbers_by_row,
    part,
    shaped,
    words,
)
from ggraph.formats.lazy_array import Array, LazyArray

CODES, ZEROS, SCALES, GROUP_OF = ".qweight", ".qzeros", ".scales", ".g_idx"
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the field in which AWQ has each of eight columns
_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each field of a word


def awq(told: Told) -> Family:
    """The family of a config. FormatError for other layouts than gemm's, and other bits than 4."""
    version = told.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise FormatError(f"version is {shown(version)}: expected 'gemm'")
    bits = count(told, "bits", (4,), default=told.get("w_bit"))
    told_size = count(told, "group_size", default=told.get("q_group_size"))

    def weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
        held, zeros = (words(part(name, parts, end)).T for end in (CODES, ZEROS))
        (n, k), p = held.shape, 32 // bits

        def read(i: int, j: int) -> Array:  # a word has p rows
            own = fields(held[i // p : -(-j // p)], bits, down=True, order=_AWQ_ORDER)
            return own[i % p :][: j - i]

        zero = fields(zeros, bits, down=True, order=_AWQ_ORDER)
        return _weight(name, parts, bits, told_size, coded((n * p, k), read, held), zero)

    return Family((CODES, ZEROS, SCALES), weight)


def gptq(told: Told) -> Family:
    """The family of a config. FormatError for other layouts than AutoGPTQ's two, bits that are
    neither 4 nor 8, and modules with bits of their own."""
    form = told.get("checkpoint_format", told.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise FormatError(f"checkpoint_format is {shown(form)}: expected 'gptq' or 'gptq_v2'")
    bits, told_size = count(told, "bits", (4, 8)), count(told, "group_size")
    _check_alike(told.get("dynamic"))

    def weight(name: str, parts: Mapping[str, RawTensor]) -> RawTensor:
        held = words(part(name, parts, CODES)).T
        shape = (len(held), held.shape[1] * 32 // bits)
        codes = coded(shape, lambda i, j: fields(held[i:j], bits), held)
        zeros = words(part(name, parts, ZEROS)).view(np.uint32)
        if form == "gptq":  # each is less by one, and borrows from the next where it is 0
            zeros = zeros + np.uint32(_ONES[bits])
        if told.get("desc_act"):
            part(name, parts, GROUP_OF)
        return _weight(name, parts, bits, told_size, codes, fields(zeros.T, bits, down=True))

    return Family((CODES, ZEROS, SCALES, GROUP_OF), weight)


def _check_alike(dynamic: Any) -> None:
    """FormatError where modules are told of that have another form; left out ones have none."""
    if isinstance(dynamic, Mapping) and any(not str(m).startswith("-:") for m in dynamic):
        raise FormatError(f"dynamic is {shown(dynamic)}: modules with bits of their own")


def _weight(
    name: str, parts: Mapping[str, RawTensor], bits: int, told: int, codes: LazyArray, zero: Array
) -> RawTensor:
    """The weight of codes [n, k] and zeros [n, G]."""
    n, k = codes.shape
    size, count = groups(told, k)
    scale = numbers_by_row(shaped(part(name, parts, SCALES), (count, n)), turned=True)
    if zero.shape != (n, count):
        held = f"zeros for {list(zero.shape)} of {bits} bits"
        raise FormatError(f"{name + ZEROS!r}: expected zeros for {[n, count]}, got {held}")
    of = _groups_of(parts[GROUP_OF], k, size, count) if GROUP_OF in parts else None
    whole = Integers(codes, bits, scale, size, zero, of)
    return whole.tensor(f"{name}.weight")


def _groups_of(t: RawTensor, k: int, size: int, count: int) -> Array | None:
    """The group of each feature, None where they stand in line. FormatError."""
    of = shaped(t, (k,)).data
    if t.dtype not in (I32, I64) or (k and not 0 <= of.min() <= of.max() < count):
        raise FormatError(f"{t.name!r}: expected numbers of {count} groups, got {shown(of)}")
    return None if (of == np.arange(k) // size).all() else of
