"""GGUF files: a strict reader over a memory map, and a writer.

The reader believes nothing: every count, length and offset is held against the bytes that are
left before anything is allocated for it. Layout: magic, version, counts, key-value pairs, tensor
infos, padding, tensor data. Source: the GGUF specification (ggml `docs/gguf.md`).
"""

import mmap
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ggraph.dtype import BY_GGUF, DType
from ggraph.env import usable_cores
from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import Checkpoint, RawTensor, scales, storage_shape, with_scales
from ggraph.formats.lazy_array import pieces
from ggraph.formats.strings import Texts

MAGIC = b"GGUF"
ALIGNMENT = 32
MAX_DIMS = 4
MAX_DEPTH = 4  # of arrays within arrays
MANY = 1024  # strings of an array that is kept in one piece
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)
NUMBER, COUNT, TENSORS = CUT = ("split.no", "split.count", "split.tensors.count")  # of a part
_SMALLEST = {_STRING: 8, _ARRAY: 12} | {k: struct.calcsize("<" + c) for k, c in _SCALARS.items()}
_NUMPY = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class _Cursor:
    """A position in the file's bytes. Every read says what it is for and what is left."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.at, self.size = data, where, 0, len(data)

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.where}: {what} (at byte {self.at} of {self.size})")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.fail(f"{what}: {count} bytes wanted, {self.size - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("Q", f"length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from None

    def count(self, smallest: int, what: str) -> int:
        """A count of items of at least `smallest` bytes each, which must fit in what is left."""
        found: int = self.scalar("Q", what)
        if found * smallest > self.size - self.at:
            raise self.fail(f"{what}: {found} items cannot fit in {self.size - self.at} bytes")
        return found


_Contents = tuple[dict[str, Any], dict[str, RawTensor]]  # metadata and tensors of a file


def read_gguf(path: Path) -> Checkpoint:
    """Map and check a GGUF file (version 2 or 3, little-endian), or all parts of one that is split,
    of which `path` is any. Raises FormatError."""
    metadata, tensors = found = _contents(_mapped(path), str(path))
    if _is_part(metadata):
        metadata, tensors = _joined(path, found)
    architecture = metadata.get("general.architecture", metadata.get("general.type"))
    if not isinstance(architecture, str):
        raise FormatError(f"{path}: general.architecture is {shown(architecture)}, not a name")
    return Checkpoint(str(path), "gguf", architecture, metadata, with_scales(tensors))


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size < 24:
                raise FormatError(f"{path}: {os.fstat(f.fileno()).st_size} bytes are no GGUF file")
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def part_names(name: str) -> list[str]:
    """All parts of the split file of which one is called so, in order; of another file its name."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    stem, count = found.groups()
    return [f"{stem}-{i:05d}-of-{count}.gguf" for i in range(1, int(count) + 1)]


def _is_part(metadata: Mapping[str, Any]) -> bool:
    number, count = metadata.get(NUMBER), metadata.get(COUNT)
    return isinstance(number, int) and isinstance(count, int) and count > 1


def _joined(path: Path, found: _Contents) -> _Contents:
    """All parts of the file of which `path` is one, with contents `found`: the first one's metadata
    without what says that it is a part."""
    number, count = found[0][NUMBER], found[0][COUNT]
    names = part_names(path.name)
    if len(names) != count or path.name not in names[number : number + 1]:
        raise FormatError(
            f"{path}: part {number + 1} of {count}, whose name would end in"
            f" -{number + 1:05d}-of-{count:05d}.gguf: the others are not to be found"
        )
    metadata: dict[str, Any] = {}
    tensors: dict[str, RawTensor] = {}
    for i, part in enumerate(map(path.with_name, names)):
        own, more = found if i == number else _contents(_mapped(part), str(part))
        if (own.get(NUMBER), own.get(COUNT)) != (i, count):
            raise FormatError(f"{part}: it does not say that it is part {i + 1} of {count}")
        twice = next((n for n in more if n in tensors), None)
        if twice is not None:
            raise FormatError(f"{part}: tensor {shown(twice)} stands in an earlier part, too")
        metadata, tensors = metadata or own, tensors | more
    if metadata.get(TENSORS, len(tensors)) != len(tensors):
        told = shown(metadata[TENSORS])
        raise FormatError(f"{path}: {len(tensors)} tensors in all parts, expected {told}")
    return {k: v for k, v in metadata.items() if k not in CUT}, tensors


def _contents(data: mmap.mmap, where: str) -> _Contents:
    c = _Cursor(data, where)
    tensor_count, pair_count = _header(c)
    metadata = _metadata(c, pair_count)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= 1 << 20
        or alignment & (alignment - 1)
    ):
        raise c.fail(
            f"general.alignment = {shown(alignment)} is not a power of two up to {1 << 20}"
        )
    infos = [_info(c) for _ in range(tensor_count)]
    start = -(-c.at // alignment) * alignment
    tensors: dict[str, RawTensor] = {}
    for name, shape, dtype, offset in infos:
        if name in tensors:
            raise c.fail(f"tensor {shown(name)} stands twice")
        if offset % alignment:
            raise c.fail(f"tensor {shown(name)}: offset {offset} is no multiple of {alignment}")
        tensors[name] = _window(c, name, shape, dtype, start + offset)
    return metadata, tensors


def _header(c: _Cursor) -> tuple[int, int]:
    magic = c.take(4, "magic")
    if magic != MAGIC:
        raise FormatError(f"{c.where}: the file begins with {magic!r}, not with {MAGIC!r}")
    version = c.scalar("I", "version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = ": a big-endian file, which is not supported" if swapped in (2, 3) else ""
        raise FormatError(f"{c.where}: GGUF version {version}; known: 2, 3{hint}")
    tensors = c.count(25, "number of tensors")
    return tensors, c.count(13, "number of metadata pairs")


def _metadata(c: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i in range(count):
        key = c.string(f"key {i}")
        if key in found:
            raise c.fail(f"key {shown(key)} stands twice")
        told = shown(key)
        found[key] = _value(c, c.scalar("I", f"type of {told}"), told, 0)
    return found


def _value(c: _Cursor, kind: int, what: str, depth: int) -> Any:
    if kind == _STRING:
        return c.string(what)
    if kind == 7:
        return bool(c.scalar("B", what))
    if kind in _SCALARS:
        return c.scalar(_SCALARS[kind], what)
    if kind != _ARRAY:
        raise c.fail(f"{what}: unknown value type {kind}")
    if depth == MAX_DEPTH:
        raise c.fail(f"{what}: arrays nested deeper than {MAX_DEPTH}")
    item = c.scalar("I", f"item type of {what}")
    if item not in _SMALLEST:
        raise c.fail(f"{what}: unknown item type {item}")
    count = c.count(_SMALLEST[item], f"length of {what}")
    if item in _NUMPY:
        raw = c.take(count * _SMALLEST[item], what)
        return np.frombuffer(raw, _NUMPY[item])
    if item == _STRING:
        texts = _texts(c, count, what)
        return texts if count >= MANY else list(texts)
    return [_value(c, item, what, depth + 1) for _ in range(count)]


def _texts(c: _Cursor, count: int, what: str) -> Texts:
    """`count` strings: all at once, and one by one where one is to be complained of."""
    read, data, at, starts = struct.Struct("<Q").unpack_from, c.data, c.at, array("q")
    try:
        for _ in range(count):
            starts.append(at)
            at += 8 + read(data, at)[0]
        starts.append(at)
        if at <= c.size:
            texts = Texts.of_utf8(data[c.at : at], np.frombuffer(starts, np.int64) - c.at, 8)
            c.at = at
            return texts
    except (struct.error, OverflowError, UnicodeError):
        pass
    return Texts(c.string(what) for _ in range(count))


def _info(c: _Cursor) -> tuple[str, tuple[int, ...], DType, int]:
    name = c.string("tensor name")
    told = shown(name)
    dims = c.scalar("I", f"dimensions of {told}")
    if dims > MAX_DIMS:
        raise c.fail(f"tensor {told} has {dims} dimensions, at most {MAX_DIMS} are allowed")
    sizes = [c.scalar("Q", f"size of {told}") for _ in range(dims)]
    kind = c.scalar("I", f"type of {told}")
    if kind not in BY_GGUF:
        raise c.fail(f"tensor {told}: unknown type {kind}")
    shape, dtype = tuple(reversed(sizes)), BY_GGUF[kind]
    # a size of 0 must not hide another one that is absurd
    if prod(n or 1 for n in shape) > c.size * dtype.block // dtype.block_bytes + dtype.block:
        raise c.fail(f"tensor {told}: {dtype}{list(shape)} is larger than the file")
    if dtype.is_block and (not shape or shape[-1] % dtype.block):
        raise c.fail(f"tensor {told}: rows of {dtype}{list(shape)} are not whole blocks")
    return name, shape, dtype, c.scalar("Q", f"offset of {told}")


def _window(c: _Cursor, name: str, shape: tuple[int, ...], dtype: DType, start: int) -> RawTensor:
    stored = storage_shape(shape, dtype)
    nbytes = prod(stored) * dtype.np.itemsize
    if start + nbytes > c.size:
        end = start + nbytes
        raise c.fail(f"tensor {shown(name)}: data from {start} to {end} lies past the end")
    data = np.frombuffer(c.data, dtype.np, prod(stored), start) if nbytes else np.zeros(0, dtype.np)
    return RawTensor(name, dtype, shape, data.reshape(stored))


Progress = Callable[[str, int, int], None]  # name of the tensor that is next, done, of


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[RawTensor],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF v3 file, whole or not at all (a temporary file is renamed at the end); scales of
    matrices behind all tensors. Tensors that are made when they are read are made piece by piece,
    and no piece is kept.

    Value types: bool, int (u32, else i32 or i64), float (f32), str, NumPy arrays, and lists of
    str, bool, int or float. Raises FormatError for other values and when the disk refuses.
    """
    listed = list(tensors)
    listed += scales(listed)
    pairs = {k: v for k, v in metadata.items() if k != "general.alignment"}
    try:
        if path.exists() and not path.is_file():
            raise FormatError(f"{path}: exists and is no regular file")  # a rename would replace it
        temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with temporary.open("xb") as f:
                _write(f, pairs, listed, progress)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def _write(
    f: BinaryIO, pairs: Mapping[str, Any], tensors: list[RawTensor], progress: Progress | None
) -> None:
    f.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
    for key, value in pairs.items():
        f.write(_packed_string(key) + _packed(key, value))
    offset = 0
    for t in tensors:
        f.write(_packed_string(t.name) + struct.pack("<I", len(t.shape)))
        f.write(struct.pack(f"<{len(t.shape)}Q", *reversed(t.shape)))
        f.write(struct.pack("<IQ", t.dtype.gguf, offset))
        offset += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    for i, t in enumerate(tensors):
        if progress is not None:
            progress(t.name, i, len(tensors))
        f.write(b"\0" * (-f.tell() % ALIGNMENT))
        for piece in pieces(t.storage, usable_cores()):
            f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    f.write(b"\0" * (-f.tell() % ALIGNMENT))


def _packed_string(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"{text[:80]!r} is no UTF-8 text: {error.reason}") from None
    return struct.pack("<Q", len(raw)) + raw


def _packed(key: str, value: Any) -> bytes:
    """Type number and bytes of one value."""
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<IB", 7, bool(value))
    if isinstance(value, (int, np.integer)):
        return _packed_integer(key, int(value))
    if isinstance(value, (float, np.floating)):
        return struct.pack("<I", 6) + _packed_floats(key, [float(value)])
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, np.ndarray):
        return _packed_array(key, value)
    if isinstance(value, (list, tuple, Texts)):
        if all(isinstance(v, str) for v in value):
            items = b"".join(map(_packed_string, value))
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + items
        if value and all(isinstance(v, bool) for v in value):
            return _packed_array(key, np.asarray(value, np.bool_))
        if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value):
            numbers = [v for v in value if isinstance(v, int)]
            if len(numbers) < len(value):
                floats = _packed_floats(key, [v for v in value if isinstance(v, int | float)])
                return struct.pack("<IIQ", _ARRAY, 6, len(value)) + floats
            if not all(-(1 << 31) <= v < 1 << 31 for v in numbers):
                raise FormatError(
                    f"{key!r}: a number does not fit in int32; NumPy arrays may be int64"
                )
            return _packed_array(key, np.asarray(numbers, np.int32))
    raise FormatError(f"{key!r}: GGUF has no type for {type(value).__name__} {shown(value)}")


def _packed_floats(key: str, values: list[float]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}f", *values)
    except (OverflowError, struct.error):  # the latter for a whole number that is no float at all
        raise FormatError(f"{key!r}: a number does not fit in float32") from None


def _packed_integer(key: str, value: int) -> bytes:
    for kind, low, high in (
        (4, 0, 1 << 32),
        (5, -(1 << 31), 0),
        (10, 0, 1 << 64),
        (11, -(1 << 63), 0),
    ):
        if low <= value < high:
            return struct.pack("<I" + _SCALARS[kind], kind, value)
    raise FormatError(f"{key!r}: {value.bit_length()} bits do not fit in 64")


def _packed_array(key: str, value: np.ndarray[Any, Any]) -> bytes:
    for kind, code in (*_NUMPY.items(), (7, "?")):
        if value.dtype == np.dtype(code):
            return struct.pack("<IIQ", _ARRAY, kind, value.size) + value.tobytes()
    raise FormatError(f"{key!r}: GGUF has no type for arrays of {value.dtype}")
