"""A lowering in progress: addresses, packed weights, quantised activations, accesses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph.backends.cpu.pages import Shelf
from ggraph.backends.cpu.pool import Pool
from ggraph.backends.cpu.program import Access, Assembler, Range
from ggraph.backends.cpu.slots import list_bytes
from ggraph.backends.cpu.tiles import activation_bytes, packed_bytes
from ggraph.backends.protocol import Launch, Memory, Ref
from ggraph.dtype import F32, DType
from ggraph.formats.quants import dequantize
from ggraph.tensor import Array, Kind, Tensor

GUARD = 1 << 14  # bytes after the last tile that prefetches may name


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight matrix [n, k], or [experts, n, k] one after the other, as the kernels want it."""

    dtype: DType
    data: Array


# What a packed form depends on: the memory, where in it, and the matrix that is read there.
PackedKey = tuple[Memory, int, str, tuple[int, ...]]
# Which bytes of which value a tensor shows. A value never changes: what overwrites it is another.
Shown = tuple[str, int, tuple[int, ...], tuple[int, ...], str]


@dataclass(eq=False)
class Lowering:
    """Turns launches into instructions. `packed` is shared by all programs of a backend."""

    pool: Pool
    exact: bool
    packed: dict[PackedKey, Packed]
    stream: bool = False  # weights pass the caches by
    shelf: Shelf = field(default_factory=Shelf)
    asm: Assembler = field(init=False)
    made: dict[tuple[str | Shown, ...], Array] = field(default_factory=dict)  # by kernel, sources
    _access: Access = field(default=Access((), ()))  # of the launch at hand

    def __post_init__(self) -> None:
        self.asm = Assembler(self.pool.jit, self.stream)

    def begin(self, launch: Launch) -> None:
        """The next instructions are those of `launch`: they access its sources and its result."""
        read = [s for s in launch.sources if not is_weight(s)]
        self._access = Access(tuple(map(_range, read)), (_range(launch.result),))

    def add(
        self,
        name: str,
        *,
        uses: Sequence[Array] = (),
        makes: Sequence[Array] = (),
        **values: Any,
    ) -> None:
        """Append an instruction that accesses what the launch does, and private arrays."""
        reads = (*self._access.reads, *map(_bytes_of, uses))
        writes = tuple(map(_bytes_of, makes)) or self._access.writes
        self.asm.add(name, access=Access(reads, writes), **values)

    def at(self, ref: Ref) -> int:
        """Address of a tensor's first element; the memory is kept alive with the program."""
        self.asm.kept.append(ref.memory.handle)
        return int(ref.memory.handle.ctypes.data) + ref.offset

    def weight(self, ref: Ref) -> Packed:
        """The packed form of a weight, made on first use."""
        t = ref.tensor
        dtype = F32 if self.exact and t.dtype.is_block else t.dtype
        key = (ref.memory, ref.offset, dtype.name, t.shape)
        if key not in self.packed:
            count = math.prod(t.shape[:-1])
            raw = ref.memory.handle[ref.offset : ref.offset + t.nbytes].reshape(count, -1)
            raw = dequantize(raw, t.dtype).view(np.uint8) if dtype is not t.dtype else raw
            self.packed[key] = self._pack(raw, dtype, t.shape)
        return self.packed[key]

    def blocks(self, ref: Ref, m: int, k: int) -> Array:
        """The 8-bit activation blocks of m rows, computed once while the source stands."""
        step = activation_bytes(k)
        return self._made("quantise", {"x": ref}, "out", (m, step), m=m, k=k, xs=k * 4, os=step)

    def shown(self, mask: Ref, length: Ref | None) -> Array:
        """The list of the slots that each row of a mask shows among the first `length`."""
        m, n = mask.tensor.shape
        step = list_bytes(n)
        of = {"mask": mask} if length is None else {"mask": mask, "length": length}
        given = {"length": 0} if length is None else {}
        return self._made(
            "shown_slots", of, "list", (m, step), m=m, n=n, ms=n * 4, ls=step, **given
        )

    def _made(
        self, kernel: str, of: Mapping[str, Ref], result: str, shape: tuple[int, int], **values: Any
    ) -> Array:
        """What a kernel makes of sources (by argument), bytes of `shape`, once for all launches."""
        key: tuple[str | Shown, ...] = (kernel, *(_shown(ref.tensor) for ref in of.values()))
        if key not in self.made:
            out = np.zeros(shape, np.uint8)
            places: dict[str, Any] = {
                result: out,
                **{name: self.at(ref) for name, ref in of.items()},
            }
            self.add(kernel, makes=[out], **places, **values)
            self.made[key] = out
        return self.made[key]

    def _pack(self, raw: Array, dtype: DType, shape: tuple[int, ...]) -> Packed:
        *experts, n, k = shape
        size = packed_bytes(dtype, n, k)
        out = self.shelf.take(size * math.prod(experts) + GUARD)
        asm = Assembler(self.pool.jit)
        for e in range(math.prod(experts)):
            rows, tiles = raw[e * n : (e + 1) * n], out[e * size :]
            asm.add(f"pack_{dtype.name}", raw=rows, out=tiles, n=n, k=k, row_bytes=raw.strides[0])
        self.pool.run(asm.freeze())
        return Packed(dtype, out)


def _shown(t: Tensor) -> Shown:
    return t.root.name, t.offset, t.shape, t.strides, t.dtype.name


def _range(ref: Ref) -> Range:
    """Addresses that a tensor covers, gaps of a view included."""
    start = int(ref.memory.handle.ctypes.data) + ref.offset
    return start, start + ref.tensor.nbytes


def _bytes_of(a: Array) -> Range:
    return int(a.ctypes.data), int(a.ctypes.data) + a.nbytes


def is_weight(ref: Ref) -> bool:
    """Whether a source is a stored weight, which never changes."""
    return ref.tensor.is_leaf and ref.tensor.kind is Kind.WEIGHT


def is_rows(t: Tensor) -> bool:
    """Whether a tensor is float32 without gaps."""
    return t.dtype is F32 and t.is_contiguous and len(t.shape) >= 1
