"""Pages of memory: huge ones for packed weights, a mapped file's which are given back.

Weights are streamed through once per step. In pages of 4 KB that takes a look at the page tables
every 4 KB, and costs 15 % of the speed; so they lie together in large pieces of memory, for which
the system is asked for pages of 2 MB.

A packed weight is never read from its file again, so its pages need not stay in this process; they
remain in the system's cache, and a later read finds them there. Nothing happens for weights that
are not windows on a read-only map, nor where the system has no such call.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

import numpy as np

from ggraph.tensor import Array

PAGE = mmap.PAGESIZE
HUGE = 1 << 21  # bytes of a huge page
PIECE = 1 << 26  # bytes that are asked for at once; untouched pages of them do not exist
LINE = 64  # bytes of a cache line: arrays begin with one, threads write into lines of their own
GUARD = 1 << 14  # bytes behind the last array of a piece that prefetches may name


class Shelf:
    """Zeroed arrays, one behind the other. A piece goes when the last array on it does."""

    def __init__(self) -> None:
        self._piece, self._at = np.zeros(0, np.uint8), 0  # `_at`: what is taken of it

    def expect(self, nbytes: int) -> Array:
        """Begin a piece that has room for `nbytes`; all of it, in whole pages."""
        self.trim()
        self._piece, self._at = _huge(nbytes + GUARD), 0
        return self._piece

    def take(self, nbytes: int) -> Array:
        """uint8 [nbytes]."""
        if self._at + nbytes + GUARD > self._piece.nbytes:
            self.trim()
            self._piece, self._at = _huge(max(nbytes + GUARD, PIECE)), 0
        found = self._piece[self._at : self._at + nbytes]
        self._at += -(-nbytes // LINE) * LINE
        return found

    def trim(self) -> None:
        """Give back what the last huge page holds beyond the last array: up to 2 MB a piece."""
        held = mapping_of(self._piece)
        if held is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = int(self._piece.ctypes.data) - _address(held)
            start = -(-(first + self._at) // PAGE) * PAGE
            held.madvise(mmap.MADV_DONTNEED, start)


def _address(held: mmap.mmap) -> int:
    return int(np.frombuffer(held, np.uint8, 1).ctypes.data)


def _huge(nbytes: int) -> Array:
    """Fresh memory in huge pages where the system has them: uint8 [at least nbytes]."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(nbytes, np.uint8)
    size = -(-nbytes // HUGE) * HUGE
    held = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            held.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(held, np.uint8)
    skipped = -int(whole.ctypes.data) % HUGE
    return whole[skipped : skipped + size]


def file_map(data: Array) -> mmap.mmap | None:
    """The map of a file that an array is a window on, if it is one that nobody can write to: what
    is dropped of any other map may be gone for good."""
    held = mapping_of(data)
    written = held is not None and np.frombuffer(held, np.uint8, 1).flags.writeable
    return None if written else held


def mapping_of(data: Array) -> mmap.mmap | None:
    """The memory map that an array is a window on, if it is one."""
    base: object = data
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def read_pages(data: Array) -> tuple[int, int]:
    """Address and bytes of the whole pages that are not needed once `data`, a window on a read-only
    map, has been read; no bytes where it is none, or the system cannot be told. Up to a huge page
    before it is among them: with what is read the system maps its neighbours, given back before."""
    held, first = file_map(data), int(data.ctypes.data)
    stop = (first + data.nbytes) // PAGE * PAGE
    if held is None or not madvise("MADV_DONTNEED"):
        return stop, 0
    start = max(-(-first // PAGE) * PAGE - HUGE, _address(held))
    return start, max(stop - start, 0)


def by_file(windows: Iterable[Array]) -> list[list[Array]]:
    """Windows on one file together, and those that are on none."""
    found: dict[int, list[Array]] = {}
    for window in windows:
        found.setdefault(id(file_map(window)), []).append(window)
    return list(found.values())


def hull(windows: Sequence[Array]) -> Array:
    """The least window on a file's map that holds these, uint8; none where they lie elsewhere."""
    held = file_map(windows[0])
    if held is None:
        return np.zeros(0, np.uint8)
    base, places = _address(held), [(int(w.ctypes.data), w.nbytes) for w in windows]
    first = min(at for at, _ in places) - base
    stop = max(at + nbytes for at, nbytes in places) - base
    return np.frombuffer(held, np.uint8, stop - first, first)


@cache
def madvise(advice: str) -> int:
    """Address of the system's call by which it is told what a program means to do with pages; 0
    where there is none that knows the advice."""
    if sys.platform == "win32" or not hasattr(mmap, advice):
        return 0
    return ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0


def drop_pages(data: Array) -> None:
    """Give back the pages that are not needed once `data` has been read: see `read_pages`."""
    (at, nbytes), held = read_pages(data), file_map(data)
    if held is not None and nbytes:
        held.madvise(mmap.MADV_DONTNEED, at - _address(held), nbytes)


def drop_map(data: Array) -> None:
    """Forget all pages of the read-only map that `data` is a window on: headers and neighbours that
    came along when something small was read."""
    held = file_map(data)
    if held is not None and hasattr(mmap, "MADV_DONTNEED"):
        held.madvise(mmap.MADV_DONTNEED)
