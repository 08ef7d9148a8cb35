"""Folders whose weights are codes, written by hand: safetensors of any type, FP8, FP4, int4."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.tensor import Array

Stored = dict[str, tuple[str, Array]]  # the type as safetensors names it, and bytes of its width
NAMES = {"f2": "F16", "f4": "F32", "i8": "I64", "i4": "I32", "i1": "I8", "u1": "U8"}
W4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
        }},
    },
}  # fmt: skip
TILES = {"quant_method": "fp8", "weight_block_size": [16, 32]}
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def read_stored(path: Path) -> Stored:
    """The tensors of a safetensors file as they are stored."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found: Stored = {}
    widths = {"F64": "f8", **{v: k for k, v in NAMES.items()}, "BF16": "u2"}
    for name, told in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = (8 + length + at for at in told["data_offsets"])
            data = np.frombuffer(raw[first:last], "<" + widths.get(told["dtype"], "u1"))
            found[name] = told["dtype"], data.reshape(told["shape"])
    return found


def write_stored(folder: Path, config: Mapping[str, Any], tensors: Stored) -> Path:
    """A folder of these tensors."""
    folder.mkdir(exist_ok=True)
    at, header, body = 0, {}, []
    for name, (kind, data) in tensors.items():
        raw = np.ascontiguousarray(data).tobytes()
        header[name] = {
            "dtype": kind, "shape": list(data.shape), "data_offsets": [at, at + len(raw)],
        }  # fmt: skip
        at += len(raw)
        body.append(raw)
    told = json.dumps(header).encode()
    whole = struct.pack("<Q", len(told)) + told + b"".join(body)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain(data: Array) -> tuple[str, Array]:
    """An array under the name of its type."""
    return NAMES[data.dtype.str[1:]], data


def is_linear(name: str, t: Array) -> bool:
    """Whether libraries put a tensor in codes: matrices of layers that are no choice or table."""
    others = ("norm", "conv", "embed", ".gate.weight", "router", "shared_expert_gate", "visual")
    whole = t.ndim == 2 and t.shape[1] % 32 == 0 and "layers." in name
    return whole and name.endswith(".weight") and not any(o in name for o in others)


def four_bits(name: str, t: Array) -> tuple[Stored, Array]:
    """A weight [n, k] as compressed-tensors packs groups of 32, and what it stands for, exactly."""
    of = t.astype(np.float32).reshape(len(t), -1, 32)
    scale = np.exp2(np.ceil(np.log2(np.abs(of).max(2) / 7 + 1e-9)))
    codes = np.clip(np.round(of / scale[..., None]), -8, 7)
    fields = (codes + 8).astype(np.uint32).reshape(len(t), -1, 8)
    words = (fields << (4 * np.arange(8, dtype=np.uint32))).sum(2).astype(np.uint32)
    stored: Stored = {
        f"{name}_packed": ("I32", words.view(np.int32)),
        f"{name}_scale": ("F16", scale.astype(np.float16)),
        f"{name}_shape": ("I64", np.array(t.shape, np.int64)),
    }
    return stored, (codes * scale[..., None]).reshape(t.shape).astype(np.float32)


def eight(code: int, exponent: int, fraction: int) -> float:
    """The number of a code of 8 bits with so many bits of exponent and fraction, as the OCP's
    specification defines it, without those that are no number."""
    bias = 2 ** (exponent - 1) - 1
    e, m = code >> fraction & (2**exponent - 1), code & (2**fraction - 1)
    sign = -1.0 if code & 0x80 else 1.0
    if e == 0:
        return float(sign * m * 2.0 ** (1 - bias - fraction))
    return float(sign * (1 + m / 2**fraction) * 2.0 ** (e - bias))


def tiles(name: str, t: Array, rows: int, columns: int) -> tuple[Stored, Array]:
    """A weight [.., n, k] in E4M3 with a scale, a power of two, for each tile; and its values."""
    table = np.array([eight(c, 4, 3) for c in range(256)])
    table[[0x7F, 0xFF]] = np.inf
    scale = np.zeros((*t.shape[:-2], -(-t.shape[-2] // rows), -(-t.shape[-1] // columns)))
    codes, values = np.zeros(t.shape, np.uint8), np.zeros(t.shape, np.float32)
    for at in np.ndindex(scale.shape):
        *lead, r, c = at
        part = (
            *lead, slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns),
        )  # fmt: skip
        tile = t[part].astype(np.float64)
        scale[at] = 2.0 ** np.ceil(np.log2(np.abs(tile).max() / 448 + 1e-9))
        codes[part] = np.abs(tile[..., None] / scale[at] - table).argmin(-1)
        values[part] = table[codes[part]] * scale[at]
    stored: Stored = {name: ("F8_E4M3", codes), f"{name}_scale_inv": plain(scale.astype("<f4"))}
    return stored, values


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(name: str, t: Array) -> tuple[Stored, Array]:
    """A weight [n, k] as ModelOpt stores NVFP4, and its values: in float32 of codes by the scales
    of 16, by the tensor's, or rounded to halves where rows are not whole blocks of 64."""
    of = t.astype(np.float32).reshape(len(t), -1, 16)
    whole = np.float32(max(np.abs(of).max(), 1e-6) / (6 * 448))
    table = np.array([eight(c, 4, 3) for c in range(0x7F)])  # without a sign
    steps = np.abs(np.abs(of).max(2)[..., None] / 6 / whole - table).argmin(-1)
    each = table[steps].astype(np.float32)[..., None]
    codes = np.abs(of[..., None] / np.maximum(each * whole, 1e-30)[..., None] - E2M1).argmin(-1)
    flat = codes.reshape(len(t), -1, 2).astype(np.uint8)
    stored: Stored = {
        name: ("U8", flat[..., 0] | flat[..., 1] << 4),
        f"{name}_scale": ("F8_E4M3", steps.astype(np.uint8)),
        f"{name}_scale_2": ("F32", np.asarray(whole)),
    }
    levels = E2M1[codes].astype(np.float32)
    if t.shape[1] % 64:
        return stored, (levels * (each * whole)).reshape(t.shape).astype("f2").astype(np.float32)
    return stored, (levels * each * whole).reshape(t.shape)
