"""The backend protocol on a simulated machine.

Memory is NumPy bytes, poisoned with 0xFF (NaN in every float type) until somebody writes it. A
shadow map knows which bytes are valid; a command that reads others raises BackendError and names
them.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from ggraph.backends.host import aligned_bytes
from ggraph.backends.protocol import (
    POISON,
    Backend,
    Launch,
    Memory,
    Program,
    Ref,
    Scratch,
    Store,
)
from ggraph.backends.sim.machine import Machine
from ggraph.backends.sim.pieces import run_launch
from ggraph.device import HOST, DeviceSpec
from ggraph.errors import BackendError, InputError, shown
from ggraph.formats.lazy_array import Storage
from ggraph.ops.copies import slice_runs
from ggraph.ops.evaluate import read
from ggraph.plan import Actor, Buffer
from ggraph.tensor import Array, Tensor

Ranges = Sequence[tuple[int, int]]


@dataclass(eq=False)
class Lowered:
    """A simulated program: just its launches."""

    launches: Sequence[Launch]


@dataclass(eq=False)
class _Room:
    """Memory of one owner: how much is taken, and (machine-wide) which bytes are valid."""

    owner: str
    capacity: int
    valid: MutableMapping[Memory, Array]
    used: int = 0

    def allocate(self, buffer: Buffer) -> Memory:
        if self.used + buffer.nbytes > self.capacity:
            raise BackendError(
                f"{self.owner}: buffer {buffer.name!r} of {buffer.nbytes} bytes does not fit: "
                f"{self.used} of {self.capacity} are taken"
            )
        self.used += buffer.nbytes
        raw = aligned_bytes(buffer.nbytes, buffer.alignment)
        raw[:] = POISON
        memory = Memory(buffer, raw)
        self.valid[memory] = np.zeros(buffer.nbytes, bool)
        return memory

    def free(self, memory: Memory) -> None:
        if self.valid.pop(memory, None) is None:
            raise BackendError(f"{self.owner}: buffer {memory.buffer.name!r} is freed twice")
        self.used -= memory.buffer.nbytes
        if memory.handle.flags.writeable:
            memory.handle[:] = POISON

    def mark(self, memory: Memory, start: int, stop: int) -> None:
        known = self.valid.get(memory)
        if known is not None:
            known[start:stop] = True

    def check(self, memory: Memory, start: int, stop: int, who: str) -> None:
        known = self.valid.get(memory)
        if known is None or known[start:stop].all():
            return
        at = start + int(np.argmin(known[start:stop]))
        raise BackendError(
            f"{who} reads bytes [{start}, {stop}) of {memory.buffer.name!r}, but nobody wrote "
            f"byte {at}"
        )


def _check_parts(spec: object, machine: object) -> None:
    if not isinstance(spec, DeviceSpec):
        raise InputError(f"spec={shown(spec)}: expected a DeviceSpec")
    if not isinstance(machine, Machine):
        raise InputError(f"machine={shown(machine)}: expected a Machine")


@dataclass(eq=False)
class SimHost(Store):
    """Host memory that takes part in the simulation; give it as backend "host"."""

    machine: Machine
    spec: DeviceSpec = field(
        default_factory=lambda: DeviceSpec("simhost", "sim", host_visible=True)
    )
    _room: _Room = field(init=False)

    def __post_init__(self) -> None:
        _check_parts(self.spec, self.machine)
        owner = HOST if self.spec.name == "simhost" else self.spec.name
        self._room = _Room(owner, self.spec.memory_bytes, self.machine.valid)

    def allocate(self, buffer: Buffer) -> Memory:
        """Poisoned memory."""
        return self._room.allocate(buffer)

    def free(self, memory: Memory) -> None:
        """Poison the bytes and forget them."""
        self._room.free(memory)

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        """Host access: put `data`'s bytes at `offset`."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

        def put() -> None:
            memory.handle[offset : offset + flat.size] = flat
            self._room.mark(memory, offset, offset + flat.size)

        self.machine.host(f"write {memory.buffer.name}+{offset}", put)

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """Host access: a copy of the bytes."""
        found = np.empty(nbytes, np.uint8)
        label = f"read {memory.buffer.name}+{offset}"

        def get() -> None:
            self._room.check(memory, offset, offset + nbytes, label)
            found[:] = memory.handle[offset : offset + nbytes]

        self.machine.host(label, get)
        return found

    def close(self) -> None:
        """Forget all memory."""
        self._room = _Room(self._room.owner, 0, {})


class SimBackend(SimHost, Backend):
    """One simulated device of a machine."""

    def __init__(self, spec: DeviceSpec, machine: Machine) -> None:
        super().__init__(machine, spec)
        self._closed = False

    def load(self, buffer: Buffer, tensor: Tensor, raw: Storage) -> Memory:
        """A weight's bytes, shared with the caller; never written."""
        shared = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        if shared.size != tensor.nbytes:
            raise BackendError(f"%{tensor.name}: expected {tensor.nbytes} bytes, got {shared.size}")
        shared.flags.writeable = False  # so that `free` does not poison the caller's bytes
        self._room.used += buffer.nbytes
        memory = Memory(buffer, shared)
        self._room.valid[memory] = np.ones(shared.size, bool)
        return memory

    def lower(self, launches: Sequence[Launch]) -> Program:
        """The launches as they are."""
        return Lowered(launches)

    def submit(self, stream: int, program: Program) -> None:
        """Enqueue each launch as an entry of its own."""
        for launch in program.launches:
            self._enqueue(stream, launch)

    def copy(
        self, stream: int, target: tuple[Memory, int], source: tuple[Memory, int], nbytes: int
    ) -> None:
        """Enqueue a transfer between any two memories of the machine or the host."""
        into, begin = target
        out, first = source
        label = f"copy {out.buffer.name}+{first} -> {into.buffer.name}+{begin}"

        def move() -> None:
            self._room.check(out, first, first + nbytes, label)
            into.handle[begin : begin + nbytes] = out.handle[first : first + nbytes]
            self._room.mark(into, begin, begin + nbytes)
            self.machine.bytes_copied += nbytes

        seconds = self.spec.launch_s + nbytes / self.spec.link_bytes_per_s
        self.machine.enqueue(self._actor(stream), label, seconds, move)

    def record(self, stream: int, event: str) -> None:
        """Enqueue a mark."""
        self.machine.record(self._actor(stream), event)

    def wait(self, stream: int, event: str) -> None:
        """Enqueue a wait for the latest record of `event` on any device of the machine."""
        self.machine.wait(self._actor(stream), event)

    def synchronise(self, stream: int | None = None, event: str | None = None) -> None:
        """Block the host until an event, a stream, or this device is complete."""
        self.machine.synchronise(self.spec.name, stream, event)

    def abandon(self) -> None:
        """Forget what is enqueued: a run has failed half-way."""
        self.machine.abandon(self.spec.name)

    def close(self) -> None:
        """Wait for the device, then forget all memory. Later commands raise BackendError."""
        self.synchronise()
        super().close()
        self._closed = True

    def _actor(self, stream: int) -> Actor:
        if self._closed:
            raise BackendError(f"{self.spec.name} is closed; open another backend")
        return Actor(self.spec.name, stream)

    def _enqueue(self, stream: int, launch: Launch) -> None:
        def work() -> None:
            self._fill(launch)
            is_spoilt = any(s.ready and self._differs(s) for s in launch.scratch.values())
            for i, ref in enumerate(launch.sources):
                self._check(ref, launch, picked_runs(launch, i))
            run_launch(launch)
            r = launch.result
            if is_spoilt:
                write_poison(r)
            self._room.mark(r.memory, r.offset, r.offset + r.tensor.nbytes)
            self._fill(launch)  # a kernel uses what it has beside its operands until its end

        label, seconds = launch.command.label, launch.command.seconds
        self.machine.enqueue(self._actor(stream), label, seconds, work)

    def _fill(self, launch: Launch) -> None:
        """Put what only this value can hold into the bytes that a launch has beside operands."""
        for s in launch.scratch.values():
            if not s.ready:
                s.memory.handle[s.offset : s.offset + s.nbytes] = _mark_of(s)
                self._room.mark(s.memory, s.offset, s.offset + s.nbytes)

    def _differs(self, s: Scratch) -> bool:
        return bool((s.memory.handle[s.offset : s.offset + s.nbytes] != _mark_of(s)).any())

    def _check(self, ref: Ref, launch: Launch, ranges: Ranges) -> None:
        root = ref.offset - ref.tensor.offset
        who = f"%{launch.result.tensor.name} (source %{ref.tensor.name})"
        for start, stop in ranges:
            self._room.check(ref.memory, root + start, root + stop, who)


def _mark_of(s: Scratch) -> Array:
    seed = int.from_bytes(sha256(s.value.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 255, s.nbytes, np.uint8)


def write_poison(r: Ref) -> None:
    """Make a result what a kernel gives whose working bytes somebody else has changed."""
    base = r.offset - r.tensor.offset
    for start, stop in r.tensor.byte_ranges():
        r.memory.handle[base + start : base + stop] = POISON


def picked_runs(launch: Launch, source: int) -> Ranges:
    """Byte ranges, within its root, of what a launch reads of its source number `source`: all of
    it, or the slices that the op's indices name at this moment."""
    t, spec = launch.sources[source].tensor, launch.result.tensor.spec
    if spec is None or spec.picks is None or spec.picks[0] != source or t.is_view:
        return t.byte_ranges()
    ids = launch.sources[spec.picks[1]]
    begin = ids.offset - ids.tensor.offset
    return slice_runs(read(ids.tensor, ids.memory.handle, begin), t.shape[0], t.nbytes)
