"""Session: weights, states, and one plan per shape bucket, replayed.

A plan is made once per key and replayed from then on; a run with a known key builds no graph and
plans nothing, which `plans_made` lets a test prove. Weights are loaded once and shared by all
plans; states (the KV cache) live as long as the session.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Backend, Memory
from ggraph.device import HOST
from ggraph.errors import InputError, ModelError
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Buffer, VerifiedPlan
from ggraph.tensor import Array, Kind, Tensor

WeightSource = Callable[[Tensor], Array]


class Session:
    """Runs graphs on `backends` (device name -> backend, in priority order).

    One run at a time: a second thread that calls `run` waits for the first.
    """

    def __init__(self, backends: Mapping[str, Backend], options: Options | None = None) -> None:
        if not any(name != HOST for name in backends):
            raise InputError("a session needs at least one device")
        self.backends = dict(backends)
        self.options = options or Options()
        self.plans_made = 0
        self.plan_seconds = 0.0
        self.load_seconds = 0.0
        self._external: dict[str, Memory] = {}
        self._executors: dict[Hashable, Executor] = {}
        self._latest: Executor | None = None
        self._verified: dict[Hashable, VerifiedPlan] = {}
        self._lock = threading.RLock()

    @property
    def replays(self) -> bool:
        """Whether a device captures plans, so that a longer plan costs no more to start."""
        return any(hasattr(b, "capture") for b in self.backends.values())

    def prepare(
        self, key: Hashable, build: Callable[[], Graph], weights: WeightSource
    ) -> VerifiedPlan:
        """The verified plan for `key`; `build` is called only the first time.

        `weights(tensor)` gives the raw storage of a weight; it is asked once per weight's name,
        whichever plan needs it first, so models that share weights must share their names.
        """
        with self._lock:
            if key not in self._executors:
                self._make(key, build(), weights)
            return self._verified[key]

    def run(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Replay the plan of `key`. InputError when nothing was prepared under it."""
        with self._lock:
            executor = self._executors.get(key)
            if executor is None:
                raise InputError(f"no plan was prepared for {key!r}")
            if executor is not self._latest and not (self._latest or executor).ends_complete:
                self._settle()  # a plan's proof knows its own runs, not those of another plan
            self._latest = executor
            return executor.run(feeds)

    def read_state(self, name: str) -> Array:
        """The bytes of a state as a uint8 array (a copy)."""
        with self._lock:
            memory = self._known(name)
            self._settle()
            backend = self.backends[memory.buffer.device]
            return backend.read(memory, 0, memory.buffer.nbytes)

    def write_state(self, name: str, data: Array) -> None:
        """Replace a state's bytes; `data` must have exactly as many."""
        with self._lock:
            memory = self._known(name)
            if data.nbytes != memory.buffer.nbytes:
                raise InputError(
                    f"state {name!r}: expected {memory.buffer.nbytes} bytes, got {data.nbytes}"
                )
            self._settle()
            self.backends[memory.buffer.device].write(memory, 0, data)

    def close(self) -> None:
        """Give all memory back; the session cannot run any more."""
        with self._lock:
            for executor in self._executors.values():
                executor.close()
            for memory in self._external.values():
                self.backends[memory.buffer.device].free(memory)
            self._executors.clear()
            self._external.clear()
            for backend in self.backends.values():
                backend.close()

    def _settle(self) -> None:
        """Wait for everything that was enqueued."""
        for backend in self.backends.values():
            backend.synchronise()

    def _known(self, name: str) -> Memory:
        memory = self._external.get(name)
        if memory is None:
            raise InputError(f"no state {name!r}; known: {', '.join(sorted(self._external))}")
        return memory

    def _make(self, key: Hashable, graph: Graph, weights: WeightSource) -> None:
        begun = time.perf_counter()
        specs = [b.spec for n, b in self.backends.items() if n != HOST]
        verified = make_plan(graph, specs, self.options)
        planned = time.perf_counter()
        self._load(verified, weights)
        self._executors[key] = Executor(verified, self.backends, self._external)
        self._verified[key] = verified
        self.plans_made += 1
        self.plan_seconds += planned - begun
        self.load_seconds += time.perf_counter() - planned

    def _load(self, verified: VerifiedPlan, weights: WeightSource) -> None:
        """Memory for the plan's weights and states that no earlier plan has brought in."""
        plan = verified.plan
        leaves: Sequence[Tensor] = (*plan.graph.leaves(Kind.WEIGHT), *plan.graph.leaves(Kind.STATE))
        for t in leaves:
            buffer = plan.memory.buffers[plan.memory.regions[t.name].buffer]
            held = self._external.get(t.name)
            if held is None:
                self._external[t.name] = self._bring_in(buffer, t, weights)
            elif (held.buffer.nbytes, held.buffer.device) != (buffer.nbytes, buffer.device):
                raise ModelError(
                    f"{t.name!r} is {buffer.nbytes} bytes on {buffer.device} in this plan, but "
                    f"{held.buffer.nbytes} on {held.buffer.device} in an earlier one"
                )

    def _bring_in(self, buffer: Buffer, t: Tensor, weights: WeightSource) -> Memory:
        backend = self.backends[buffer.device]
        if t.kind is Kind.WEIGHT:
            return backend.load(buffer, t, weights(t))
        memory = backend.allocate(buffer)
        if not isinstance(backend, HostMemory):  # which is zero, and costs pages only when used
            backend.write(memory, 0, np.zeros(buffer.nbytes, np.uint8))
        return memory
