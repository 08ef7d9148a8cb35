"""A CUDA driver without a GPU: kernels as host C++, streams as queues with a virtual clock.

`HostDriver` stands on the other side of `ggraph.backends.cuda.driver`, so everything above that
line runs unchanged: lowering, argument packing, streams, events and capture. Kernels are the
package's own sources, compiled by g++ with `shim.h`. Device memory is host memory between guard
pages. What a GPU would refuse or leave undefined raises `Fault`.
"""

import ctypes
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import unpack
from typing import Any

import numpy as np
from guard_pages import guarded, is_untouched

from cuda_host import products
from cuda_host.compiler import COMPILER, compiled, entry_of, library, need_compiler
from cuda_host.products import Fault
from ggraph.backends.cuda.driver import Product
from ggraph.backends.cuda.kernels import Unit
from ggraph.errors import BackendError

__all__ = ["COMPILER", "FIRST_ALONE", "SIDE_BY_SIDE", "Fault", "Graph", "HostDriver", "Work",
           "compiled", "entry_of", "library", "need_compiler"]  # fmt: skip

PAGE = 4096
SIDE_BY_SIDE = 0xFFFFFFFF  # an order, of shim.h: all blocks of a launch at the same time
FIRST_ALONE = 0xFFFFFFFE  # another: the first block, and no other
POISON = 0xFF  # NaN in every float type, -1 in integers


@dataclass(eq=False)
class Work:
    """Something enqueued: runs once its stream and what it waits for are done."""

    seq: int
    what: str
    seconds: float
    run: Callable[[], None] | None
    enqueued: float = 0.0
    after: tuple["Work", ...] = ()
    done_at: float | None = None


@dataclass(eq=False)
class Graph:
    """A captured graph: nodes in enqueue order, and for each those that come directly before."""

    nodes: list[Work] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(eq=False)
class _Capture:
    graph: Graph
    last: dict[int, tuple[int, ...]]  # stream -> nodes that its next one comes after
    marks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # event -> nodes


class HostDriver:
    """`ggraph.backends.cuda.driver.Driver` without a device. `calls` lists what was asked for.

    `total` bounds the memory. Work runs when the host waits, in the order of virtual time: a
    kernel takes a microsecond, `delay` as long as it says. Buffers begin at multiples of
    `alignment` and lie against a guard page at their end, or at their beginning. A kernel's threads
    and blocks take turns in the `order` that shim.h numbers; None: another one at each launch, in
    which blocks follow one another. SIDE_BY_SIDE is what a GPU does with a launch that it has room
    for.
    """

    name = "host stand-in"
    arch = "host"
    processors = 1  # so that a block has several tiles
    reaches_host = True

    def __init__(
        self,
        total: int = 1 << 30,
        alignment: int = 256,
        at_end: bool = True,
        order: int | None = None,
    ) -> None:
        self.total, self.used = total, 0
        self.alignment, self.at_end, self.order = alignment, at_end, order
        self._launched = 0
        self.calls: list[str] = []
        self.brought = self.sent = 0  # bytes that came to the host, and went to the device
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.now = 0.0
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._queues: dict[int, deque[Work]] = {}
        self._recorded: dict[int, Work] = {}
        self._inside: set[int] = set()  # events last recorded in a capture
        self._free_at: dict[int, float] = {}
        self._capture: _Capture | None = None
        self._count = 0
        self.lost = False
        self.refuses_capture = False

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        return self.total - self.used, self.total

    def allocate(self, nbytes: int) -> int:
        """Poisoned memory of the host."""
        self._check()
        if nbytes > self.total - self.used:
            raise BackendError(f"out of memory: {nbytes} bytes")
        raw = guarded(nbytes, self.alignment, self.at_end, POISON)
        address = int(raw.ctypes.data)
        self._memory[address] = raw
        self.used += nbytes
        return address

    def free(self, address: int) -> None:
        """Forget, so that its pages are gone; an unknown address is a fault of the backend."""
        if not self.lost:
            self.synchronise()
        raw = self._memory.pop(address)
        self.used -= raw.size
        if not is_untouched(raw):
            raise Fault(f"bytes around a buffer of {raw.size} were overwritten")

    def pin(self, address: int, nbytes: int) -> bool:
        """Note the range; a page is locked once, as CUDA has it."""
        first, last = address // PAGE, (address + max(nbytes, 1) - 1) // PAGE
        for a, n in self.pinned.items():
            if first <= (a + n - 1) // PAGE and a // PAGE <= last:
                return False
        self.pinned[address] = max(nbytes, 1)
        return True

    def unpin(self, address: int) -> None:
        """Forget it; one that was not pinned is a fault of the backend."""
        del self.pinned[address]

    def stream(self) -> int:
        """A queue."""
        self._count += 1
        self._queues[self._count] = deque()
        return self._count

    def event(self) -> int:
        """A number."""
        self._count += 1
        return self._count

    def record(self, event: int, stream: int) -> None:
        """A mark, in the capture or in the queue."""
        self._check()
        if self._capture is not None and stream in self._capture.last:
            self._capture.marks[event] = self._capture.last[stream]
            self._recorded.pop(event, None)
            self._inside.add(event)
            return
        self._inside.discard(event)
        self._recorded[event] = self._enqueue(stream, "record", 0.0, None)

    def wait(self, stream: int, event: int) -> None:
        """A dependency on the latest record; in a capture the stream joins it."""
        capture = self._capture
        if capture is not None and event in capture.marks:
            joined = (*capture.last.get(stream, ()), *capture.marks[event])
            capture.last[stream] = tuple(sorted(set(joined)))
            return
        if capture is not None and stream in capture.last:
            raise BackendError("a captured stream waits for an event from outside the capture")
        self._outside(event)
        if event in self._recorded:
            self._enqueue(stream, "wait", 0.0, None, (self._recorded[event],))

    def synchronise(self, stream: int | None = None, event: int | None = None) -> None:
        """Run what must be complete, earliest first. Not allowed while capturing."""
        self._check()
        if self._capture is not None:
            raise BackendError("the host waits during a capture")
        targets = [q[-1] for s, q in self._queues.items() if q and stream in (None, s)]
        if event is not None:
            self._outside(event)
            targets = [self._recorded[event]] if event in self._recorded else []
        while any(t.done_at is None for t in targets):
            self._run_next()
        self.now = max([self.now, *(t.done_at or 0.0 for t in targets)])

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Bytes, when the stream comes to it. A graph takes no memory that is not locked."""
        if self._capture is not None and not (self._is_fixed(target) and self._is_fixed(source)):
            raise BackendError("a captured copy of pageable memory")

        def run() -> None:
            self._count_bytes(target, source, nbytes)
            ctypes.memmove(target, source, nbytes)

        self._add(stream, f"copy {nbytes}", 1e-6, run)

    def _count_bytes(self, target: int, source: int, nbytes: int) -> None:
        here, there = self._is_ours(target), self._is_ours(source)
        self.brought += nbytes * (there and not here)
        self.sent += nbytes * (here and not there)

    def _copied_by(self, args: Sequence[bytes]) -> tuple[int, int, int]:
        """What a kernel copies: target, source, bytes. Kernels reach no host memory that is not
        locked."""
        source, target, count, size = (unpack(f, a)[0] for f, a in zip("PPqi", args, strict=True))
        for first in (source, target):
            if not (self._is_fixed(first) and self._is_fixed(first + count * size - 1)):
                raise Fault("a kernel copies pageable memory")
        return target, source, count * size

    def function(self, unit: Unit, kernel: str) -> Any:
        """The host form of a kernel."""
        return (kernel, entry_of(library(unit), kernel))

    def _next_order(self) -> int:
        self._launched += 1
        return self._launched - 1 if self.order is None else self.order

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[bytes],
        stream: int,
    ) -> None:
        """Blocks one after another, when the stream comes to it."""
        kernel, entry = function
        assert 0 < block <= 1024 and block % 32 == 0, (kernel, block)
        assert min(grid) > 0 and grid[1] <= 65535 and grid[2] <= 65535, (kernel, grid)
        held = [ctypes.create_string_buffer(a, len(a)) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        seconds = unpack("q", args[0])[0] * 1e-9 if kernel == "delay" else 1e-6
        moved = self._copied_by(args) if kernel == "copy_small" else None

        def run() -> None:
            if kernel != "delay":
                fault = entry((ctypes.c_uint * 3)(*grid), block, pointers, self._next_order())
                if fault is not None:
                    raise Fault(f"{kernel}: {fault.decode()}")
                if moved:
                    self._count_bytes(*moved)
            assert held

        self._add(stream, kernel, seconds, run)

    def product(self, p: Product, rank: int = 0) -> Callable[[int], None]:
        """NumPy's product, in the place of cuBLASLt, by two algorithms; the whole work space is
        overwritten. What the library refuses or leaves undefined is refused here."""
        if self._capture is not None:
            raise BackendError("cuBLASLt is asked for an algorithm during a capture")
        if rank >= products.ALGORITHMS:
            raise BackendError(f"{products.ALGORITHMS} algorithms, none of rank {rank}")
        ranges = products.checked(p)

        def run() -> None:
            for what, (first, end) in ranges.items():
                if not any(a <= first and end <= a + r.size for a, r in self._memory.items()):
                    raise Fault(f"a product's {what} leaves its buffer: {p}")
            products.compute(p, rank)

        return lambda stream: self._add(stream, f"product {p.kind}", 1e-6, run)

    def begin_capture(self, stream: int) -> None:
        """Record from here on."""
        assert self._capture is None, "a capture within a capture"
        self._capture = _Capture(Graph(), {stream: ()})

    def end_capture(self, stream: int) -> Graph:
        """The graph; a stream that was not joined back is refused, as CUDA does."""
        assert self._capture is not None
        capture, self._capture = self._capture, None
        if self.refuses_capture:
            raise BackendError("capture refused")
        reached = set(capture.last[stream])
        work = list(reached)
        while work:
            for j in capture.graph.before[work.pop()]:
                if j not in reached:
                    reached.add(j)
                    work.append(j)
        if len(reached) != len(capture.graph.nodes):
            raise BackendError("a captured stream was not joined")
        return capture.graph

    def launch_graph(self, graph: Graph, stream: int) -> None:
        """The nodes in any order that the edges allow: here, the last that is free goes first."""

        def run() -> None:
            missing = [set(b) for b in graph.before]
            ready = [-i for i, b in enumerate(missing) if not b]
            heapq.heapify(ready)
            left = len(graph.nodes)
            while ready:
                i = -heapq.heappop(ready)
                work = graph.nodes[i].run
                assert work is not None
                work()
                left -= 1
                for j, b in enumerate(missing):
                    if i in b:
                        b.remove(i)
                        if not b:
                            heapq.heappush(ready, -j)
            assert not left, "a graph with a cycle"

        self._add(stream, f"graph of {len(graph.nodes)}", 1e-6 * len(graph.nodes), run)

    def edges(self, graph: Graph) -> list[tuple[int, int]]:
        """The direct orderings."""
        return [(i, j) for j, before in enumerate(graph.before) for i in before]

    def close(self) -> None:
        """Forget everything."""
        self._queues.clear()

    def _is_ours(self, address: int) -> bool:
        """Whether this is a place in the device's memory."""
        return any(a <= address < a + raw.size for a, raw in self._memory.items())

    def _is_fixed(self, address: int) -> bool:
        """Whether an address is the device's, or locked memory of the host."""
        own = any(a <= address < a + raw.size for a, raw in self._memory.items())
        return own or any(a <= address < a + n for a, n in self.pinned.items())

    def _outside(self, event: int) -> None:
        if event in self._inside:
            raise BackendError("an event that was last recorded in a capture")

    def _check(self) -> None:
        if self.lost:
            raise BackendError("the device is lost")

    def _add(self, stream: int, what: str, seconds: float, run: Callable[[], None]) -> None:
        self._check()
        self.calls.append(what)
        capture = self._capture
        if capture is None or stream not in capture.last:
            self._enqueue(stream, what, seconds, run)
            return
        number = len(capture.graph.nodes)
        capture.graph.nodes.append(Work(number, what, seconds, run))
        capture.graph.before.append(capture.last[stream])
        capture.last[stream] = (number,)

    def _enqueue(
        self,
        stream: int,
        what: str,
        seconds: float,
        run: Callable[[], None] | None,
        after: tuple[Work, ...] = (),
    ) -> Work:
        self._count += 1
        work = Work(self._count, what, seconds, run, self.now, after)
        self._queues[stream].append(work)
        return work

    def _run_next(self) -> None:
        """The work that can begin first; of equals, the one enqueued first."""
        best: tuple[float, int, int] | None = None
        for stream, queue in self._queues.items():
            if queue and all(w.done_at is not None for w in queue[0].after):
                ends = [w.done_at or 0.0 for w in queue[0].after]
                begin = max([self._free_at.get(stream, 0.0), queue[0].enqueued, *ends])
                best = min(best or (begin, queue[0].seq, stream), (begin, queue[0].seq, stream))
        assert best is not None, "all streams wait for one another"
        begin, _, stream = best
        work = self._queues[stream].popleft()
        if work.run is not None:
            work.run()
        work.done_at = self._free_at[stream] = begin + work.seconds
