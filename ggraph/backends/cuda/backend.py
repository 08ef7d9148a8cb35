"""One GPU as a backend: memory, streams, events, programs, and captured graphs.

Everything goes through a `Driver`. Programs are lists of steps made once; a plan whose commands all
run here is captured into a CUDA graph on its first run and replayed from then on.
"""

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph.backends.cuda.driver import Driver
from ggraph.backends.cuda.kernels import Unit, packed
from ggraph.backends.cuda.lower import accepts, emit, needs
from ggraph.backends.cuda.lowering import Lowering, Step
from ggraph.backends.cuda.matmul import rounds
from ggraph.backends.protocol import Backend, Launch, Memory
from ggraph.device import DeviceSpec, Need
from ggraph.errors import BackendError
from ggraph.formats.lazy_array import Storage
from ggraph.plan import Buffer
from ggraph.tensor import Array, Tensor

SMALL_COPY = 1 << 16  # bytes that a kernel copies; a guess that no GPU has been asked about
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class CudaSpec(DeviceSpec):
    """A GPU's capabilities; what it can compute, and what that needs beside operands, is asked of
    the lowering's own rules."""

    needs: Callable[[Tensor], tuple[Need, ...]] = field(default=needs, repr=False, compare=False)
    rounds: Callable[[Tensor], str] = field(default=rounds, repr=False, compare=False)

    def supports(self, t: Tensor) -> bool:
        """Whether there is a kernel for `t` (leaves and views: always)."""
        return t.is_leaf or t.is_view or accepts(t)


@dataclass(frozen=True, eq=False)
class Pointer:
    """Device memory: what a `Memory` of this backend holds."""

    address: int


@dataclass(frozen=True, eq=False)
class CudaProgram:
    """The steps of consecutive launches of one stream."""

    launches: Sequence[Launch]
    steps: tuple[Step, ...]


@dataclass(eq=False)
class Events:
    """The events that the backends of one process share, by their names. Threads may use them at
    once: an executor's are its own, since its number stands in their names."""

    known: dict[str, tuple[int, Driver]] = field(default_factory=dict)  # as last recorded
    made: dict[tuple[str, Driver], int] = field(default_factory=dict)

    def handle(self, name: str, driver: Driver) -> int:
        """The event of this name on a device, which is about to be recorded."""
        key = (name, driver)
        if key not in self.made:
            self.made[key] = driver.event()
        self.known[name] = (self.made[key], driver)
        return self.made[key]

    def forget(self, driver: Driver) -> None:
        """Drop the events of a device that is closed; nothing may wait for them any more."""
        for name, (_, owner) in list(self.known.items()):  # in place: others may add theirs
            if owner is driver:
                del self.known[name]
        for key in list(self.made):
            if key[1] is driver:
                del self.made[key]


_SHARED = Events()


@dataclass(eq=False)
class CudaBackend(Backend):
    """One GPU behind a driver. `graphs` captures whole plans."""

    spec: DeviceSpec
    driver: Driver
    graphs: bool = True
    events: Events = field(default_factory=lambda: _SHARED)
    _held: dict[int, Memory] = field(default_factory=dict)  # by address
    _streams: dict[int, int] = field(default_factory=dict)
    _constants: dict[bytes, int] = field(default_factory=dict)
    _pinned: dict[int, tuple[Memory, bool]] = field(default_factory=dict)  # host address -> by us
    _marks: set[str] | None = None  # events recorded in the capture that is going on
    _inside: set[str] = field(default_factory=set)  # events that only graphs record
    _captured_any: bool = False
    _meanwhile: dict[int, Callable[[], object]] = field(default_factory=dict)  # by thread
    _closed: bool = False

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, buffer: Buffer) -> Memory:
        """Device memory. BackendError, with what is held by buffer, when it does not fit."""
        memory = Memory(buffer, Pointer(self._allocate(buffer.nbytes, f"buffer {buffer.name!r}")))
        self._held[memory.handle.address] = memory
        return memory

    def _allocate(self, nbytes: int, what: str) -> int:
        self._open()
        free, total = self.driver.memory()
        if nbytes > free:
            raise BackendError(self._too_large(nbytes, what, free, total))
        return self.driver.allocate(max(nbytes, 1))

    def _too_large(self, nbytes: int, what: str, free: int, total: int) -> str:
        buffers = [m.buffer for m in self._held.values()]
        largest = sorted(buffers, key=lambda b: -b.nbytes)[:8]
        held = ", ".join(f"{b.name} {b.nbytes}" for b in largest) or "nothing"
        layers = {m[1] for b in buffers if (m := _LAYER.match(b.name))}
        kept = {self.spec.name: max(len(layers) - 1, 0)}
        fewer = f"Options(layers={kept})" if layers else "a CPU split"
        return (
            f"{self.spec.name}: {what} of {nbytes} bytes does not fit: {free} of {total} bytes are "
            f"free; held here, largest first: {held}. What would fit: {fewer}, or a shorter context"
        )

    def free(self, memory: Memory) -> None:
        """Give memory back."""
        if self._held.pop(memory.handle.address, None) is None:
            raise BackendError(f"{self.spec.name}: {memory.buffer.name!r} is freed twice")
        self.driver.free(memory.handle.address)

    def load(self, buffer: Buffer, tensor: Tensor, raw: Storage) -> Memory:
        """A weight's bytes as the checkpoint has them, in device memory."""
        flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        if flat.nbytes != tensor.nbytes:
            raise BackendError(f"%{tensor.name}: {flat.nbytes} bytes, expected {tensor.nbytes}")
        memory = self.allocate(buffer)
        self.write(memory, 0, flat)
        return memory

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        """Host access: complete on return."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if flat.nbytes:
            target = memory.handle.address + offset
            self._copy_now(target, int(flat.ctypes.data), flat.nbytes)

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """Host access: a copy of the bytes, complete on return."""
        found = np.empty(nbytes, np.uint8)
        if nbytes:
            self._copy_now(int(found.ctypes.data), memory.handle.address + offset, nbytes)
        return found

    def _copy_now(self, target: int, source: int, nbytes: int) -> None:
        """A copy of the host's own, on a stream that nothing else uses."""
        stream = self.stream(-1)
        self.driver.copy(target, source, nbytes, stream)
        self.driver.synchronise(stream=stream)

    # --- streams --------------------------------------------------------------------------------

    def stream(self, number: int) -> int:
        """The handle of the plan's stream `number`; -1 is the host's own."""
        self._open()
        if number not in self._streams:
            self._streams[number] = self.driver.stream()
        return self._streams[number]

    def lower(self, launches: Sequence[Launch]) -> CudaProgram:
        """Steps with every argument resolved; kernels are compiled here."""
        self._open()
        low = Lowering(self)
        for launch in launches:
            emit(low, launch)
        return CudaProgram(launches, tuple(low.steps))

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work` done once this thread has enqueued a run, before it waits for the device."""
        self._meanwhile[threading.get_ident()] = work

    def submit(self, stream: int, program: CudaProgram) -> None:
        """Enqueue the steps."""
        handle = self.stream(stream)
        for step in program.steps:
            step(handle)

    def copy(
        self, stream: int, target: tuple[Memory, int], source: tuple[Memory, int], nbytes: int
    ) -> None:
        """Enqueue a copy; host memory is pinned the first time that it takes part. Where plans are
        captured a small one is a kernel: a graph of kernels alone is launched with less work of the
        host than one that also needs the copy engines."""
        into, out = self.address(*target), self.address(*source)
        handle = self.stream(stream)
        if self.graphs and 0 < nbytes <= SMALL_COPY and self._kernels_copy(target[0], source[0]):
            size = 1 if (into | out | nbytes) % 4 else 4
            given = {"from": out, "to": into, "count": nbytes // size, "size": size}
            function = self.driver.function(Unit("rows"), "copy_small")
            grid = (-(-given["count"] // 256), 1, 1)
            self.driver.launch(function, grid, 256, packed("copy_small", given), handle)
        else:
            self.driver.copy(into, out, nbytes, handle)

    def _kernels_copy(self, one: Memory, other: Memory) -> bool:
        """Whether kernels reach both: this device's own memory, and the host's that is locked."""
        ours, host = (one, other) if isinstance(one.handle, Pointer) else (other, one)
        if not isinstance(ours.handle, Pointer) or isinstance(host.handle, Pointer):
            return False
        _, locked = self._pinned[host.address]
        return locked and self.driver.reaches_host and ours.handle.address in self._held

    def record(self, stream: int, event: str) -> None:
        """Enqueue a mark."""
        if self._marks is not None:
            self._marks.add(event)
            self._inside.add(event)
        else:
            self._inside.discard(event)
        self.driver.record(self.events.handle(event, self.driver), self.stream(stream))

    def wait(self, stream: int, event: str) -> None:
        """Enqueue a wait. For an event that an earlier graph recorded there is nothing to do, since
        graphs run one after another, and before anything else is enqueued they are complete; one
        that no GPU recorded was a synchronous device's."""
        known = self.events.known.get(event)
        here = event not in self._inside if self._marks is None else event in self._marks
        if known is not None and here:
            self.driver.wait(self.stream(stream), known[0])

    def synchronise(self, stream: int | None = None, event: str | None = None) -> None:
        """Block the host until an event, a stream, or this device is complete."""
        if self._closed:
            return
        if work := self._meanwhile.pop(threading.get_ident(), None):
            work()
        if event in self._inside or (stream is not None and self._captured_any):
            self.driver.synchronise(stream=self.stream(0))  # every graph runs there
        if event is not None:
            known = self.events.known.get(event)
            if known is not None and event not in self._inside:
                self.driver.synchronise(event=known[0])
        elif stream is not None:
            self.driver.synchronise(stream=self.stream(stream))
        else:
            self.driver.synchronise()

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def captures(self) -> bool:
        """Unless graphs are off."""
        return self.graphs

    def capture(self, streams: Sequence[int], enqueue: Callable[[], None]) -> Callable[[], None]:
        """What `enqueue` puts on `streams`, as one call that enqueues it again.

        The first call enqueues, which loads kernels and library handles; the second one captures.
        Where CUDA refuses, the backend waits for the graphs there are and goes on without any: a
        plan of which one part is a graph and another is not would order too little.
        Everything captured runs in the order of stream 0's graphs, which is more order than the
        plan asks for, never less.
        """
        made: list[Any] = []
        ready = False

        def replay() -> None:
            nonlocal ready
            if self.graphs and ready and not made:
                try:
                    made.append(self._captured(streams, enqueue))
                except BackendError as error:
                    self.graphs = False
                    self.driver.synchronise()
                    text = f"{self.spec.name}: plans run without graphs from now on: {error}"
                    warnings.warn(text, stacklevel=2)
            if self.graphs and made:
                self.driver.launch_graph(made[0], self.stream(0))
            else:
                enqueue()
            ready = True

        return replay

    def _captured(self, streams: Sequence[int], enqueue: Callable[[], None]) -> Any:
        """Fork every stream from stream 0, enqueue, and join them again."""
        driver, main = self.driver, self.stream(0)
        others = [self.stream(s) for s in streams if s != 0]
        fork, joins = driver.event(), [driver.event() for _ in others]
        driver.begin_capture(main)
        try:
            self._marks, self._captured_any = set(), True
            driver.record(fork, main)
            for other in others:
                driver.wait(other, fork)
            enqueue()
            for other, join in zip(others, joins, strict=True):
                driver.record(join, other)
                driver.wait(main, join)
        except BaseException:
            with suppress(BackendError):  # CUDA ends it, and refuses streams that were not joined
                driver.end_capture(main)
            raise
        finally:
            self._marks = None
        return driver.end_capture(main)

    # --- what programs need beside the plan's memory ----------------------------------------------

    def constant(self, values: Array) -> int:
        """Address of a copy of `values` that stays until the backend is closed."""
        key = values.tobytes()
        if key not in self._constants:
            address = self._constants[key] = self._allocate(len(key), "a table of constants")
            self._copy_now(address, int(values.ctypes.data), len(key))
        return self._constants[key]

    def close(self) -> None:
        """Wait where possible, then free everything. Further calls raise BackendError."""
        if self._closed:
            return
        self._closed = True
        with suppress(BackendError):  # of a device that is lost
            self.driver.synchronise()
        for address, (_, ours) in self._pinned.items():
            if ours:
                self.driver.unpin(address)
        for address in (*self._held, *self._constants.values()):
            self.driver.free(address)
        for known in (self._held, self._pinned, self._streams, self._constants):
            known.clear()
        self.events.forget(self.driver)
        self.driver.close()

    def _open(self) -> None:
        if self._closed:
            raise BackendError(f"{self.spec.name} is closed; open another backend")

    def address(self, memory: Memory, offset: int) -> int:
        """Where the device finds a place in its own, a peer's or the host's memory."""
        if isinstance(memory.handle, Pointer):
            return memory.handle.address + offset
        address = memory.address
        if address not in self._pinned:  # kept alive: the driver knows its pages
            self._pinned[address] = memory, self.driver.pin(address, memory.handle.nbytes)
        return address + offset
