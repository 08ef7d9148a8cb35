"""Replay any plan, verified or not, and report what every read found.

Each byte carries a tag: which value of which run was written there last. A read of value v that
finds another tag is a fault, whether or not the numbers happen to agree: a stale value, a lost
write, bytes that another value took, or bytes that nobody wrote. This is `verify`'s second property
(provenance) seen from one execution; the code shares nothing with `verify`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from ggraph.backends.plan_memory import PlanMemory
from ggraph.backends.protocol import POISON, Launch, Memory
from ggraph.backends.sim.backend import Ranges, picked_runs
from ggraph.backends.sim.machine import Machine, Span
from ggraph.backends.sim.orders import InOrder, Order
from ggraph.backends.sim.pieces import run_launch
from ggraph.door import checked
from ggraph.errors import GgraphError, InputError, PlanError
from ggraph.ops.copies import slice_runs
from ggraph.plan import HOST_STEPS, Access, Command, Do, Plan
from ggraph.tensor import Array, Tensor

_ALL: Mapping[str, Ranges] = {}
_RUNS = 1 << 20  # tags are value number * _RUNS + run + 1; 0: nobody wrote


@dataclass(frozen=True)
class Fault:
    """A read that did not find its producer's bytes."""

    run: int
    command: str
    access: Access
    byte: int  # first wrong byte, relative to the value
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"run {self.run}: {self.command} reads {self.access}: byte {self.byte} holds "
            f"{self.found}, not {self.expected}"
        )


@dataclass(frozen=True, eq=False)
class Simulated:
    """What one simulation gave: outputs per run, states at the end, faults, the timeline, and the
    bytes that copies moved."""

    outputs: tuple[Mapping[str, Array], ...]
    states: Mapping[str, Array]
    faults: tuple[Fault, ...]
    timeline: tuple[Span, ...]
    bytes_copied: int = 0

    @property
    def seconds(self) -> float:
        """Virtual time at which everything was complete."""
        return max((s.stop for s in self.timeline), default=0.0)


@dataclass(eq=False)
class _Tags:
    """Numbers for (value, run) pairs, and back."""

    plan: Plan
    number: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = {name: i + 1 for i, name in enumerate(self.plan.schedule.values)}

    def of(self, value: str, run: int) -> int:
        return self.number[value] * _RUNS + run + 1

    def expected(self, value: str, run: int) -> int:
        """The tag that a read of `value` in `run` must find. Run -1 stands for "initial"."""
        schedule = self.plan.schedule
        held = schedule.values[value]
        if value in schedule.carried:
            last = schedule.carried[value]
            return self.of(value, -1) if run == 0 or last == value else self.of(last, run - 1)
        return self.of(value, -1 if held.initial else run)

    def name(self, tag: int) -> str:
        if not tag:
            return "bytes that nobody wrote"
        value = list(self.number)[tag // _RUNS - 1]
        run = tag % _RUNS - 1
        return f"%{value} of run {run}" if run >= 0 else f"%{value} as it was loaded"


def _fed(c: Command, a: Access, given: Mapping[str, Array]) -> Array:
    """The bytes that a host step writes. InputError without its feed, or for another size."""
    if (name := c.node or "") not in given:
        raise InputError(f"{c.label!r}: no feed {name!r}; given: {', '.join(given) or 'none'}")
    data = np.ascontiguousarray(given[name]).reshape(-1).view(np.uint8)
    if not 0 <= a.start <= a.stop or data.size != a.stop - a.start:
        raise InputError(f"{c.label!r} writes {a}, but is fed {data.size} bytes")
    return data


def _check_names(plan: Plan) -> None:
    """PlanError where the simulator would not know which bytes are meant."""
    values, memory = plan.schedule.values, plan.memory
    named = (a.value for c in plan.schedule for a in (*c.reads, *c.writes))
    for name in (*named, *values, *plan.schedule.carried):
        region = memory.regions.get(name)
        buffer = memory.buffers.get(region.buffer) if region is not None else None
        if name not in values or region is None or buffer is None or not region.offsets:
            raise PlanError(f"{name!r} is no value that lies in a buffer of this plan")
        if buffer.name != region.buffer:
            raise PlanError(f"buffer {region.buffer!r} calls itself {buffer.name!r}")
        last = max(region.offsets) + values[name].nbytes
        if min(region.offsets) < 0 or last > buffer.nbytes or values[name].nbytes < 0:
            raise PlanError(f"{name!r} leaves {buffer.name!r} of {buffer.nbytes} bytes")


class Simulator:
    """A plan bound to simulated memory; every call of `run` begins afresh unless told otherwise.

    `initial` gives the raw storage of weights and states by name; a state that is not given begins
    as zeros. Raises InputError for a weight that is missing or has another size, PlanError for a
    plan whose values have no bytes of their own.
    """

    @checked
    def __init__(self, plan: Plan, initial: Mapping[str, Array]) -> None:
        _check_names(plan)
        self.plan = plan
        self._initial = initial
        self._tags = _Tags(plan)
        try:
            bytes_of = {b: np.zeros(b.nbytes, np.uint8) for b in plan.memory.buffers.values()}
            self._tag = {b.name: np.zeros(b.nbytes, np.int64) for b in bytes_of}
        except (ValueError, MemoryError) as error:
            raise PlanError(f"this machine cannot simulate such memory: {error}") from error
        memory = {b.name: Memory(b, held) for b, held in bytes_of.items()}
        self._memory = PlanMemory(plan.memory, memory)
        self._phases = lcm(*(len(r.offsets) for r in plan.memory.regions.values()))
        self._launches: dict[tuple[int, int], Launch] = {}
        self._faults: list[Fault] = []
        self._copied = self._done = 0
        self._begun = False
        self._looked_at: dict[str, Array] = {}  # what the host has read, by node

    @checked
    def run(
        self,
        feeds: Sequence[Mapping[str, Array]],
        order: Order | None = None,
        *,
        fresh: bool = True,
    ) -> Simulated:
        """Run the plan once per element of `feeds` (one array per input), in the given order.

        Without `fresh` memory is as the last call left it, and runs are numbered on from there.
        """
        if fresh or not self._begun:
            self._reset()
        self._faults, self._copied = [], 0
        machine = Machine(order or InOrder())
        outputs: list[Mapping[str, Array]] = []
        for k, given in enumerate(feeds, self._done):
            results: dict[str, Array] = {}
            for i, c in enumerate(self.plan.schedule):
                self._step(machine, i, c, k, given, results)
            outputs.append(results)
        machine.synchronise()
        self._done += len(feeds)
        states = {s: self._bytes(s, 0) for s in self.plan.schedule.carried}
        faults, timeline = tuple(self._faults), tuple(machine.timeline)
        return Simulated(tuple(outputs), states, faults, timeline, self._copied)

    @checked
    def write_state(self, name: str, data: Array) -> None:
        """Replace a state's bytes before the next run that is not a fresh one."""
        if not self._begun:
            self._reset()
        if name not in self.plan.schedule.carried:
            raise InputError(f"no state {name!r} in this plan")
        memory, begin = self._memory.at(name, 0)
        stored = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if stored.size != self.plan.schedule.values[name].nbytes:
            raise InputError(f"state {name!r}: {stored.size} bytes do not fit")
        memory.handle[begin : begin + stored.size] = stored

    def _reset(self) -> None:
        self._faults = []
        self._begun, self._done = True, 0
        self._copied = 0
        self._looked_at.clear()
        for name, memory in self._memory.buffers.items():
            memory.handle[:] = POISON
            self._tag[name][:] = 0
        for v in self.plan.schedule.values.values():
            if v.initial:
                buffer, begin = self._memory.at(v.name, 0)
                buffer.handle[begin : begin + v.nbytes] = self._first(v.name, v.nbytes)
                self._tag[buffer.buffer.name][begin : begin + v.nbytes] = self._tags.of(v.name, -1)

    def _first(self, name: str, nbytes: int) -> Array:
        given = self._initial.get(name)
        if given is None and name in self.plan.schedule.carried:
            return np.zeros(nbytes, np.uint8)
        raw = None if given is None else np.ascontiguousarray(given).reshape(-1).view(np.uint8)
        if raw is None or raw.size != nbytes:
            got = "nothing" if raw is None else f"{raw.size} bytes"
            raise InputError(f"initial value of {name!r}: expected {nbytes} bytes, got {got}")
        return raw

    def _bytes(self, value: str, run: int) -> Array:
        memory, begin = self._memory.at(value, run)
        held: Array = memory.handle[begin : begin + self.plan.schedule.values[value].nbytes]
        return held.copy()

    def _step(
        self,
        machine: Machine,
        index: int,
        c: Command,
        run: int,
        given: Mapping[str, Array],
        results: dict[str, Array],
    ) -> None:
        """Enqueue one command, or perform one host step."""
        if c.do is Do.RECORD:
            machine.record(c.actor, c.event or "")
        elif c.do is Do.WAIT:
            machine.wait(c.actor, c.event or "")
        elif c.do is Do.HOST_SYNC:
            who = c.waits_for
            device, stream = (who.device, who.stream) if who else (None, None)
            machine.synchronise(device, stream, c.event)
        elif c.do in HOST_STEPS:
            machine.host(c.label, self._host(c, run, given, results), c.seconds)
        else:
            work = self._kernel(index, c, run) if c.do is Do.LAUNCH else self._copy(c, run)
            machine.enqueue(c.actor, c.label, c.seconds, work)

    def _host(
        self, c: Command, run: int, given: Mapping[str, Array], results: dict[str, Array]
    ) -> Callable[[], None]:
        def write() -> None:
            for a in c.writes:
                data = _fed(c, a, given)
                memory, begin = self._memory.at(a.value, run)
                memory.handle[begin + a.start : begin + a.stop] = data
            self._note(c, run)

        def read() -> None:
            self._check(c, run)
            t = self.plan.graph.get(c.node or "")
            raw = np.empty(0, np.uint8)  # what has no elements is read nowhere
            for a in c.reads:
                memory, begin = self._memory.at(a.value, run)
                raw = memory.handle[begin + a.start : begin + a.stop].copy()
            self._looked_at[c.node or ""] = _shaped(raw, t)
            if t is None or t.is_output:
                results[c.node or c.label] = _shaped(raw, t)

        def free() -> None:
            for a in c.writes:
                memory, begin = self._memory.at(a.value, run)
                memory.handle[begin + a.start : begin + a.stop] = POISON
                self._tag[memory.buffer.name][begin + a.start : begin + a.stop] = 0

        return {Do.HOST_WRITE: write, Do.HOST_READ: read, Do.HOST_FREE: free}[c.do]

    def _kernel(self, index: int, c: Command, run: int) -> Callable[[], None]:
        key = (index, run % self._phases)
        if key not in self._launches:
            t = self.plan.graph.get(c.node or c.label)
            if t is None:
                raise PlanError(f"{c.label!r}: no tensor of the graph says what it computes")
            self._launches[key] = self._memory.launch(c, t, run)

        def work() -> None:
            launch = self._launches[key]
            self._check(c, run, _picked(launch))
            self._launch(launch)
            self._note(c, run)

        return work

    def _launch(self, launch: Launch) -> None:
        """Run the reference. One that refuses garbage (an index from poison) leaves poison: a real
        kernel would go on with it."""
        try:
            run_launch(launch)
        except GgraphError:
            if not self._faults:
                raise
            r = launch.result
            if launch.result.tensor.overwritten is None:
                r.memory.handle[r.offset : r.offset + r.tensor.nbytes] = POISON

    def _copy(self, c: Command, run: int) -> Callable[[], None]:
        parts = self._chosen(c)

        def work() -> None:
            self._check(parts, run)
            for a, b in zip(parts.reads, parts.writes, strict=True):
                (out, first), (into, begin) = (self._memory.at(x.value, run) for x in (a, b))
                moved = out.handle[first + a.start : first + a.stop].copy()
                into.handle[begin + b.start : begin + b.stop] = moved
                self._copied += moved.size
            self._note(parts, run)

        return work

    def _chosen(self, c: Command) -> Command:
        """The copy as it is enqueued: of a partial one, the slices that the host has seen named.
        What it leaves out keeps the bytes of earlier tenants, and their tags."""
        if c.chosen_by is None:
            return c
        t = self.plan.graph[c.node or ""]
        runs = slice_runs(self._looked_at[c.chosen_by], t.shape[0], t.nbytes)
        reads, writes = (
            tuple(Access(a.value, a.start + i, a.start + j) for i, j in runs)
            for (a,) in (c.reads, c.writes)
        )
        return replace(c, reads=reads, writes=writes)

    def _note(self, c: Command, run: int) -> None:
        """Tag what `c` wrote."""
        for a in c.writes:
            memory, begin = self._memory.at(a.value, run)
            tag = self._tags.of(a.value, run)
            self._tag[memory.buffer.name][begin + a.start : begin + a.stop] = tag

    def _check(self, c: Command, run: int, picked: Mapping[str, Ranges] = _ALL) -> None:
        """Compare the tags of what `c` reads with what it should find; of a value in `picked` only
        those ranges."""
        reads = [a for a in c.reads if a.value not in picked]
        reads += [Access(v, i, j) for v, runs in picked.items() for i, j in runs]
        for a in reads:
            memory, begin = self._memory.at(a.value, run)
            seen = self._tag[memory.buffer.name][begin + a.start : begin + a.stop]
            wanted = self._tags.expected(a.value, run)
            wrong = seen != wanted
            if wrong.any():
                at = int(np.argmax(wrong))
                names = self._tags.name(wanted), self._tags.name(int(seen[at]))
                self._faults.append(Fault(run, c.label, a, a.start + at, *names))


def _picked(launch: Launch) -> Mapping[str, Ranges]:
    """The value of which the launch reads some slices only, and the bytes of those."""
    spec = launch.result.tensor.spec
    if spec is None or spec.picks is None or launch.sources[spec.picks[0]].tensor.is_view:
        return _ALL
    i = spec.picks[0]
    return {launch.sources[i].tensor.name: picked_runs(launch, i)}


def _shaped(raw: Array, t: Tensor | None) -> Array:
    """Raw bytes as the tensor's storage type and shape, gaps of a view left out; block types, and
    bytes of no tensor, as they are."""
    if t is None or t.dtype.is_block or raw.size != t.nbytes:
        return raw
    if t.is_contiguous:
        return raw.view(t.dtype.np).reshape(t.shape)
    return np.ndarray(t.shape, t.dtype.np, raw, 0, t.strides)
