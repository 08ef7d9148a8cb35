"""The packed weights of a backend: room for them at once, their bytes when a program is finished.

A matrix is packed in pieces. What waits is done by all threads of the pool in one run, each taking
the next piece that nobody has, and giving the file's pages of a piece back once it is packed: all
of the file would come atop of all that is packed. Pieces that are no windows on a file are made one
for each thread, packed, and dropped.
"""

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import I32, I64, Kernel, kernel
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, FloatLayout, packed_bytes
from ggraph.backends.cpu.lowering.needs import kept_as, matrices
from ggraph.backends.cpu.runtime.ahead import Ahead
from ggraph.backends.cpu.runtime.interpreter import WORDS, atomic, call
from ggraph.backends.cpu.runtime.pages import (
    LINE,
    Shelf,
    by_file,
    drop_pages,
    file_map,
    hull,
    madvise,
    read_pages,
)
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Flat, encode
from ggraph.backends.protocol import Memory, Ref
from ggraph.dtype import DType
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import LazyArray, Read, rows_of, windows_of
from ggraph.formats.quants import dequantize
from ggraph.lazy import lazy
from ggraph.ops.evaluate import raw_view
from ggraph.plan import Buffer
from ggraph.tensor import Array

if TYPE_CHECKING:
    from concurrent import futures
else:
    futures = lazy("concurrent.futures")

SLICE = 1 << 21  # bytes of a weight that a thread packs at once; then the file's pages are dropped


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight matrix [n, k], or [experts, n, k] one after the other, as the kernels want it."""

    dtype: DType
    data: Array


class LazyMemory(Memory):
    """A weight whose rows are made when they are read: all of its bytes are there only once
    something beside the packer has asked for them."""

    source: LazyArray

    def __init__(self, buffer: Buffer, source: LazyArray) -> None:
        object.__setattr__(self, "buffer", buffer)
        object.__setattr__(self, "source", source)

    @cached_property
    def handle(self) -> Array:
        """All bytes, kept from now on."""
        return np.asarray(self.source).reshape(-1).view(np.uint8)

    @property
    def made(self) -> bool:
        """Whether all bytes are there."""
        return "handle" in self.__dict__

    def rows(self, ref: Ref) -> Read | None:
        """What reads the rows of a tensor in it; None where they are not rows of the source."""
        t, width = ref.tensor, self.source.shape[-1] * self.source.dtype.itemsize
        first, rest = divmod(ref.offset, width)
        if self.made or rest or not t.is_contiguous or t.dtype.row_bytes(t.shape[-1]) != width:
            return None
        return lambda i, j: self.source.read(first + i, first + j)


def has_bytes(memory: Memory) -> bool:
    """Whether all bytes of a memory are there."""
    return not isinstance(memory, LazyMemory) or memory.made


def windows(memory: Memory) -> Sequence[Array]:
    """The arrays that a weight's memory is made of."""
    return windows_of(memory.source if isinstance(memory, LazyMemory) else memory.handle)


Piece = tuple[int, int, Array]  # rows from which to which, and the room for what they become
# Which matrix of a memory, and as what: its place there, the type, shape and strides.
Form = tuple[int, str, tuple[int, ...], tuple[int, ...]]


def form_of(ref: Ref, dtype: DType) -> Form:
    """A weight as numbers of a type: what is made of one memory is told apart by that."""
    return ref.offset, dtype.name, ref.tensor.shape, ref.tensor.strides


def packing(dtype: DType) -> str:
    """The kernel that packs weights of a type."""
    return f"pack_{dtype.name}"


@kernel("taken code function at nbytes advice")
def pack_piece(k: Kernel) -> None:
    """Run the instruction at `code`, unless another thread has: `taken` says so. Then have the
    system know, by madvise at `function`, that the pages it has read are not needed."""
    with k.when(atomic(k, "xchg", k.arg("taken"), 1).eq(0)):
        code, alone = k.arg("code"), (k.const(0, I64), k.const(1, I64))
        call(k, k.load(code, I64), ir.VoidType(), code, *alone)
        at, nbytes, function, advice = k.words("at nbytes function advice")
        with k.when(nbytes > 0):
            call(k, function, I32, at, nbytes, k.cast("trunc", advice, I32))


@dataclass(eq=False)
class Packer:
    """Makes each weight's packed form once, and keeps it. `exact`: block types as float32."""

    pool: Pool
    exact: bool
    shelf: Shelf = field(default_factory=Shelf)
    made: dict[Memory, dict[Form, Packed]] = field(default_factory=dict)
    _waiting: list[tuple[DType, Array, Array]] = field(default_factory=list)  # type, rows, room
    _fresh: bool = False  # whether a weight came since all were packed

    def __post_init__(self) -> None:
        self._ahead = Ahead(self.pool.jit)

    def expect(self, weights: Iterable[RawTensor]) -> None:
        """Have memory for what these will be packed to found, and their files read, beside what
        the host does until the first program is finished."""
        files, total = list[Array](), 0
        for w in weights:
            if len(w.shape) < 2 or w.dtype not in LAYOUTS:
                continue
            count, n, k = matrices(w)
            total += -(-packed_bytes(kept_as(w.dtype, self.exact), n, k) * count // LINE) * LINE
            files += windows_of(w.storage)
        with suppress(OSError):  # more than the system has is asked for when it is packed
            if self.pool.threads > 1:  # else nobody is to compute beside the host
                self._ahead.touch(self.shelf.expect(total))
        for file in by_file(files):
            self._ahead.ask(hull(file))

    def found(self, ref: Ref) -> Packed | None:
        """The packed form of a weight, where one is made."""
        return self.made.get(ref.memory, {}).get(self._form(ref))

    def weight(self, ref: Ref) -> Packed:
        """The packed form of a weight: its bytes are there once `work` has been called."""
        found = self.found(ref)
        if found is None:
            found = self._begun(ref)
            self.made.setdefault(ref.memory, {})[self._form(ref)] = found
            self._fresh = True
        return found

    def _form(self, ref: Ref) -> Form:
        return form_of(ref, kept_as(ref.tensor.dtype, self.exact))

    def _begun(self, ref: Ref) -> Packed:
        t = ref.tensor
        dtype, (count, n, k) = kept_as(t.dtype, self.exact), matrices(t)
        size = packed_bytes(dtype, n, k)
        out = self.shelf.take(size * count)
        whole = FloatLayout.tile  # rows of the tallest tile
        step = max(SLICE // max(dtype.row_bytes(k), 1) // whole, 1) * whole
        pieces = [
            (e * n + i, e * n + min(i + step, n), out[e * size + packed_bytes(dtype, i, k) :])
            for e, i in product(range(count), range(0, n, step))
        ]
        read, is_window = self._rows(ref, (count * n, k), dtype)
        if is_window:
            self._waiting += [(dtype, read(i, j), room) for i, j, room in pieces]
        else:
            self._pack_made(dtype, read, pieces)
            for window in windows(ref.memory):
                drop_pages(window)
        return Packed(dtype, out)

    def _rows(self, ref: Ref, shape: tuple[int, int], dtype: DType) -> tuple[Read, bool]:
        """What gives a weight's rows as bytes of a type; whether those lie in its memory."""
        t, (n, k), here = ref.tensor, shape, False
        given = ref.memory.rows(ref) if isinstance(ref.memory, LazyMemory) else None
        if given is None:
            raw = raw_view(t, ref.memory.handle, ref.offset - t.offset)
            width = t.dtype.row_bytes(k) // raw.itemsize  # -1 would not do for no rows
            flat = np.ascontiguousarray(raw).reshape(n, width)
            given, here = rows_of(flat), np.may_share_memory(flat, ref.memory.handle)

        def read(i: int, j: int) -> Array:
            rows = np.ascontiguousarray(given(i, j)).view(np.uint8)
            return dequantize(rows, t.dtype).view(np.uint8) if dtype is not t.dtype else rows

        return read, here and dtype is t.dtype

    def _pack_made(self, dtype: DType, read: Read, pieces: Sequence[Piece]) -> None:
        """Pieces that are made: one for each thread, which are packed before there are more."""
        most = self.pool.threads
        with futures.ThreadPoolExecutor(most) as crew:
            for first in range(0, len(pieces), most):
                starts, stops, rooms = zip(*pieces[first : first + most], strict=True)
                made = list(crew.map(read, starts, stops))
                self._waiting += [(dtype, *both) for both in zip(made, rooms, strict=True)]
                if any(file_map(rows) is None for rows in made):
                    self.work()

    def work(self) -> None:
        """Pack what waits."""
        inner, outer = np.zeros((2, len(self._waiting), WORDS), np.int64)
        taken, advice = np.zeros(len(inner), np.int64), getattr(mmap, "MADV_DONTNEED", 0)
        for i, (dtype, rows, out) in enumerate(self._waiting):
            n, nbytes = rows.shape
            k, (at, read) = nbytes // dtype.block_bytes * dtype.block, read_pages(rows)
            self._write(inner[i], packing(dtype), raw=rows, out=out, n=n, k=k, row_bytes=nbytes)
            self._write(
                outer[i], "pack_piece", taken=taken[i:], code=inner[i], at=at, nbytes=read,
                function=madvise("MADV_DONTNEED"), advice=advice,
            )  # fmt: skip
        self.pool.run(Flat(outer, ("pack_piece",) * len(outer), ()))
        self._waiting.clear()

    def _write(self, words: Array, name: str, **values: int | Array) -> None:
        """An instruction, behind which no thread waits for others."""
        found = [self.pool.jit.address(name), 0, *encode(name, dict(values))]
        words[: len(found)] = found

    def finish(self) -> bool:
        """Pack what waits, also for a program that was given up; what was got ready beyond it is
        given back. Whether there was a weight since the last time."""
        if not self._fresh:
            return False
        if self._waiting:
            self.work()
        self._ahead.stop()
        self.shelf.trim()
        self._fresh = False
        return True

    def close(self) -> None:
        """Forget everything."""
        self._ahead.stop()
        self.made.clear()

    def free(self, memory: Memory) -> None:
        """Forget what was made of a weight."""
        self.made.pop(memory, None)
