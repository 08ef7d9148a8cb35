"""How much each column of a matrix counts: llama.cpp's importance matrices ("imatrix").

Legend: M matrices of a tensor (its experts; 1 of a plain one), N columns.

Read as GGUF and as the binary file that llama.cpp wrote before; written as GGUF. Source: its
tools/imatrix.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.dtype import F32
from ggraph.errors import FormatError
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import MAGIC, read_gguf, write_gguf

Array = np.ndarray[Any, Any]
KIND = "imatrix"
SQUARES, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, eq=False)
class Importance:
    """Sums of the squares of what a tensor's columns were multiplied by, f32 [M, N], and of how
    many rows they are, f32 [M] or [1]."""

    squares: Array
    counts: Array

    def columns(self, name: str, shape: tuple[int, ...]) -> Array:
        """Mean squares f32 [M or 1, N] for a tensor of this shape; 1 for an expert that saw no row.
        FormatError for one that does not belong to them."""
        width, matrices = shape[-1], prod(shape[:-2])
        sizes, counts = {width, width * matrices}, self.counts.reshape(-1, 1)
        if self.squares.size not in sizes or len(counts) not in (1, self.squares.size // width):
            raise FormatError(
                f"importance of {name}: {self.squares.size} columns and {len(counts)} counts for "
                f"a tensor of {shape}"
            )
        sums = self.squares.reshape(-1, width)
        means: Array = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
        return means


def read_importance(path: Path) -> dict[str, Importance]:
    """By tensors' names. FormatError for another file."""
    try:
        with path.open("rb") as f:
            begin = f.read(len(MAGIC))
            found = None if begin == MAGIC else _binary(begin + f.read(), str(path))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if found is not None:
        return found
    checkpoint = read_gguf(path)
    if checkpoint.metadata.get("general.type") != KIND:
        raise FormatError(f"{path} is no importance matrix (general.type is not {KIND!r})")
    tensors, known = checkpoint.tensors, dict[str, Importance]()
    for name in tensors:
        title = name.removesuffix(SQUARES)
        if title == name:
            continue
        if f"{title}{COUNTS}" not in tensors:
            raise FormatError(f"{path}: {name} has no {COUNTS}")
        known[title] = _checked(
            tensors[name].float32(), tensors[f"{title}{COUNTS}"].float32(), f"{path}: {title}"
        )
    return known


def write_importance(
    path: Path, found: Mapping[str, Importance], text: str, chunks: int, size: int
) -> None:
    """Write them as GGUF: of so many chunks of `size` tokens. FormatError for the disk."""
    metadata = {
        "general.type": KIND,
        "imatrix.datasets": [text],
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": size,
    }
    tensors = []
    for name, own in sorted(found.items()):
        for end, values in ((SQUARES, own.squares), (COUNTS, own.counts.reshape(-1, 1))):
            tensors.append(RawTensor(f"{name}{end}", F32, values.shape, values.astype(np.float32)))
    write_gguf(path, metadata, tensors)


def _binary(raw: bytes, where: str) -> dict[str, Importance]:
    """The older form: a count, and for each tensor its name, the number of chunks, and the mean
    squares times that."""
    at, found = 0, dict[str, Importance]()

    def taken(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(raw) - at:
            raise FormatError(f"{where} is no importance matrix: {size} bytes wanted at {at}")
        at += size
        return raw[at - size : at]

    def number() -> int:
        return int(struct.unpack("<i", taken(4))[0])

    for _ in range(number()):
        name = taken(number()).decode("utf-8", "replace")
        calls, count = number(), number()
        values = np.frombuffer(taken(4 * count), "<f4")
        found[name] = _checked(values, np.array([calls], np.float32), f"{where}: {name}")
    return found


def _checked(squares: Array, counts: Array, where: str) -> Importance:
    """What is finite, and not below 0."""
    for values in (squares, counts):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise FormatError(f"{where}: expected finite numbers, none below 0")
    return Importance(squares, counts)
