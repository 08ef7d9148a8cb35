"""Torch checkpoints (`pytorch_model.bin`) without torch and without running code.

The file is a zip archive, not compressed, with a pickle of the tensors' layout and one member per
storage. Tensors are views of it where they can be: one that many share is read once, and whatever a
layout says, they take no more than twice the file's bytes. The unpickler below can make strings,
numbers, containers and tensors; any other global is refused, so a pickle that wants to call
something ends in a FormatError.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.dtype import BF16, F16, F32, F64, I8, I16, I32, I64, DType
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import RawTensor

_STORAGES: dict[str, DType] = {
    "FloatStorage": F32, "HalfStorage": F16, "BFloat16Storage": BF16, "DoubleStorage": F64,
    "LongStorage": I64, "IntStorage": I32, "ShortStorage": I16, "CharStorage": I8,
    "ByteStorage": I8, "BoolStorage": I8,
}  # fmt: skip
MAX_PICKLE = 64 << 20


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: DType
    count: int


@dataclass(frozen=True)
class _Layout:
    """A tensor as the pickle describes it: a strided window on a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Of its elements."""
        return prod(self.shape)


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Layout:
    numbers = (offset, *shape, *strides)
    whole = all(isinstance(n, int) and 0 <= n < 1 << 48 for n in numbers)
    if not isinstance(storage, _Storage) or not whole or len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor's layout is not made of counts")
    return _Layout(storage, offset, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
    """Builds tensors and containers; nothing else has a name here."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _rebuild
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is not allowed")

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"unknown persistent id {shown(pid)}")
        _, dtype, key, _, count = pid
        if not isinstance(dtype, DType) or not isinstance(count, int):
            raise pickle.UnpicklingError(f"unknown storage {shown(pid)}")
        return _Storage(str(key), dtype, count)


def read_torch(path: Path) -> dict[str, RawTensor]:
    """All tensors of one torch file. Raises FormatError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _tensors(archive, path)
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise FormatError(f"{path}: no readable torch archive: {error}") from None


def _tensors(archive: zipfile.ZipFile, path: Path) -> dict[str, RawTensor]:
    names = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
    if len(names) != 1:
        raise FormatError(f"{path}: {len(names)} members called data.pkl, expected one")
    if archive.getinfo(names[0]).file_size > MAX_PICKLE:
        raise FormatError(f"{path}: a pickle of {archive.getinfo(names[0]).file_size} bytes")
    storages = _Storages(archive, path, names[0].removesuffix("data.pkl"))
    pickled = storages.read(names[0])
    try:
        top = _Unpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise FormatError(f"{path}: {error}") from None
    nested = top.get("state_dict", top) if isinstance(top, Mapping) else None
    if not isinstance(nested, Mapping):
        raise FormatError(f"{path}: the pickle holds a {type(top).__name__}, not named tensors")
    found = {}
    for name, value in nested.items():
        if isinstance(value, _Layout):
            found[str(name)] = storages.tensor(str(name), value)
    return found


class _Storages:
    """The members of an archive, each read once."""

    def __init__(self, archive: zipfile.ZipFile, path: Path, root: str) -> None:
        self._archive, self._path, self._root = archive, path, root
        self._held: dict[str, bytes] = {}
        # Bytes of tensors that are no views; each storage has room for one that needs all of it.
        self._spare = sum(i.compress_size for i in archive.infolist())

    def read(self, member: str) -> bytes:
        """The bytes of a member. FormatError where it is compressed, as torch writes none."""
        found = self._held.get(member)
        if found is None:
            if self._archive.getinfo(member).compress_type != zipfile.ZIP_STORED:
                raise FormatError(f"{self._path}: {member!r} is compressed, which torch's are not")
            try:
                found = self._held[member] = self._archive.read(member)
            except (RuntimeError, EOFError) as error:  # encrypted, or cut
                raise FormatError(f"{self._path}: {member!r}: {error}") from None
        return found

    def tensor(self, name: str, layout: _Layout) -> RawTensor:
        """A tensor of this layout."""
        path, dtype = self._path, layout.storage.dtype
        member = f"{self._root}data/{layout.storage.key}"
        size, count = dtype.block_bytes, layout.count
        try:
            held = self._archive.getinfo(member).file_size
        except KeyError:
            message = f"{path}: tensor {name!r} lies in {member!r}, which is missing"
            raise FormatError(message) from None
        pairs = zip(layout.shape, layout.strides, strict=True)
        reach = layout.offset + sum((n - 1) * s for n, s in pairs) + 1
        if count and (reach * size > held or count * size > held):
            raise FormatError(f"{path}: tensor {name!r} reaches past its storage of {held} bytes")
        if not count:
            return RawTensor(name, dtype, layout.shape, np.zeros(layout.shape, dtype.np))
        flat = np.frombuffer(self.read(member), dtype.np, held // size)
        strides = tuple(s * size for s in layout.strides)
        view = np.lib.stride_tricks.as_strided(flat[layout.offset :], layout.shape, strides)
        if not view.flags.c_contiguous:
            self._spare -= view.nbytes
            if self._spare < 0:
                raise FormatError(f"{path}: with tensor {name!r} they hold more than the file does")
        return RawTensor(name, dtype, layout.shape, np.ascontiguousarray(view))
