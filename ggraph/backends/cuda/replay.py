"""Replay any plan on real streams, verified or not, with one command held back.

For the corpus of races alone: `Executor` takes only verified plans. Every device of the plan that
is not the CPU becomes a set of streams of one GPU, with memory of its own; what the plan runs on
the CPU runs at once by its NumPy reference, which is one legal order. A command is held back by a
kernel that only takes time, so that the stream which must lose a race does. Where a launch races
with itself, since it overwrites what its own threads read, all but its first block are held back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np

from ggraph.backends.cuda.backend import CudaBackend, CudaProgram, CudaSpec, Events
from ggraph.backends.cuda.driver import Driver
from ggraph.backends.cuda.kernels import Unit, in_parts, packed
from ggraph.backends.cuda.lower import emit
from ggraph.backends.cuda.lowering import Lowering
from ggraph.backends.host import HostMemory
from ggraph.backends.plan_memory import PlanMemory
from ggraph.backends.protocol import POISON, Scratch
from ggraph.backends.reference import run_reference
from ggraph.device import HOST, Need
from ggraph.errors import BackendError, InputError
from ggraph.plan import Actor, Buffer, Command, Do, Plan
from ggraph.tensor import Array

Values = Mapping[str, Array]


def _beside(gpu: CudaBackend, need: Need) -> Scratch:
    """Bytes of a launch's own: a plan that was made for another device has none for it."""
    memory = gpu.allocate(Buffer(need.name, gpu.spec.name, need.nbytes, gpu.spec.alignment))
    return Scratch(need.name, memory, 0, need.nbytes)


class InParts(Lowering):
    """Launches of which the first block is done before the others begin."""

    def compiled(self, unit: Unit) -> Unit:
        """Its late form."""
        return in_parts(unit)


@dataclass(eq=False)
class Replayer:
    """A plan bound to one GPU. `initial` has the raw storage of weights; states begin as zeros. The
    launches labelled `parted` run in two parts, one block ahead of all others."""

    plan: Plan
    initial: Values
    driver: Driver
    parted: str = ""
    _gpus: dict[str, CudaBackend] = field(default_factory=dict)
    _host: HostMemory = field(default_factory=HostMemory)
    _programs: dict[tuple[int, int], CudaProgram] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(c.chosen_by is not None for c in self.plan.schedule):
            raise BackendError("a plan with partial copies cannot be replayed on a GPU")
        events = Events()
        for spec in self.plan.schedule.splits.placement.devices:
            if spec.kind != "cpu":
                own = CudaSpec(spec.name, "cuda", alignment=spec.alignment)
                self._gpus[spec.name] = CudaBackend(own, self.driver, False, events)
        buffers = self.plan.memory.buffers.values()
        memory = {b.name: self._owner(b.device).allocate(b) for b in buffers}
        self._memory = PlanMemory(self.plan.memory, memory)
        self._phases = lcm(*(len(r.offsets) for r in self.plan.memory.regions.values()))

    def run(
        self, feeds: Sequence[Values], late: str = "", delay_s: float = 0.0
    ) -> tuple[dict[str, Array], ...]:
        """Outputs of one run per element of `feeds`, from poisoned memory. The commands labelled
        `late` begin `delay_s` later than their stream would let them."""
        self._reset()
        found = []
        for k, given in enumerate(feeds):
            results: dict[str, Array] = {}
            for i, c in enumerate(self.plan.schedule):
                if c.label == late:
                    self._hold_back(c.actor, delay_s)
                self._step(i, c, k, given, results)
            found.append(results)
        self.driver.synchronise()
        return tuple(found)

    def close(self) -> None:
        """Give the GPU's memory and streams back."""
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()

    def _owner(self, device: str) -> Any:
        return self._gpus.get(device, self._host)

    def _reset(self) -> None:
        for m in self._memory.buffers.values():
            self._owner(m.buffer.device).write(m, 0, np.full(m.buffer.nbytes, POISON, np.uint8))
        for v in self.plan.schedule.values.values():
            if v.initial:
                memory, offset = self._memory.at(v.name, 0)
                self._owner(memory.buffer.device).write(memory, offset, self._first(v.name))

    def _first(self, name: str) -> Array:
        size = self.plan.schedule.values[name].nbytes
        given = self.initial.get(name)
        if given is None and name in self.plan.schedule.carried:
            return np.zeros(size, np.uint8)
        if given is None or given.nbytes != size:
            raise InputError(f"initial value of {name!r}: expected {size} bytes")
        return given

    def _hold_back(self, actor: Actor, seconds: float) -> None:
        """Keep a stream busy; before a host step, let everything enqueued so far go first."""
        gpu = self._gpus.get(actor.device)
        if gpu is None:
            self.driver.synchronise()
            return
        function = self.driver.function(Unit("delay"), "delay")
        args = packed("delay", {"duration": int(seconds * 1e9)})
        self.driver.launch(function, (1, 1, 1), 32, args, gpu.stream(actor.stream))

    def _step(
        self, index: int, c: Command, run: int, given: Values, results: dict[str, Array]
    ) -> None:
        gpu = self._gpus.get(c.actor.device)
        if c.do is Do.LAUNCH:
            self._launch(index, c, run, gpu)
        elif c.do is Do.COPY:
            self._copy(c, run, gpu)
        elif c.do is Do.RECORD and gpu is not None:
            gpu.record(c.actor.stream, c.event or "")
        elif c.do is Do.WAIT and gpu is not None:
            gpu.wait(c.actor.stream, c.event or "")
        elif c.do is Do.HOST_SYNC:
            self._sync(c)
        elif c.actor.device == HOST:
            self._host_step(c, run, given, results)

    def _launch(self, index: int, c: Command, run: int, gpu: CudaBackend | None) -> None:
        t = self.plan.graph[c.node or c.label]
        if gpu is None:
            run_reference(self._memory.launch(c, t, run))
            return
        key = (index, run % self._phases)
        if key not in self._programs:
            beside = {n.key: _beside(gpu, n) for n in gpu.spec.needs(t)}
            launch = self._memory.launch(c, t, run, beside)
            low = InParts(gpu) if c.label == self.parted else Lowering(gpu)
            emit(low, launch)
            self._programs[key] = CudaProgram([launch], tuple(low.steps))
        gpu.submit(c.actor.stream, self._programs[key])

    def _copy(self, c: Command, run: int, gpu: CudaBackend | None) -> None:
        for a, b in zip(c.reads, c.writes, strict=True):
            (out, first), (into, begin) = (self._memory.at(x.value, run) for x in (a, b))
            target, source, nbytes = (
                (into, begin + b.start),
                (out, first + a.start),
                a.stop - a.start,
            )
            if gpu is not None:
                gpu.copy(c.actor.stream, target, source, nbytes)
            else:
                into.handle[target[1] : target[1] + nbytes] = out.handle[
                    source[1] : source[1] + nbytes
                ]

    def _sync(self, c: Command) -> None:
        if c.event is not None:
            for gpu in [*self._gpus.values()][:1]:  # events are shared
                gpu.synchronise(event=c.event)
        elif c.waits_for is not None:
            gpu_or_none = self._gpus.get(c.waits_for.device)
            if gpu_or_none is not None:
                gpu_or_none.synchronise(stream=c.waits_for.stream)
        else:
            self.driver.synchronise()

    def _host_step(self, c: Command, run: int, given: Values, results: dict[str, Array]) -> None:
        """The host's accesses, which order nothing."""
        for a in c.writes:
            memory, offset = self._memory.at(a.value, run)
            owner = self._owner(memory.buffer.device)
            freed = np.full(a.stop - a.start, POISON, np.uint8)
            data = given[c.node or ""] if c.do is Do.HOST_WRITE else freed
            owner.write(memory, offset + a.start, data)
        for a in c.reads:
            memory, offset = self._memory.at(a.value, run)
            owner = self._owner(memory.buffer.device)
            raw = owner.read(memory, offset + a.start, a.stop - a.start)
            t = self.plan.graph[c.node] if c.node else None
            whole = t is not None and raw.size == t.size * t.dtype.np.itemsize
            shaped = raw.view(t.dtype.np).reshape(t.shape) if t is not None and whole else raw
            results[c.node or c.label] = shaped
