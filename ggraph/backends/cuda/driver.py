"""The boundary to CUDA: everything that the backend asks of a driver, and nothing else.

`cupy_driver.py` answers with CuPy on a GPU. The tests answer with kernels compiled for the host and
streams that are queues, so that all above this line runs without a GPU. Addresses, streams, events
and graphs are plain integers or objects that the backend only passes on. Every method raises
BackendError with one clear line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ggraph.backends.cuda.kernels import Unit

Grid = tuple[int, int, int]
ALIGNED = 256  # bytes of which device memory begins at a multiple
WIDEST = 16  # bytes of a kernel's largest load


@dataclass(frozen=True)
class Product:
    """y [m, n] (f32, rows `row` elements apart) = x [m, k] . w [n, k] (+ rest), by the library.

    w, x, y and rest are addresses; w and x are of `kind` "f32", "f16" or "bf16", sums are float32.
    rest lies as y does, is y itself or shares no byte with it; 0: nothing is added. The library may
    write anything into the `space_bytes` at `space`, a multiple of ALIGNED.
    """

    w: int
    x: int
    y: int
    n: int
    m: int
    k: int
    row: int
    kind: str
    rest: int
    space: int
    space_bytes: int


class Driver(Protocol):
    """One GPU. Calls that name a stream return at once; `copy` knows host and device addresses."""

    name: str  # as the vendor calls it
    arch: str  # "sm_90"
    processors: int  # multiprocessors: how many blocks run at once hangs on them, and no bits do
    reaches_host: bool  # whether kernels find memory that `pin` has locked at the host's address

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Address of device memory, a multiple of ALIGNED. Its last load of WIDEST bytes may be
        read, not written, where it has fewer of them. BackendError: out of memory."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory in place so that copies need no staging; False where that fails."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        ...

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
        ...

    def event(self) -> int:
        """A new event, without timing."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Mark the present end of a stream."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait for the latest record of an event."""
        ...

    def synchronise(self, stream: int | None = None, event: int | None = None) -> None:
        """Block the host until a stream, an event or the whole device is complete."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two of host, device and peer memory."""
        ...

    def function(self, unit: Unit, kernel: str) -> Any:
        """A kernel, compiled and loaded on first use."""
        ...

    def launch(
        self, function: Any, grid: Grid, block: int, args: Sequence[bytes], stream: int
    ) -> None:
        """Enqueue a kernel; `block` threads per block, a multiple of 32."""
        ...

    def product(self, p: Product, rank: int = 0) -> Callable[[int], None]:
        """What enqueues a product on a stream; nothing is allocated for it. How is decided here,
        alike for products of one shape: by the algorithm that the library expects to be the
        fastest, or a further one by its `rank`. BackendError where the library knows of none."""
        ...

    def begin_capture(self, stream: int) -> None:
        """From here on, what is enqueued on the stream and on those that join it is recorded."""
        ...

    def end_capture(self, stream: int) -> Any:
        """The recorded graph, ready to be launched."""
        ...

    def launch_graph(self, graph: Any, stream: int) -> None:
        """Enqueue everything that was recorded."""
        ...

    def edges(self, graph: Any) -> Sequence[tuple[int, int]]:
        """Direct orderings between the graph's nodes; kernels, copies and the rest are numbered
        in the order in which they were enqueued."""
        ...

    def close(self) -> None:
        """Destroy streams, events and graphs; never raises, even after the device is lost."""
        ...
