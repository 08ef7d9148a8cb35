"""The driver boundary answered by CuPy, on a real GPU.

CuPy's thin wrappers are used (runtime and driver), not its arrays: memory, streams and graphs
belong to the backend. Imported only when a device is opened.
"""

import ctypes
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupy.cuda import driver, runtime
from cupy.cuda.function import Module

from ggraph.backends.cuda import early, kernels
from ggraph.backends.cuda.blas import Blas
from ggraph.backends.cuda.driver import WIDEST, Grid, Product
from ggraph.backends.cuda.kernels import Unit
from ggraph.errors import BackendError

OLDEST = 80  # compute capability: bf16 and asynchronous copies
SHARED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
EARLY = 90  # compute capability: launches may begin early
EARLY_DRIVER = 12030  # which captures them
NO_TIMING = 2  # cudaEventDisableTiming
FAILURES = (RuntimeError, MemoryError)  # CuPy's own are RuntimeErrors, as is a missing library


class _Clear:
    """CUDA's errors as one line that says what was attempted. A class, since what every step enters
    should cost less than a generator does."""

    __slots__ = ("what", "where")

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FAILURES):
            what = f"{self.what} on {self.where}" if self.where else self.what
            text = " ".join(str(error).split())
            raise BackendError(f"CUDA: {what} failed: {text}") from None


def open_driver(index: int) -> "CupyDriver":
    """The GPU number `index`. BackendError without driver or GPU, or for one that is too old."""
    try:
        count = runtime.getDeviceCount()
    except FAILURES as error:
        raise BackendError(
            f"cuda{index}: no usable NVIDIA driver or GPU here ({' '.join(str(error).split())}); "
            "`nvidia-smi` should list one, and CuPy's major version must not exceed the driver's"
        ) from None
    if index >= count:
        raise BackendError(
            f"cuda{index}: this machine has {count} GPU(s), cuda0 to cuda{count - 1}"
        )
    with _Clear("reading the device's properties"):
        about = runtime.getDeviceProperties(index)
    name, capability = about["name"].decode(), about["major"] * 10 + about["minor"]
    if capability < OLDEST:
        raise BackendError(
            f"cuda{index}: {name} is sm_{capability}; sm_{OLDEST} or newer is needed"
        )
    with _Clear("asking whether kernels find the host's memory"):
        reaches = runtime.deviceGetAttribute(
            runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, index
        )
    _reach_peers(index, count)
    with _Clear("asking for the driver's version"):
        early = capability >= EARLY and runtime.driverGetVersion() >= EARLY_DRIVER
    processors = int(about["multiProcessorCount"])
    return CupyDriver(index, name, f"sm_{capability}", processors, bool(reaches), early)


def _reach_peers(index: int, count: int) -> None:
    """Copies between GPUs go directly where the machine allows it, else through the host."""
    for other in range(count):
        try:
            if other != index and runtime.deviceCanAccessPeer(index, other):
                runtime.setDevice(index)
                runtime.deviceEnablePeerAccess(other)
        except FAILURES:  # another backend has done so already
            continue


@dataclass(eq=False)
class _Graph:
    graph: int
    executable: int


@dataclass(frozen=True)
class _Kernel:
    """A loaded kernel, and the bytes of shared memory that its launches bring."""

    loaded: Any
    shared: int = 0


@dataclass(eq=False)
class CupyDriver:
    """One GPU. Functions are loaded once per process and device."""

    index: int
    name: str
    arch: str
    processors: int = 1
    reaches_host: bool = False
    begins_early: bool = False
    _modules: dict[Unit, Any] = field(default_factory=dict)
    _functions: dict[tuple[Unit, str], Any] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _blas: Blas = field(default_factory=Blas, init=False)
    _behind: set[int] = field(default_factory=set, init=False)  # streams that end in a launch

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        with self._here("asking for free memory"):
            free, total = runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        with self._here(f"allocating {nbytes} bytes"):
            return int(runtime.malloc(-(-nbytes // WIDEST) * WIDEST))

    def free(self, address: int) -> None:
        """Give it back; after the device is lost there is nothing to give back."""
        self._quietly(lambda: runtime.free(address))

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory; refused for memory that is part of a mapped file, for instance."""
        try:
            runtime.setDevice(self.index)
            runtime.hostRegister(address, nbytes, SHARED)
        except FAILURES:
            return False
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._quietly(lambda: runtime.hostUnregister(address))

    def stream(self) -> int:
        """A non-blocking stream."""
        with self._here("making a stream"):
            made = int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))
        self._undo.append(lambda: runtime.streamDestroy(made))
        return made

    def event(self) -> int:
        """An event without timing."""
        with self._here("making an event"):
            made = int(runtime.eventCreateWithFlags(NO_TIMING))
        self._undo.append(lambda: runtime.eventDestroy(made))
        return made

    def record(self, event: int, stream: int) -> None:
        """Mark the end of a stream."""
        with self._here("recording an event"):
            runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait."""
        self._behind.discard(stream)
        with self._here("waiting for an event"):
            runtime.streamWaitEvent(stream, event)

    def synchronise(self, stream: int | None = None, event: int | None = None) -> None:
        """Block the host. Errors of earlier kernels surface here."""
        with self._here("waiting for the device (an earlier kernel may be at fault)"):
            if event is not None:
                runtime.eventSynchronize(event)
            elif stream is not None:
                runtime.streamSynchronize(stream)
            else:
                runtime.deviceSynchronize()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses; unified addressing tells which is where."""
        self._behind.discard(stream)
        with self._here(f"copying {nbytes} bytes"):
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)

    def function(self, unit: Unit, kernel: str) -> Any:
        """The kernel, compiled for this GPU on first use."""
        key = (unit, kernel)
        if key not in self._functions:
            with self._here(f"loading {kernel} of {unit}"):
                self._functions[key] = self._kernel(unit, kernel)
        return self._functions[key]

    def _kernel(self, unit: Unit, name: str) -> _Kernel:
        """What SHARES of src/common.cuh gives as the size of its object is asked for here."""
        module = self._module(unit)
        loaded = module.get_function(name)
        if f"SHARES({name}," not in unit.text:
            return _Kernel(loaded)
        size = ctypes.c_uint()
        at = driver.moduleGetGlobal(module.ptr, f"{name}_shared")
        runtime.memcpy(ctypes.addressof(size), at, 4, runtime.memcpyDeviceToHost)
        driver.funcSetAttribute(loaded.ptr, MOST_SHARED, size.value)
        return _Kernel(loaded, size.value)

    def _module(self, unit: Unit) -> Any:
        if unit not in self._modules:
            module = Module()
            module.load(kernels.code(unit, self.arch))
            self._modules[unit] = module
        return self._modules[unit]

    def launch(
        self, function: Any, grid: Grid, block: int, args: Sequence[bytes], stream: int
    ) -> None:
        """Enqueue a kernel; the driver copies the arguments before it returns. Behind another one
        it may begin early (see `early`): FOLLOW of src/common.cuh waits for that one."""
        held = [ctypes.create_string_buffer(a, len(a)) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        with self._here("launching a kernel"):
            if self.begins_early and stream in self._behind:
                early.launch(function.loaded.ptr, grid, block, function.shared, stream, pointers)
            else:
                driver.launchKernel(
                    function.loaded.ptr, *grid, block, 1, 1, function.shared, stream,
                    ctypes.addressof(pointers), 0,
                )  # fmt: skip
        self._behind.add(stream)

    def product(self, p: Product, rank: int = 0) -> Callable[[int], None]:
        """One call of cuBLASLt."""
        with self._here("choosing an algorithm"):
            enqueue = self._blas.product(p, rank)

        def step(stream: int) -> None:
            self._behind.discard(stream)
            with self._here("a product"):
                enqueue(stream)

        return step

    def begin_capture(self, stream: int) -> None:
        """Record; other threads may go on using the device."""
        self._behind.clear()
        with self._here("beginning a capture"):
            runtime.streamBeginCapture(stream, runtime.streamCaptureModeRelaxed)

    def end_capture(self, stream: int) -> Any:
        """The graph, made ready to be launched."""
        self._behind.clear()
        with self._here("capturing a plan into a graph"):
            graph = int(runtime.streamEndCapture(stream))
            made = _Graph(graph, int(runtime.graphInstantiate(graph)))
        self._undo.append(lambda: runtime.graphDestroy(made.graph))
        self._undo.append(lambda: runtime.graphExecDestroy(made.executable))
        return made

    def launch_graph(self, graph: Any, stream: int) -> None:
        """Enqueue the whole graph."""
        self._behind.discard(stream)
        with self._here("launching a graph"):
            runtime.graphLaunch(graph.executable, stream)

    def edges(self, graph: Any) -> Sequence[tuple[int, int]]:
        """Read off CUDA's own description of the graph."""
        with tempfile.TemporaryDirectory() as folder, self._here("describing a graph"):
            path = Path(folder) / "graph.dot"
            runtime.graphDebugDotPrint(graph.graph, str(path), 0)
            text = path.read_text()
        found = re.findall(r'node_(\d+)"?\s*->\s*"?graph_\d+_node_(\d+)', text)
        return [(int(a), int(b)) for a, b in found]

    def close(self) -> None:
        """Destroy what was made, last first."""
        self._quietly(self._blas.close)
        for undo in reversed(self._undo):
            self._quietly(undo)
        self._undo.clear()

    def _quietly(self, undo: Callable[[], Any]) -> None:
        """Cleaning up goes on after a lost device."""
        try:
            runtime.setDevice(self.index)
            undo()
        except FAILURES:
            return

    def _here(self, what: str) -> _Clear:
        """Errors made clear, and this GPU the thread's current one: whatever else runs in the
        thread may have chosen another, so that it is asked for each time."""
        clear = _Clear(what, self.name)
        with clear:
            runtime.setDevice(self.index)
        return clear
