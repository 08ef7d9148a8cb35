"""NumPy's arrays on bytes of the plan: what a launch without a kernel takes while it is computed.

NumPy asks a handler for the bytes of its arrays (NEP 49, numpy.org/neps/nep-0049.html). Within
`arrays_in` ours answers: it gives out a `Room`, the lowest place first, and says no where that
ends, of which NumPy makes a MemoryError. Handlers go by context: other threads keep theirs. They
are machine code, since NumPy also calls them while an exception is on its way.

A room is a row of blocks; each begins with a word, its bytes and whether it is taken (the lowest
bit), and the last one is taken for good. Blocks are multiples of 64 bytes, header included.
What NumPy takes for itself is asked of no handler: its objects, the elements that a ufunc casts
(8,192 at a time), and what sorting needs of a row.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy._core import _multiarray_umath  # type: ignore[attr-defined]

from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.codegen.simd import I64, Kernel, Val, kernel

BLOCK = 64  # bytes; arrays begin where a block's header ends
BASE, END, TOP, LIVE, OPEN = range(0, 40, 8)  # bytes of a room's words
SET_HANDLER = 304  # place of PyDataMem_SetHandler in NumPy's table of functions
VAST = tuple(1 << n for n in range(38, 27, -1))  # bytes of addresses to try
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
NAME = b"mem_handler"


def _take(k: Kernel, room: Val, nbytes: Val) -> Val:
    """The lowest place for an array, 0 where there is none; free neighbours are joined."""
    need = (k.maximum(nbytes, 1) + (2 * BLOCK - 1)) & -BLOCK
    base, end = k.load(room + BASE, I64), k.load(room + END, I64)
    found, at = k.var(0), k.var(base)
    with k.while_(lambda: (at.value < end) & found.value.eq(0)):
        size = k.var(k.load(at.value, I64))
        with k.if_else((size.value & 1).ne(0)) as (taken, free):
            with taken:
                size.value = size.value - 1
            with free:
                with k.while_(lambda: (k.load(at.value + size.value, I64) & 1).eq(0)):
                    size.value = size.value + k.load(at.value + size.value, I64)
                k.store(at.value, size.value)
                with k.when(size.value >= need):
                    with k.when(size.value > need):
                        k.store(at.value + need, size.value - need)
                    k.store(at.value, need + 1)
                    k.store(room + LIVE, k.load(room + LIVE, I64) + 1)
                    top = at.value + need - base
                    k.store(room + TOP, k.maximum(k.load(room + TOP, I64), top))
                    found.value = at.value + BLOCK
        at.value = at.value + size.value
    return found.value


def _drop(k: Kernel, room: Val, place: Val) -> None:
    """Give a place back; after the room was closed its bytes are somebody else's."""
    k.store(room + LIVE, k.load(room + LIVE, I64) - 1)
    with k.when(k.load(room + OPEN, I64).ne(0)):
        k.store(place - BLOCK, k.load(place - BLOCK, I64) - 1)


@kernel("", returns=True)
def numpy_malloc(k: Kernel) -> Val:
    """(room, bytes) -> place."""
    return _take(k, k.instruction, k.thread)


@kernel("", returns=True)
def numpy_calloc(k: Kernel) -> Val:
    """(room, count, bytes each) -> place of zeros."""
    nbytes = k.thread * k.threads
    place = _take(k, k.instruction, nbytes)
    with k.when(place.ne(0)):
        for i in k.loop(0, (nbytes + 7) & -8, 8):
            k.store(place + i, k.const(0, I64))
    return place


@kernel("", returns=True)
def numpy_realloc(k: Kernel) -> Val:
    """(room, place, bytes) -> a place with what was there."""
    room, old, nbytes = k.instruction, k.thread, k.threads
    place = _take(k, room, nbytes)
    with k.when(place.ne(0) & old.ne(0)):
        held = k.load(old - BLOCK, I64) - 1 - BLOCK
        for i in k.loop(0, k.minimum(held, (nbytes + 7) & -8), 8):
            k.store(place + i, k.load(old + i, I64))
        _drop(k, room, old)
    return place


@kernel("", returns=True)
def numpy_free(k: Kernel) -> Val:
    """(room, place)."""
    with k.when(k.thread.ne(0)):
        _drop(k, k.instruction, k.thread)
    return k.const(0, I64)


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of NumPy's C interface."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        *((n, ctypes.c_void_p) for n in ("context", "malloc", "calloc", "realloc", "free")),
    )


class Room:
    """Bytes for arrays from an address on that is a multiple of 64; `memory` keeps them there."""

    def __init__(self, at: int, nbytes: int, memory: object) -> None:
        self.at, self.nbytes, self.memory = at, nbytes, memory
        self._renew()

    def _renew(self) -> None:
        self._words = (ctypes.c_int64 * 5)()
        names = ("malloc", "calloc", "realloc", "free")
        calls = [host_jit().address(f"numpy_{name}") for name in names]
        self._handler = _Handler(b"ggraph", 1, ctypes.addressof(self._words), *calls)
        self._capsule = _new_capsule(ctypes.addressof(self._handler), NAME, None)

    @property
    def top(self) -> int:
        """Bytes that sufficed so far since the room was opened."""
        return self._words[TOP // 8] + BLOCK if self._words[TOP // 8] else 0

    def open(self) -> object:
        """One free block, and the handler that knows it."""
        last = self.at + self.nbytes - BLOCK
        self._words[:] = [self.at, max(last, self.at), 0, 0, 1]
        if last > self.at:
            ctypes.c_int64.from_address(self.at).value = last - self.at
            ctypes.c_int64.from_address(last).value = 1
        return self._capsule

    def close(self) -> bool:
        """Whether all arrays are gone. One that is not keeps bytes that are no longer its own; it
        is told apart from those of the next time."""
        self._words[OPEN // 8] = 0
        if not self._words[LIVE // 8]:
            return True
        _OUTLIVED[:] = [kept for kept in _OUTLIVED if kept[0][LIVE // 8]]
        _OUTLIVED.append((self._words, (self._handler, self._capsule, self.memory, host_jit())))
        self._renew()
        return False


# Words, and what must stay, of rooms whose arrays outlived them: an error's frames hold some, a
# module that a meaning imported has constants. Those are freed when Python ends, behind all that
# modules hold, so that nothing may ever let go of this list.
_OUTLIVED: list[tuple["ctypes.Array[ctypes.c_int64]", object]] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_OUTLIVED))


@contextmanager
def arrays_in(room: Room) -> Iterator[None]:
    """New arrays of NumPy in this block lie in `room`."""
    before = _set_handler(room.open())
    try:
        yield
    finally:
        _set_handler(before)


def vast() -> Room:
    """A room that is larger than anything, to find out what is needed: addresses, of which those
    that are written take memory. MemoryError where the system gives none."""
    for nbytes in VAST:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except OSError:  # a system that promises no more than it has
            continue
        return Room(ctypes.addressof(ctypes.c_char.from_buffer(pages)), nbytes, pages)
    raise MemoryError(f"no {VAST[-1]} bytes of addresses")


def _function(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(ctypes.pythonapi, name)
    found.restype, found.argtypes = result, arguments
    return found


_address_in = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_new_capsule = _function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_functions = ctypes.cast(
    _address_in(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
)
_set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(_functions[SET_HANDLER])
