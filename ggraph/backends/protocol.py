"""The interface between the executor and a device. Read this page first.

A backend owns memory, streams and events of one device. The executor calls it from one host
thread, in the order of a verified plan; it never has to decide, reorder or wait on its own.

Queues. A *stream* is a first-in first-out queue: what is submitted runs in order, each command
after the one before it is complete. Different streams are unordered unless an event orders them.
`submit`, `copy`, `record` and `wait` return at once ("enqueue"); the work happens later. A
synchronous device (the CPU) may run each command before it returns: that is one legal execution.

Events. `record` marks the present end of a stream. `wait` makes a stream go on only when the work
before the *latest record enqueued so far* is complete; a wait on an event that was never recorded
does nothing. `synchronise` blocks the host; nothing else does, except `read` and `write`, which
are host accesses and complete when they return. They order nothing: the plan must have done so.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ggraph.device import DeviceSpec
from ggraph.errors import BackendError
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import Storage
from ggraph.plan import Buffer, Command
from ggraph.tensor import Array, Tensor

POISON = 0xFF  # what bytes that nobody has written are made of: NaN in every type of floats


@dataclass(frozen=True, eq=False)
class Memory:
    """One allocated buffer; `handle` is the backend's own (a byte array, a device pointer)."""

    buffer: Buffer
    handle: Any

    @cached_property
    def address(self) -> int:
        """Where a byte array begins; NumPy takes a microsecond to say so, each time."""
        return int(self.handle.ctypes.data)


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor's bytes: `tensor` gives the layout, its first element is at `offset`."""

    tensor: Tensor
    memory: Memory
    offset: int


@dataclass(frozen=True, eq=False)
class Scratch:
    """Bytes that a launch has beside its operands, as the plan's value; `ready` where an earlier
    launch has filled them."""

    value: str
    memory: Memory
    offset: int
    nbytes: int
    ready: bool = False


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel call with its bytes resolved: the result, the sources, and all other bytes that it
    touches, by the name of the device's need."""

    command: Command
    result: Ref
    sources: tuple[Ref, ...]
    scratch: Mapping[str, Scratch] = field(default_factory=dict)

    def room(self, name: str) -> Scratch:
        """The bytes for a need. BackendError where the plan was not made for this device."""
        if name not in self.scratch:
            raise BackendError(f"{self.result.tensor}: the plan has no bytes for {name!r}")
        return self.scratch[name]


class Program(Protocol):
    """A run of launches of one stream, lowered once and submitted many times."""

    @property
    def launches(self) -> Sequence[Launch]:
        """What was lowered."""
        ...


class Store(Protocol):
    """Memory that the host may ask for: its own, or a device's."""

    def allocate(self, buffer: Buffer) -> Memory:
        """Memory of `buffer.nbytes`, aligned as the buffer says. BackendError: does not fit."""
        ...

    def free(self, memory: Memory) -> None:
        """Give memory back; the host has synchronised every stream that used it."""
        ...

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        """Host access: put `data`'s bytes at `offset`; complete on return."""
        ...

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """Host access: `nbytes` bytes from `offset` as a new uint8 array; complete on return."""
        ...

    def window(self, memory: Memory, offset: int, nbytes: int) -> Array | None:
        """The bytes themselves, uint8, which then serve in place of `read` and `write` for as long
        as the memory is not freed (optional; default: None, the host cannot reach them)."""
        return None

    @property
    def copies_from(self) -> int:
        """Bytes from which `write` and `read` are faster than what `window` shows (optional;
        default: never)."""
        return sys.maxsize

    def close(self) -> None:
        """Free everything (optional; default: nothing). Further calls raise BackendError."""
        return


class Backend(Store, Protocol):
    """What every device offers. Stream and event numbers are the plan's; 0 always exists.

    What is optional has a default that a class inherits which names this one as its base.
    """

    spec: DeviceSpec

    @property
    def is_synchronous(self) -> bool:
        """Whether each command is complete when its call returns (optional; default: no). Then
        `wait` is asked only for events of this device, and the host waits for those of others."""
        return False

    @property
    def captures(self) -> bool:
        """Whether `capture` makes a replay cheaper than enqueueing (optional; default: no)."""
        return False

    def expect(self, weights: Iterable[RawTensor]) -> None:
        """These weights will be loaded soon: what takes long may begin (optional; default:
        nothing)."""
        return

    def load(self, buffer: Buffer, tensor: Tensor, raw: Storage) -> Memory:
        """Memory that holds a weight for ever.

        `raw` is the storage as the checkpoint has it (`tensor.nbytes` bytes, read-only), or what
        makes it (`np.asarray(raw)`, or rows by themselves). The backend may share it, copy it, or
        keep it in whatever form its kernels like best.
        """
        ...

    def lower(self, launches: Sequence[Launch]) -> Program:
        """Prepare consecutive launches of one stream; all decisions about kernels fall here."""
        ...

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work`, which must not use this backend, done by the thread that asks, once: while
        the next program that it submits runs, or before (optional; default: now)."""
        work()

    def submit(self, stream: int, program: Any) -> None:
        """Enqueue a program, which this backend has lowered, on a stream."""
        ...

    def copy(
        self, stream: int, target: tuple[Memory, int], source: tuple[Memory, int], nbytes: int
    ) -> None:
        """Enqueue a copy within the device, or between it and host or peer memory."""
        ...

    def record(self, stream: int, event: str) -> None:
        """Enqueue a mark; later waits on `event` refer to it."""
        ...

    def wait(self, stream: int, event: str) -> None:
        """Enqueue a wait for the latest record of `event`, which may be another backend's."""
        ...

    def synchronise(self, stream: int | None = None, event: str | None = None) -> None:
        """Block the host until an event, a stream, or everything (no argument) is complete."""
        ...

    def capture(self, streams: Sequence[int], enqueue: Callable[[], None]) -> Callable[[], None]:
        """What `enqueue` puts on these streams of this device, as one call that puts it there again
        (optional; default: `enqueue` itself). Calls made so run one after another, and
        `synchronise` waits for them."""
        return enqueue

    def abandon(self) -> None:
        """A run has failed half-way: forget or finish what is enqueued, so that nothing is in
        flight (optional; default: `synchronise`)."""
        self.synchronise()


Backends = Mapping[str, Backend | Store]  # by the device's name; a mere store under HOST alone
