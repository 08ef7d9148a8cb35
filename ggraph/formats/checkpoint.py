"""Named arrays and metadata, whatever the file: the nouns of this room.

`ggraph.formats.open_checkpoint` picks the reader by what the path holds, not by its name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ggraph.dtype import BF16, E8M0, F32, FP8, DType
from ggraph.formats.lazy_array import Array, Storage
from ggraph.formats.quants import dequantize


@dataclass(frozen=True, eq=False)
class RawTensor:
    """One stored tensor, usually a read-only window on a mapped file.

    `shape` counts elements in NumPy order. The storage is for plain types an array of `dtype.np` of
    that shape, for block types uint8 of shape (*shape[:-1], bytes of a row). Where the file holds
    something else, it is made of that when it is read. `scale` is what all values are multiplied by
    beside that, float32 [1], or [X] for the matrices of [X, n, k]: NVFP4 needs it, since the scales
    of its blocks have few exponents.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    storage: Storage = field(repr=False)
    scale: Array | None = field(default=None, repr=False)

    @property
    def data(self) -> Array:
        """The storage as an array; one that is made when it is read is made anew at each call."""
        return np.asarray(self.storage)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return int(self.storage.nbytes)

    def float32(self) -> Array:
        """The values as a new float32 array of `shape`."""
        values = self._unscaled()
        if self.scale is not None:
            with np.errstate(all="ignore"):  # what damaged files hold is their value
                values *= self.scale.reshape(-1, *[1] * (values.ndim - 1))
        return values

    def _unscaled(self) -> Array:
        data = self.data
        if not data.size:
            return np.zeros(self.shape, np.float32)
        if self.dtype.is_block or self.dtype in (BF16, *FP8, E8M0):
            raw = np.ascontiguousarray(data).view(np.uint8)
            return dequantize(raw.reshape(*self.shape[:-1], -1), self.dtype).reshape(self.shape)
        return np.array(data, np.float32)

    def widened(self) -> "RawTensor":
        """A vector of plain half-size numbers as float32, exactly; everything else as it is. Norms
        and biases are small, and no kernel should have to know of their types."""
        plain = self.dtype.is_float and not self.dtype.is_block
        if len(self.shape) != 1 or not plain or self.dtype is F32:
            return self
        return RawTensor(self.name, F32, self.shape, self.float32())


SCALE = ".scale"  # what llama.cpp calls a matrix's, in place of .weight


def scale_name(weight: str) -> str:
    """The name of the tensor that holds a matrix's scale."""
    return weight.removesuffix(".weight") + SCALE


def scales(tensors: Iterable[RawTensor]) -> list[RawTensor]:
    """Scales of matrices as tensors of their own."""
    scaled = ((scale_name(t.name), t.scale) for t in tensors if t.scale is not None)
    return [RawTensor(name, F32, s.shape, s) for name, s in scaled]


def with_scales(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Tensors with their scales, which stand in tensors of their own in GGUF files; those of
    activations, which are not computed in such codes, are left out."""
    found = {n: t for n, t in tensors.items() if not n.endswith(".input_scale")}
    for name, t in tensors.items():
        titles = (scale_name(name), name + SCALE)  # some writers keep .weight
        title = next((n for n in titles if n in found), "")
        count = t.shape[0] if len(t.shape) == 3 else 1
        if title and len(t.shape) > 1 and found[title].shape == (count,):
            found[name] = replace(t, scale=found.pop(title).float32())
    return found


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a model file or folder holds.

    `format` is "gguf" or "hf". `metadata` holds the GGUF keys, or config.json.
    """

    path: str
    format: str
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]


def storage_shape(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Shape of a tensor's storage array: block types end in the bytes of one row."""
    if not dtype.is_block:
        return shape
    return (*shape[:-1], dtype.row_bytes(shape[-1]))
