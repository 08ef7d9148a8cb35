"""Memory whose every byte is known: whose it is, and whether anybody changed it. Backends on it.

For `check_declared.py`: each buffer ends at a page that nobody may touch, or begins behind one (not
on `sim`, whose bytes are NumPy's), and nothing is allocated while a plan runs.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cuda_host import HostDriver
from guard_pages import PAGE, guarded

from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.runtime.pages import Shelf
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.protocol import Memory
from ggraph.backends.sim import Machine, SimBackend, sim_spec
from ggraph.errors import BackendError
from ggraph.formats.lazy_array import Storage
from ggraph.plan import Buffer
from ggraph.tensor import Array, Tensor


@dataclass
class Ground:
    """All buffers of a backend, each on pages of its own between two that nobody may touch."""

    at_end: bool
    held: list[Array] = field(default_factory=list)
    running: bool = False  # then nothing is allocated
    outside: list[tuple[Array, int, int]] = field(default_factory=list)  # pages, and what is ours

    def take(self, nbytes: int, alignment: int) -> Array:
        """Zeroed bytes; BackendError while a plan runs."""
        if self.running:
            raise BackendError(f"{nbytes} bytes are asked for while a plan runs")
        if not nbytes:
            return np.zeros(0, np.uint8)
        found = guarded(nbytes, alignment, self.at_end)
        first = int(found.ctypes.data)
        start = first // PAGE * PAGE
        size = -(-nbytes // PAGE) * PAGE
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        self.held.append(found)
        self.outside.append((pages, first - start, first - start + nbytes))
        return found

    def disturb(self, rng: np.random.Generator) -> None:
        """New bytes around all buffers."""
        for pages, start, stop in self.outside:
            for part in (pages[:start], pages[stop:]):
                part[:] = rng.integers(0, 256, part.size, np.uint8)

    def around(self) -> list[bytes]:
        """What lies around the buffers."""
        return [p[:a].tobytes() + p[b:].tobytes() for p, a, b in self.outside]

    def clear(self) -> None:
        """Forget all buffers."""
        self.held.clear()
        self.outside.clear()


class GuardedShelf(Shelf):
    """Packed weights with a page behind each."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground

    def take(self, nbytes: int) -> Array:
        return self.ground.take(nbytes, 64)

    def trim(self) -> None:
        """Nothing: each has pages of its own."""


class GuardedCpu(CpuBackend):
    """A CPU on such memory, weights included."""

    ground: Ground

    def allocate(self, buffer: Buffer) -> Memory:
        return Memory(buffer, self.ground.take(buffer.nbytes, buffer.alignment))

    def load(self, buffer: Buffer, tensor: Tensor, raw: Storage) -> Memory:
        memory = self.allocate(buffer)
        memory.handle[:] = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        return memory


class GuardedDriver(HostDriver):
    """The stand-in for a GPU on such memory."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(at_end=ground.at_end)
        self.ground = ground

    def allocate(self, nbytes: int) -> int:
        found = self.ground.take(nbytes, 256)
        self._memory[int(found.ctypes.data)] = found
        return int(found.ctypes.data)

    def free(self, address: int) -> None:
        self.synchronise()
        self._memory.pop(address)


@dataclass
class World:
    """A backend with the memory under it, and what it can compute."""

    name: str
    backends: dict[str, Any]
    ground: Ground
    accepts: Callable[[Tensor], bool] = lambda t: True

    @property
    def device(self) -> Any:
        """The backend that is looked at."""
        return self.backends[self.name]


def worlds(wanted: str) -> Iterator[tuple[str, World]]:
    """The backends of one kind, with buffers up against the page behind them and before them."""
    if wanted == "sim":
        backend = SimBackend(sim_spec("sim0", host_visible=True), Machine())
        yield "sim", World("sim0", {"sim0": backend}, Ground(True))
        return
    for at_end in (True, False):
        ground, where = Ground(at_end), "end" if at_end else "start"
        if wanted == "cuda":
            driver = GuardedDriver(ground)
            cuda = CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())
            yield f"cuda {where}", World("cuda0", {"cuda0": cuda}, ground, accepts)
            continue
        for threads, exact in ((1, False), (2, True), (3, False)):
            plain = open_cpu("cpu", threads=threads, exact=exact)
            cpu = GuardedCpu(plain.spec, plain.pool, exact)
            cpu.ground, cpu._packer.shelf = ground, GuardedShelf(ground)
            yield (
                f"cpu {threads} {'exact' if exact else '8 bits'} {where}",
                World("cpu", {"cpu": cpu}, ground),
            )
