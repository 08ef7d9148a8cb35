"""Replay a VerifiedPlan on backends. Decides nothing, allocates the plan's arenas once.

The command list is turned into a list of closures, one per host step, copy, event or run of
launches; replaying is a loop over that list. Where inputs rotate over several slots there is one
such list per phase.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count, groupby
from math import lcm

import numpy as np

from ggraph.arrays import FeedCheck, Feeds
from ggraph.backends.host import parted
from ggraph.backends.plan_memory import PlanMemory
from ggraph.backends.protocol import Backend, Backends, Launch, Memory, Program, Scratch, Store
from ggraph.device import HOST
from ggraph.errors import InputError, shown
from ggraph.formats.checkpoint import storage_shape
from ggraph.ops.copies import slice_runs
from ggraph.ops.evaluate import raw_view
from ggraph.plan import HOST_STEPS, Buffer, Command, Do, Plan, VerifiedPlan, scratch
from ggraph.tensor import Array, Kind, Tensor

Step = Callable[[Mapping[str, Array], dict[str, Array]], None]
Bound = tuple[Do, Step]  # what a step does, and how
_NUMBERS = count()  # of executors: events of one are not those of another on the same device


class Executor:
    """One verified plan, bound to memory and ready to be replayed.

    `external` holds the memory of weights and states by value name; arenas are allocated here and
    given back by `close`. What is enqueued is the proved list, command by command and in its order.
    With `ends_complete` nothing is in flight between two runs; else the caller settles before it
    runs another plan. `inputs` names those of the graph as it was built, which may be fed though
    the plan needs them no more. `torn` names the states that a run which failed half-way may have
    begun to overwrite. Raises TypeError for what `verify` did not make, InputError for a state or
    weight without memory.
    """

    def __init__(
        self,
        verified: VerifiedPlan,
        backends: Backends,
        external: Mapping[str, Memory],
        inputs: frozenset[str] = frozenset(),
    ) -> None:
        if type(verified) is not VerifiedPlan:
            raise TypeError(f"an executor takes what verify made, got {type(verified).__name__}")
        self.verified, self.plan = verified, verified.plan
        self.ends_complete = verified.certificate.ends_complete
        self._prefix = f"{next(_NUMBERS)}/"
        self._backends, self._host = parted(backends)
        self._arenas: dict[str, Memory] = {}
        self._looked_at: dict[str, Array] = {}  # indices that choose what later copies move
        self._fetches: dict[Step, str] = {}  # those of outputs, by name
        self._phases: list[list[Step]] = []
        self._some: dict[tuple[int, tuple[str, ...]], list[Step]] = {}
        try:
            self._bind_all(external)
        except BaseException:
            self.close()
            raise
        needed = (t.name for t in self.plan.graph.leaves(Kind.INPUT))
        self.inputs = inputs.union(needed)
        self._feeds = FeedCheck(self.plan.graph, self.inputs)
        self.runs = 0
        self.torn: frozenset[str] = frozenset()

    def run(self, feeds: Mapping[str, Array] | Feeds) -> dict[str, Array]:
        """Replay the plan once. `feeds` has an array per input; the result has one per output.

        Raises InputError, before anything runs, for a missing, unknown or unfit feed. After any
        exception nothing is in flight and the next run is the plan's first one; what `torn` names
        is not known.
        """
        return self.replay(self.checked(feeds).stored)

    def checked(self, feeds: Mapping[str, Array] | Feeds) -> Feeds:
        """The storage of every input. InputError for a missing, unknown or unfit feed, and for what
        was checked for another plan."""
        if not isinstance(feeds, Feeds):
            return self._feeds.checked(feeds)
        if feeds.check is not self._feeds:
            raise InputError("feeds: they were checked for another plan, or in another session")
        return feeds

    def replay(
        self, stored: Mapping[str, Array], outputs: tuple[str, ...] | None = None
    ) -> dict[str, Array]:
        """Replay the plan once with feeds that are checked; bring back these `outputs`, or all.
        InputError, before anything runs, for the name of none."""
        results: dict[str, Array] = {}
        phase = self.runs % len(self._phases)
        steps = self._phases[phase] if outputs is None else self._bringing(phase, outputs)
        try:
            for step in steps:
                step(stored, results)
        except BaseException:
            self._abandon()
            raise
        self.runs += 1
        if outputs is None:
            return results
        # Indices that choose a copy are read in any case, and what has no bytes costs nothing.
        return {name: found for name, found in results.items() if name in outputs}

    def _bringing(self, phase: int, outputs: tuple[str, ...]) -> list[Step]:
        """The steps of a phase, but for those that read other outputs: nothing waits for them."""
        found = self._some.get((phase, outputs))
        if found is None:
            known = {t.name for t in self.plan.graph.outputs}
            if unknown := [n for n in outputs if n not in known]:
                names = ", ".join(sorted(known))
                raise InputError(f"no output is called {shown(unknown[0])}; the graph's: {names}")
            others = known.difference(outputs)
            steps = [s for s in self._phases[phase] if self._fetches.get(s) not in others]
            found = self._some[phase, outputs] = steps
        return found

    def _abandon(self) -> None:
        """Back to what the proof begins with: nothing enqueued, no run begun."""
        heirs = self.plan.schedule.carried
        self.torn, self.runs = frozenset(s for s, last in heirs.items() if s != last), 0
        for backend in self._backends.values():
            backend.abandon()

    def close(self) -> None:
        """Wait for the devices and give the arenas back."""
        for backend in self._backends.values():
            backend.synchronise()
        for memory in self._arenas.values():
            self._owner(memory.buffer).free(memory)
        self._arenas.clear()
        self._phases.clear()
        self._some.clear()

    def _owner(self, buffer: Buffer) -> Store:
        return self._host if buffer.device == HOST else self._backends[buffer.device]

    def _bind_all(self, external: Mapping[str, Memory]) -> None:
        """Arenas, and the closures of every phase."""
        memory = self.plan.memory
        brought = _brought(self.plan, external)
        for b in memory.buffers.values():
            if not b.external:
                self._arenas[b.name] = self._owner(b).allocate(b)
        self._memory = PlanMemory(memory, {**brought, **self._arenas})
        slots = [len(r.offsets) for r in memory.regions.values()]
        self._phases = [self._bind(k) for k in range(lcm(*slots) if slots else 1)]

    def _bind(self, phase: int) -> list[Step]:
        """The closures of one phase, launches of one stream taken together."""
        bound: list[Bound] = []
        runs = groupby(self.plan.schedule, key=lambda c: (c.do is Do.LAUNCH, c.actor))
        for (is_launch, actor), commands in runs:
            if is_launch:
                launches = [self._launch(c, phase) for c in commands]
                backend = self._backends[actor.device]
                program = backend.lower(launches)
                bound.append((Do.LAUNCH, _submit(backend, actor.stream, program)))
            else:
                bound.extend((c.do, self._step(c, phase)) for c in commands)
        return self._captured(bound)

    def _captured(self, bound: list[Bound]) -> list[Step]:
        """What is enqueued between two host steps as one step, where all commands are one device's
        and that can capture. No graph where a partial copy's extent is known to the host alone, or
        where runs overlap: graphs run one after another, and drop waits for the run before."""
        enqueued = [c for c in self.plan.schedule if c.do not in HOST_STEPS]
        devices = {c.actor.device for c in enqueued}
        backend = self._backends[devices.pop()] if len(devices) == 1 else None
        partial = any(c.chosen_by is not None for c in enqueued)
        if backend is None or not backend.captures or partial or not self.ends_complete:
            return [step for _, step in bound]
        streams = sorted({c.actor.stream for c in enqueued})
        steps: list[Step] = []
        for is_host, run in groupby(bound, key=lambda b: b[0] in HOST_STEPS):
            parts = [step for _, step in run]
            steps += parts if is_host else [_replay(backend.capture(streams, _all(parts)))]
        return steps

    def _step(self, c: Command, phase: int) -> Step:
        if c.do in HOST_STEPS:
            return self._host_step(c, phase)
        backend, stream = self._backends[c.actor.device], c.actor.stream
        event = f"{self._prefix}{c.event}"
        if c.do is Do.RECORD:
            return lambda feeds, results: backend.record(stream, event)
        if c.do is Do.WAIT:
            owner = self._recorders[c.event]
            if backend.is_synchronous and owner is not backend:
                # It has no queue that could be held up: its commands run when the host gets there.
                return lambda feeds, results: owner.synchronise(event=event)
            return lambda feeds, results: backend.wait(stream, event)
        at = self._memory.at
        source, target = at(c.reads[0].value, phase), at(c.writes[0].value, phase)
        first, last = c.reads[0].start, c.reads[0].stop
        begin, end = (source[0], source[1] + first), (target[0], target[1] + c.writes[0].start)
        if c.chosen_by is not None:
            return self._partial_copy(c, end, begin)
        return lambda feeds, results: backend.copy(stream, end, begin, last - first)

    def _partial_copy(self, c: Command, into: tuple[Memory, int], out: tuple[Memory, int]) -> Step:
        """A copy per run of neighbouring slices that the indices, which the host has read, name."""
        backend, stream = self._backends[c.actor.device], c.actor.stream
        t, chosen_by = self.plan.tensor(c.node or ""), c.chosen_by or ""

        def step(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
            ids = (results if chosen_by in results else self._looked_at)[chosen_by]
            for a, b in slice_runs(ids, t.shape[0], t.nbytes):
                backend.copy(stream, (into[0], into[1] + a), (out[0], out[1] + a), b - a)

        return step

    def _host_step(self, c: Command, phase: int) -> Step:
        if c.do is Do.HOST_SYNC:
            return self._sync(c)
        if c.do is Do.HOST_FREE:
            return _nothing  # the bytes stay ours until close()
        tensor = self.plan.graph[c.node or ""]
        if not tensor.nbytes:
            return _empty(tensor) if c.do is Do.HOST_READ else _nothing
        if c.do is Do.HOST_WRITE:
            memory, offset = self._memory.at(c.writes[0].value, phase)
            return _feed(self._owner(memory.buffer), memory, offset, tensor)
        memory, offset = self._memory.at(c.reads[0].value, phase)
        fetch = _fetch(self._owner(memory.buffer), memory, offset + c.reads[0].start, tensor)
        if not tensor.is_output:
            return lambda feeds, results: fetch(feeds, self._looked_at)
        if tensor.name not in self._choosing:
            self._fetches[fetch] = tensor.name
        return fetch

    def _sync(self, c: Command) -> Step:
        if c.waits_for is None and c.event is None:
            return _sync_all(list(self._backends.values()))
        if c.waits_for is not None:
            backend, stream = self._backends[c.waits_for.device], c.waits_for.stream
            return lambda feeds, results: backend.synchronise(stream)
        owner, event = self._recorders[c.event], f"{self._prefix}{c.event}"
        return lambda feeds, results: owner.synchronise(event=event)

    @cached_property
    def _recorders(self) -> dict[str | None, Backend]:
        """The backend of the one device that records an event."""
        marks = (k for k in self.plan.schedule if k.do is Do.RECORD)
        return {k.event: self._backends[k.actor.device] for k in marks}

    @cached_property
    def _choosing(self) -> frozenset[str | None]:
        """Names of the indices that say which slices a copy brings."""
        return frozenset(k.chosen_by for k in self.plan.schedule)

    def _launch(self, c: Command, phase: int) -> Launch:
        t = self.plan.graph[c.node or ""]
        return self._memory.launch(c, t, phase, dict(self._scratch(c, t, phase)))

    def _scratch(self, c: Command, t: Tensor, phase: int) -> Iterator[tuple[str, Scratch]]:
        """The bytes for each need of the backend that the command declares."""
        needs = self._backends[c.actor.device].spec.needs(t)
        if not needs:
            return
        made, held = ({a.value: a.stop for a in found} for found in (c.writes, c.reads))
        for need in needs:
            name = scratch(t, need, c.actor)
            if need.nbytes <= max(made.get(name, -1), held.get(name, -1)):
                memory, offset = self._memory.at(name, phase)
                yield need.key, Scratch(name, memory, offset, need.nbytes, name in held)


def _brought(plan: Plan, external: Mapping[str, Memory]) -> dict[str, Memory]:
    """The memory of every buffer that is not the plan's own."""
    found: dict[str, Memory] = {}
    for b in plan.memory.buffers.values():
        held = external.get(b.name) if b.external else None
        if held is not None and held.buffer.nbytes >= b.nbytes and held.buffer.device == b.device:
            found[b.name] = held
        elif b.external:
            got = "nothing" if held is None else f"{held.buffer.nbytes} on {held.buffer.device}"
            raise InputError(f"{b.name!r}: expected {b.nbytes} bytes on {b.device}, got {got}")
    return found


def _nothing(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
    """A host step that needs no work here."""


def _empty(tensor: Tensor) -> Step:
    def step(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
        results[tensor.name] = np.zeros(tensor.shape, tensor.dtype.np)

    return step


def _all(steps: Sequence[Step]) -> Callable[[], None]:
    """Enqueue every step; none of them looks at feeds or results."""

    def enqueue() -> None:
        for step in steps:
            step({}, {})

    return enqueue


def _replay(again: Callable[[], None]) -> Step:
    return lambda feeds, results: again()


def _submit(backend: Backend, stream: int, program: Program) -> Step:
    return lambda feeds, results: backend.submit(stream, program)


def _sync_all(backends: list[Backend]) -> Step:
    def step(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
        for backend in backends:
            backend.synchronise()

    return step


def _feed(owner: Store, memory: Memory, offset: int, tensor: Tensor) -> Step:
    name, window = tensor.name, _window(owner, memory, offset, tensor)

    def step(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
        if window is not None:
            window[...] = feeds[name]
        else:
            owner.write(memory, offset, feeds[name])

    return step


def _window(owner: Store, memory: Memory, offset: int, tensor: Tensor) -> Array | None:
    """A tensor's own bytes in its type and storage shape, where the host can reach them: fewer
    calls than a write or a read, which every token makes a dozen times."""
    small = tensor.is_contiguous and tensor.nbytes < owner.copies_from
    held = owner.window(memory, offset, tensor.nbytes) if small else None
    if held is None:
        return None
    return held.view(tensor.dtype.np).reshape(storage_shape(tensor.shape, tensor.dtype))


def _fetch(owner: Store, memory: Memory, offset: int, tensor: Tensor) -> Step:
    name, nbytes, kind = tensor.name, tensor.nbytes, tensor.dtype.np
    shape = storage_shape(tensor.shape, tensor.dtype)
    plain, window = not tensor.dtype.is_block, _window(owner, memory, offset, tensor)

    def step(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
        if window is not None:
            results[name] = window.copy()
        else:
            results[name] = owner.read(memory, offset, nbytes).view(kind).reshape(shape)

    def strided(feeds: Mapping[str, Array], results: dict[str, Array]) -> None:
        """The gaps of a view were read too."""
        held = raw_view(replace(tensor, offset=0), owner.read(memory, offset, nbytes))
        results[name] = held if plain else np.ascontiguousarray(held).reshape(shape)

    return step if tensor.is_contiguous else strided
