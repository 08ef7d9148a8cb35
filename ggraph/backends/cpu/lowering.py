"""A lowering in progress: addresses, packed weights, quantised activations, accesses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph.backends.cpu.pages import Shelf
from ggraph.backends.cpu.pool import Pool
from ggraph.backends.cpu.program import Access, Assembler, Range
from ggraph.backends.cpu.slots import list_bytes
from ggraph.backends.cpu.tiles import activation_bytes, packed_bytes
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import F32, DType
from ggraph.formats.quants import dequantize
from ggraph.tensor import Array, Kind, Tensor

GUARD = 1 << 14  # bytes after the last tile that prefetches may name


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight matrix [n, k], or [experts, n, k] one after the other, as the kernels want it."""

    dtype: DType
    data: Array


@dataclass(eq=False)
class Lowering:
    """Turns launches into instructions. `packed` is shared by all programs of a backend."""

    pool: Pool
    exact: bool
    packed: dict[tuple[int, int, str], Packed]
    stream: bool = False  # weights pass the caches by
    shelf: Shelf = field(default_factory=Shelf)
    asm: Assembler = field(init=False)
    made: dict[tuple[str, int], Array] = field(default_factory=dict)  # by kernel, source's address
    _access: Access = field(default=Access((), ()))  # of the launch at hand

    def __post_init__(self) -> None:
        self.asm = Assembler(self.pool.jit, self.stream)

    def begin(self, launch: Launch) -> None:
        """The next instructions are those of `launch`: they access its sources and its result."""
        read = [s for s in launch.sources if not is_weight(s)]
        self._access = Access(tuple(map(_range, read)), (_range(launch.result),))

    def done(self, launch: Launch) -> None:
        """The launch has its instructions: blocks of what it overwrote are not valid any more."""
        self._forget(launch.result)

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
        key = (id(ref.memory), ref.offset, dtype.name)
        if key not in self.packed:
            count = math.prod(t.shape[:-1])
            raw = ref.memory.handle[ref.offset : ref.offset + t.nbytes].reshape(count, -1)
            raw = dequantize(raw, t.dtype).view(np.uint8) if dtype is not t.dtype else raw
            self.packed[key] = self._pack(raw, dtype, t.shape)
        return self.packed[key]

    def blocks(self, ref: Ref, m: int, k: int) -> Array:
        """The 8-bit activation blocks of m rows, computed once while the source stands."""
        step = activation_bytes(k)
        return self._made("quantise", ref, "x", "out", (m, step), m=m, k=k, xs=k * 4, os=step)

    def shown(self, mask: Ref, length: Ref | None) -> Array:
        """The list of the slots that each row of a mask shows, made once while the mask stands."""
        m, n = mask.tensor.shape
        step, end = list_bytes(n), self.at(length) if length is not None else 0
        sizes = {"m": m, "n": n, "ms": n * 4, "ls": step, "length": end}
        return self._made("shown_slots", mask, "mask", "list", (m, step), **sizes)

    def _made(
        self, kernel: str, ref: Ref, source: str, result: str, shape: tuple[int, int], **values: Any
    ) -> Array:
        """What a kernel makes of a source, bytes of `shape`, once while the source stands."""
        key = (kernel, address := self.at(ref))
        if key not in self.made:
            out = np.zeros(shape, np.uint8)
            places: dict[str, Any] = {source: address, result: out}
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

    def _forget(self, result: Ref) -> None:
        """What was made of sources that the result may have overwritten is no longer theirs."""
        start = int(result.memory.handle.ctypes.data) + result.offset
        stop = start + result.tensor.nbytes
        for key in [k for k in self.made if start <= k[1] < stop]:
            del self.made[key]


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
