"""The packed weights of a backend: room for them at once, their bytes when a program is finished.

A matrix is packed in pieces. What waits is done by all threads of the pool in one run, each taking
the next piece that nobody has, and giving the file's pages of a piece back once it is packed: all
of the file would come atop of all that is packed.
"""

import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import I32, I64, Kernel, kernel
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, FloatLayout, packed_bytes
from ggraph.backends.cpu.lowering.needs import kept_as, matrices
from ggraph.backends.cpu.runtime.ahead import Ahead
from ggraph.backends.cpu.runtime.interpreter import WORDS, atomic, call
from ggraph.backends.cpu.runtime.pages import LINE, Shelf, file_map, hull, madvise, read_pages
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Flat, encode
from ggraph.backends.protocol import Memory, Ref
from ggraph.dtype import DType
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.quants import dequantize
from ggraph.ops.evaluate import raw_view
from ggraph.tensor import Array

SLICE = 1 << 21  # bytes of a weight that a thread packs at once; then the file's pages are dropped


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight matrix [n, k], or [experts, n, k] one after the other, as the kernels want it."""

    dtype: DType
    data: Array


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
        files: dict[int, list[Array]] = {}
        total = 0
        for w in weights:
            if len(w.shape) < 2 or w.dtype not in LAYOUTS:
                continue
            count, n, k = matrices(w)
            total += -(-packed_bytes(kept_as(w.dtype, self.exact), n, k) * count // LINE) * LINE
            files.setdefault(id(file_map(w.data)), []).append(w.data)
        with suppress(OSError):  # more than the system has is asked for when it is packed
            if self.pool.threads > 1:  # else nobody is to compute beside the host
                self._ahead.touch(self.shelf.expect(total))
        for windows in files.values():
            self._ahead.ask(hull(windows))

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
        raw = raw_view(t, ref.memory.handle, ref.offset - t.offset)
        width = t.dtype.row_bytes(k) // raw.itemsize  # -1 would not do for no rows
        raw = np.ascontiguousarray(raw).reshape(count * n, width).view(np.uint8)
        raw = dequantize(raw, t.dtype).view(np.uint8) if dtype is not t.dtype else raw
        size = packed_bytes(dtype, n, k)
        out = self.shelf.take(size * count)
        whole = FloatLayout.tile  # rows of the tallest tile
        step = max(SLICE // max(raw.shape[1], 1) // whole, 1) * whole
        for e, first in product(range(count), range(0, n, step)):
            rows = raw[e * n + first : e * n + min(first + step, n)]
            self._waiting.append((dtype, rows, out[e * size + packed_bytes(dtype, first, k) :]))
        if not np.may_share_memory(raw, ref.memory.handle):
            self.work()  # a copy: there are never two
        return Packed(dtype, out)

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
