"""How one thread wakes the event loop of another, and goes on itself."""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable


class Bell:
    """Rung from any thread, has `call` run in the loop that it was made in.

    Python's own way to wake a loop gives the interpreter up for the length of a system call. The
    loop, now awake, takes it, and gives it back when it has done its work: the caller waits for
    what should be done while the caller is busy elsewhere. So the call is made as one that keeps
    the interpreter, where the system's pipes can wake a loop.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._loop, self._call = asyncio.get_running_loop(), call
        self._ends: tuple[int, int] | None = None
        if sys.platform != "win32":
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
            self._write = ctypes.PyDLL(None).write
            self._loop.add_reader(self._ends[0], self._heard)

    def ring(self) -> None:
        """Have the call run soon; rung twice before, it runs once. RuntimeError where the loop is
        closed and would have to be told so."""
        if self._ends is None:
            self._loop.call_soon_threadsafe(self._call)
        else:
            self._write(self._ends[1], b"!", 1)  # a pipe that is full has woken the loop already

    def close(self) -> None:
        """Call once more, and no more after that; in the loop."""
        self._call()
        if self._ends is not None:
            self._loop.remove_reader(self._ends[0])
            for end in self._ends:
                os.close(end)
            self._ends = None

    def _heard(self) -> None:
        assert self._ends is not None, "a bell that was closed is heard"
        os.read(self._ends[0], 1 << 16)
        self._call()
