"""What will be needed soon, got ready beside the host's own work, which is Python's at a start.

Two threads in compiled code, where they need no Python: one asks the system to read a file, in the
order in which weights are packed; one has it find memory for what is packed. Systems hand pages
out when they are written to first, which takes longer than packing (0.12 to 2.4 seconds a GB).
"""

import mmap
import threading

import numpy as np

from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.codegen.simd import I8, I32, Kernel, Val, kernel
from ggraph.backends.cpu.runtime.interpreter import atomic_load, call
from ggraph.backends.cpu.runtime.pages import PAGE, madvise
from ggraph.backends.cpu.runtime.program import Argument, one_call
from ggraph.tensor import Array

ASKED = 1 << 17  # bytes of a file that are asked for at once: Linux reads no further than its
# window of reading ahead, which has this size unless somebody has changed it


def _goes_on(k: Kernel, left: Val) -> Val:
    return (left > 0) & atomic_load(k, k.arg("stop")).eq(0)


@kernel("at nbytes stop")
def ahead_touch(k: Kernel) -> None:
    """Have every page of `nbytes`; bytes stay what they are, also where others write meanwhile.
    The last page first: those who fill them begin at the front, so that both meet."""
    at, nbytes = k.words("at nbytes")
    left = k.var(nbytes)
    with k.while_(lambda: _goes_on(k, left.value)):
        left.value = left.value - PAGE
        nothing = k.opaque(k.const(0, I8)).v  # a known 0 would become a mere read
        k.b.atomic_rmw("add", k.pointer(at + left.value), nothing, "monotonic")


@kernel("at nbytes stop function advice")
def ahead_ask(k: Kernel) -> None:
    """Tell the system that `nbytes` of a mapped file will be read, the first of them first."""
    at, nbytes, function = k.words("at nbytes function")
    left = k.var(nbytes)
    with k.while_(lambda: _goes_on(k, left.value)):
        size = k.minimum(left.value, k.const(ASKED, left.type))
        advice = k.cast("trunc", k.arg("advice"), I32)
        call(k, function, I32, at + (nbytes - left.value), size, advice)
        left.value = left.value - size


class Ahead:
    """The threads of one backend that get things ready."""

    def __init__(self, jit: Jit) -> None:
        self._jit, self._stop = jit, np.zeros(1, np.int64)
        self._crew: list[threading.Thread] = []

    def touch(self, memory: Array) -> None:
        """Have the pages of `memory`, uint8 of whole pages."""
        self._begin("ahead_touch", memory, at=memory, nbytes=memory.nbytes)

    def ask(self, mapped: Array) -> None:
        """Have a window on a mapped file read."""
        function = madvise("MADV_WILLNEED")
        if function and mapped.nbytes:
            start = mapped.ctypes.data // PAGE * PAGE
            nbytes = mapped.ctypes.data + mapped.nbytes - start
            self._begin(
                "ahead_ask", mapped, at=start, nbytes=nbytes, function=function,
                advice=mmap.MADV_WILLNEED,
            )  # fmt: skip

    def stop(self) -> None:
        """Leave the rest as it is."""
        self._stop[0] = 1
        for thread in self._crew:
            thread.join()
        self._crew.clear()

    def _begin(self, name: str, held: Array, **values: int | Array) -> None:
        if not self._crew:
            self._stop = np.zeros(1, np.int64)
        given: dict[str, Argument] = {**values, "stop": self._stop}
        self._crew.append(one_call(self._jit, name, given, held, title=f"ggraph-{name}"))
