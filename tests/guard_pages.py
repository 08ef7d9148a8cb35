"""Memory between pages that nobody may touch, for kernels on the host."""

import ctypes
import mmap

import numpy as np

from ggraph.tensor import Array

PAGE = mmap.PAGESIZE
CANARY = 0xA5


def guarded(nbytes: int, alignment: int, at_end: bool, fill: int = 0) -> Array:
    """Bytes of `fill` that end at a page nobody may touch, or begin behind one.

    What `alignment` leaves of their own pages is CANARY, which `is_untouched` looks at.
    """
    inner = -(-max(nbytes, 1) // PAGE) * PAGE
    held = mmap.mmap(-1, inner + 2 * PAGE)
    whole = np.frombuffer(held, np.uint8)
    for page in (0, inner + PAGE):
        address = ctypes.c_void_p(int(whole.ctypes.data) + page)
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(PAGE), 0) == 0
    slack = (inner - nbytes) // alignment * alignment if at_end else 0
    whole[PAGE : PAGE + slack] = CANARY
    whole[PAGE + slack + nbytes : PAGE + inner] = CANARY
    found = whole[PAGE + slack : PAGE + slack + nbytes]
    found[:] = fill
    return found


def is_untouched(found: Array) -> bool:
    """Whether nothing was written into the pages of a `guarded` array but the array itself."""
    address = int(found.ctypes.data)
    first, end = address // PAGE * PAGE, address + found.nbytes
    around = [(first, address - first), (end, -end % PAGE)]
    return all(
        (np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at)) == CANARY).all()
        for at, n in around
    )
