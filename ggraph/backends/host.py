"""Host memory as NumPy byte arrays, for staging values that no device asks to own."""

import mmap
from contextlib import suppress
from typing import cast

import numpy as np

from ggraph.backends.protocol import Backend, Backends, Memory, Store
from ggraph.device import HOST
from ggraph.errors import BackendError
from ggraph.plan import Buffer
from ggraph.tensor import Array

PAGE = 4096  # bytes that a driver locks at a time


def _pages(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows, whose anonymous maps are private
        return mmap.mmap(-1, nbytes)
    held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without large ones
            held.madvise(mmap.MADV_NOHUGEPAGE)
    return held


def aligned_bytes(nbytes: int, alignment: int) -> Array:
    """A zeroed uint8 array whose first byte is a multiple of `alignment`, in small
    pages. Of pages of 2 MB, which NumPy asks for from 4 MB on, a cache's first rows would take one
    for each layer's keys and values: 30 to 60 MB of a model of 800, and no faster to read."""
    try:
        raw = np.frombuffer(_pages(nbytes + alignment), np.uint8)
    except (MemoryError, OSError):
        raise BackendError(f"the host cannot give {nbytes} bytes") from None
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class HostMemory(Store):
    """The host's own memory, all of it within its reach."""

    def allocate(self, buffer: Buffer) -> Memory:
        """Zeroed memory of `buffer.nbytes`, in pages of its own: a GPU's driver locks whole pages,
        and refuses one that is locked already."""
        whole = -(-buffer.nbytes // PAGE) * PAGE
        return Memory(buffer, aligned_bytes(whole, max(buffer.alignment, PAGE))[: buffer.nbytes])

    def free(self, memory: Memory) -> None:
        """Nothing to do: the array goes with its last user."""

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        """Put `data`'s bytes at `offset`."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        memory.handle[offset : offset + flat.size] = flat

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """A copy of `nbytes` bytes from `offset`."""
        copied: Array = memory.handle[offset : offset + nbytes].copy()
        return copied

    def window(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """The bytes themselves, uint8, for as long as the memory is not freed."""
        there: Array = memory.handle[offset : offset + nbytes]
        return there


def parted(backends: Backends) -> tuple[dict[str, Backend], Store]:
    """The devices, and what stands for the host's memory: the store under HOST, or NumPy's."""
    devices = {name: b for name, b in backends.items() if name != HOST}
    return cast("dict[str, Backend]", devices), backends.get(HOST) or HostMemory()
