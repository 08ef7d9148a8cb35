"""Gives a mapped file's pages back once a weight was packed from them. Floor 6.

A packed weight is never read from its file again, so its pages need not stay in this process; they
remain in the system's cache, and a later read finds them there. Nothing happens for weights that
are not windows on a read-only map, nor where the system has no such call.
"""

import mmap

import numpy as np

from ggraph.tensor import Array

PAGE = mmap.PAGESIZE


def mapping_of(data: Array) -> mmap.mmap | None:
    """The memory map that an array is a window on, if it is one."""
    base: object = data
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def drop_pages(data: Array) -> int:
    """Forget the whole pages that `data` covers in a read-only map; how many bytes that were."""
    held = mapping_of(data)
    if held is None or data.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    origin = int(np.frombuffer(held, np.uint8, 1).ctypes.data)
    first = int(data.ctypes.data) - origin
    start, stop = -(-first // PAGE) * PAGE, (first + data.nbytes) // PAGE * PAGE
    if stop <= start:
        return 0
    held.madvise(mmap.MADV_DONTNEED, start, stop - start)
    return stop - start


def drop_map(data: Array) -> None:
    """Forget all pages of the read-only map that `data` is a window on: headers and neighbours that
    came along when something small was read."""
    held = mapping_of(data)
    if held is not None and not data.flags.writeable and hasattr(mmap, "MADV_DONTNEED"):
        held.madvise(mmap.MADV_DONTNEED)
