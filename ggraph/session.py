"""Session: weights, states, and one plan per shape bucket, replayed.

A plan is made once per key and replayed from then on: `run` builds no graph and plans nothing,
which `plans_made` lets a test prove. Weights are loaded once and shared by all plans; states (the
KV cache) live as long as the session. What one name means is fixed by the first plan that has it.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ggraph.arrays import (
    Feeds,
    Weights,
    is_key,
    output_names,
    row_bytes,
    row_places,
    state_storage,
    step_feeds,
    weight_source,
    weight_storage,
)
from ggraph.backends.host import PAGE, HostMemory, parted
from ggraph.backends.protocol import Backends, Memory
from ggraph.device import check_backends
from ggraph.env import uncollected
from ggraph.errors import BackendError, InputError, ModelError, shown
from ggraph.execute import Executor
from ggraph.formats.checkpoint import RawTensor
from ggraph.graph import Graph, first_difference
from ggraph.lazy import lazy
from ggraph.ops.copies import slice_runs
from ggraph.pipeline import Options, in_numpy, make_plan
from ggraph.place import Pin
from ggraph.plan import Buffer, VerifiedPlan
from ggraph.tensor import Array, Kind, Tensor

if TYPE_CHECKING:
    import logging
else:
    logging = lazy("logging")

LOG = "ggraph"  # the name of the log
Some = tuple[str, ...] | None  # names, or all


class Session:
    """Runs graphs on `backends` (device name -> backend, in priority order; "host": a store).

    One run at a time: a second thread that calls `run` waits for the first. A call that raises
    leaves the session as it was, but for a run that fails half-way through its states: then every
    further call raises BackendError with the cause. A run that is interrupted (Ctrl-C) leaves its
    states half written, too, and the session open to whoever writes them or begins anew.
    """

    def __init__(self, backends: Backends, options: Options | None = None) -> None:
        check_backends(backends)
        if not isinstance(options, Options | None):
            raise InputError(f"a session takes Options, got {shown(options)}")
        self._given = dict(backends)
        self.backends = parted(backends)[0]
        self.options = options or Options()
        self.plans_made = 0
        self.plan_seconds = 0.0
        self.load_seconds = 0.0
        self._external: dict[str, Memory] = {}
        self._leaves: dict[str, Tensor] = {}  # what the external memory holds
        self._graphs: dict[Hashable, Graph] = {}  # as they were built
        self._failure = ""
        self._told: set[str] = set()  # ops that were said to have no kernel
        self._executors: dict[Hashable, Executor] = {}
        self._latest: Executor | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def replays(self) -> bool:
        """Whether a device captures plans, so that a longer plan costs no more to start."""
        return any(b.captures for b in self.backends.values())

    def __contains__(self, key: Hashable) -> bool:
        """Whether a plan was prepared under `key`: where it was, `run` may be called at once."""
        return is_key(key) and key in self._executors

    def prepare(
        self, key: Hashable, build: Graph | Callable[[], Graph], weights: Weights | None = None
    ) -> VerifiedPlan:
        """The verified plan for `key` of a graph, or of the graph that `build` makes.

        `weights` gives the storage of a weight: an array of its dtype's NumPy type in its shape,
        bytes [.., bytes of a row] for block types. It is a mapping by name, a checkpoint, or a
        function of the weight, and is asked once per name, whichever plan needs it first: models
        that share weights share their names. A key that is known gives the plan that it has.

        Raises InputError when the key is known with another graph, ModelError for a weight that is
        not what the graph says or a name that an earlier plan uses for something else, and what
        `make_plan` raises.
        """
        with self._lock, uncollected():
            self._check_whole()
            graph = build() if callable(build) else build
            if not isinstance(graph, Graph):
                raise InputError(f"{shown(key)}: expected a Graph, got {shown(graph)}")
            if not is_key(key):
                raise InputError(f"{shown(key)} is no key: expected what a dict takes as one")
            if key not in self._executors:
                self._make(key, graph, weight_source(weights))
            elif line := first_difference(self._graphs[key], graph):
                raise InputError(
                    f"{key!r} is prepared with another graph: it has {line[0]}, this one "
                    f"{line[1]}; prepare this one under a key of its own"
                )
            return self.plan(key)

    def expect(self, weights: Iterable[RawTensor]) -> None:
        """Plans will soon ask for these: where one device has all, it may begin with what takes
        long, as having memory found and files read. InputError for what is no checkpoint's."""
        given = list(weights) if isinstance(weights, Iterable) else [weights]
        for w in given:
            if not isinstance(w, RawTensor):
                raise InputError(f"expected tensors of a checkpoint, got {shown(w)}")
        if len(self.backends) == 1:
            next(iter(self.backends.values())).expect(given)

    def forget(self, key: Hashable) -> None:
        """Give a plan's memory back, but for weights and states. InputError when there is none."""
        with self._lock:
            (executor := self._executor(key)).close()
            self._latest = None if self._latest is executor else self._latest
            del self._executors[key], self._graphs[key]

    def plan(self, key: Hashable) -> VerifiedPlan:
        """The plan that was prepared under `key`. InputError when there is none."""
        return self._executor(key).verified

    def inputs(self, key: Hashable) -> frozenset[str]:
        """Names of the inputs of the graph under `key`. InputError when there is none."""
        return self._executor(key).inputs

    def feeds(self, key: Hashable, feeds: Mapping[str, Array]) -> Feeds:
        """These feeds, held against the inputs of the plan of `key` ahead of a run, which has
        nothing left to check then: see `meanwhile`. Raises InputError as `run` does."""
        return self._executor(key).checked(feeds)

    def run(
        self,
        key: Hashable,
        feeds: Mapping[str, Array] | Feeds,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Replay the plan of `key`: an array per input gives one per output, or these `outputs`.

        Raises InputError, before anything runs, when nothing was prepared under the key, and for a
        missing, unknown or unfit feed, or the name of no output.
        """
        with self._lock:
            executor = self._executor(key)
            wanted = None if outputs is None else output_names(outputs)
            return self._replayed(key, executor, executor.checked(feeds).stored, wanted)

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work`, which must not run the session and which the next run does not need, done
        once by the thread that asks: while the next run that it starts computes, where that can
        begin by itself; else before it, or now. Where no run comes, it may not be done. InputError
        for what cannot be called.
        """
        if not callable(work):
            raise InputError(f"meanwhile: expected a function, got {shown(work)}")
        devices = list(self.backends.values())
        devices[0].meanwhile(work) if len(devices) == 1 else work()

    def scan(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """A loop whose body is planned once: the plan of `key` run for one step after the other.

        States are what steps carry: each step begins with what the one before left, the first with
        what the session holds, which keeps what the last leaves. A feed with one axis more than its
        input, in front, gives each step its own place of it; others are the same in all steps.
        Outputs have that axis in front. As `jax.lax.scan`. Raises InputError, before anything runs,
        as `run` does, and when no feed or feeds of unequal lengths have that axis.
        """
        with self._lock:
            executor = self._executor(key)
            steps = [executor.checked(f) for f in step_feeds(key, self._graphs[key], feeds)]
            found = [self._replayed(key, executor, s.stored) for s in steps]
            return {name: np.stack([step[name] for step in found]) for name in found[0]}

    def _replayed(
        self, key: Hashable, runs: Executor, stored: Mapping[str, Array], outputs: Some = None
    ) -> dict[str, Array]:
        """One run, of feeds that are checked; the lock is held."""
        if runs is not self._latest and not (self._latest or runs).ends_complete:
            self._settle()  # a plan's proof knows its own runs, not those of another plan
        self._latest = runs
        try:
            return runs.replay(stored, outputs)
        except Exception as error:
            if runs.torn:
                torn = ", ".join(sorted(runs.torn)[:3])
                self._failure = f"a run of {key!r} failed: {error}; {torn} may be half written"
            raise

    def read_state(self, name: str) -> Array:
        """The bytes of a state as a uint8 array (a copy)."""
        with self._lock:
            memory, _ = self._state(name)
            self._settle()
            return self.backends[memory.buffer.device].read(memory, 0, memory.buffer.nbytes)

    def write_state(self, name: str, data: Array) -> None:
        """Replace a state by storage of its shape and dtype, or by what `read_state` gave.

        Raises InputError for anything else.
        """
        with self._lock:
            memory, tensor = self._state(name)
            stored = state_storage(tensor, data)
            self._settle()
            self.backends[memory.buffer.device].write(memory, 0, stored)

    def read_rows(self, name: str, rows: Sequence[int]) -> Array:
        """The bytes of rows (of the first axis) of a state: uint8 [n, bytes of a row], a copy."""
        with self._lock:
            memory, t = self._state(name)
            at, shape = row_places(t, rows), (t.shape[0], t.strides[0])
            self._settle()
            backend = self.backends[memory.buffer.device]
            seen = backend.window(memory, 0, t.nbytes)
            if seen is not None:
                return seen.reshape(shape)[at]
            named, where = np.unique(at, return_inverse=True)
            parts = [
                backend.read(memory, a, b - a) for a, b in slice_runs(named, shape[0], t.nbytes)
            ]
            none = np.zeros(0, np.uint8)
            return np.concatenate([none, *parts]).reshape(len(named), shape[1])[where]

    def write_rows(self, name: str, rows: Sequence[int], data: Array) -> None:
        """Replace rows of a state by what `read_rows` gave; of a row that is named twice the last
        stays. InputError for another shape."""
        with self._lock:
            memory, t = self._state(name)
            at = row_places(t, rows)
            named, last = np.unique(at[::-1], return_index=True)
            latest = row_bytes(t, len(at), data)[::-1][last].reshape(-1)
            self._settle()
            backend, done = self.backends[memory.buffer.device], 0
            for a, b in slice_runs(named, t.shape[0], t.nbytes):
                backend.write(memory, a, latest[done : done + b - a])
                done += b - a

    def touch(self, name: str) -> None:
        """Have the memory of a state, as it is: the system finds pages when they are written to for
        the first time, for which a run would wait. A device's own memory is there already."""
        with self._lock:
            memory, t = self._state(name)
            self._settle()
            held = self.backends[memory.buffer.device].window(memory, 0, t.nbytes)
            if held is not None:
                held[::PAGE] |= 0

    def profile(self, key: Hashable, feeds: Mapping[str, Array], runs: int = 5) -> str:
        """Where the time of a run goes, op by op, as a table: seconds of a run, calls, name.

        The CPU alone can tell, and must have been opened for it: open_backend("cpu", profile=True);
        else InputError. The runs are real ones: states move on.
        """
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
            raise InputError(f"profile: runs={shown(runs)}: expected a whole number from 1")
        held: list[Any] = [getattr(b, "profile", None) for b in self.backends.values()]
        timed = list(filter(None, held))
        if not timed:
            raise InputError('no device can be timed: open it as open_backend("cpu", profile=True)')
        with ExitStack() as clocks:
            for p in timed:
                clocks.enter_context(p.timing())
            for _ in range(runs):
                self.run(key, feeds)
        found = (item for p in timed for item in p.times.items())
        rows = sorted(((t.seconds / runs, len(t.times) // runs, n) for (n, _), t in found))
        total = max(sum(seconds for seconds, _, _ in rows), 1e-12)
        table = [
            f"{s * 1e6:10.1f} us {100 * s / total:5.1f} % {count:5} x {name}"
            for s, count, name in reversed(rows)
        ]
        return "\n".join([f"{key!r}: {total * 1e6:.1f} us in {len(rows)} kinds of launch", *table])

    def close(self) -> None:
        """Give all memory back and close the backends: the session cannot run any more, nor can
        another with these. `with Session(..) as session:` ends with it."""
        with self._lock:
            for executor in self._executors.values():
                executor.close()
            for memory in self._external.values():
                self._free(memory)
            self._executors.clear()
            self._external.clear()
            self._leaves.clear()
            self._failure = "the session is closed"
            for owner in self._given.values():
                owner.close()

    def _free(self, memory: Memory) -> None:
        self.backends[memory.buffer.device].free(memory)

    def _settle(self) -> None:
        """Wait for everything that was enqueued."""
        for backend in self.backends.values():
            backend.synchronise()

    def _executor(self, key: Hashable) -> Executor:
        self._check_whole()
        try:
            return self._executors[key]
        except (KeyError, TypeError):  # it may have no hash
            there = shown(list(self._executors), 120)
            raise InputError(f"no plan was prepared for {shown(key)}; there are {there}") from None

    def _check_whole(self) -> None:
        if self._failure:
            raise BackendError(f"{self._failure}; open another session")

    def _state(self, name: str) -> tuple[Memory, Tensor]:
        self._check_whole()
        t = self._leaves.get(name) if isinstance(name, str) else None
        if t is None or t.kind is not Kind.STATE:
            known = sorted(n for n, x in self._leaves.items() if x.kind is Kind.STATE)
            raise InputError(f"no state {shown(name)}; known: {', '.join(known) or 'none'}")
        return self._external[name], t

    def _make(self, key: Hashable, graph: Graph, weights: Callable[[Tensor], object]) -> None:
        begun = time.perf_counter()
        specs = [b.spec for b in self.backends.values()]
        verified = make_plan(graph, specs, self._where_leaves_lie(graph))
        planned = time.perf_counter()
        self._tell(verified)
        inputs, leaves = frozenset(t.name for t in graph.leaves(Kind.INPUT)), dict(self._leaves)
        try:
            self._load(verified, weights, leaves)
            self._executors[key] = Executor(verified, self._given, self._external, inputs)
        except BaseException:
            for name in self._external.keys() - self._leaves.keys():
                self._free(self._external.pop(name))
            raise
        self._graphs[key], self._leaves = graph, leaves
        self.plans_made += 1
        self.plan_seconds += planned - begun
        self.load_seconds += time.perf_counter() - planned

    def _tell(self, verified: VerifiedPlan) -> None:
        """Log, once for each op, what runs without a kernel."""
        placed = verified.plan.schedule.splits.placement
        if new := {t.op for t in placed.without_kernel()} - self._told:
            self._told |= new
            told = "%s; Options(strict=True) refuses such plans"
            logging.getLogger(LOG).warning(told, in_numpy(placed))

    def _where_leaves_lie(self, graph: Graph) -> Options:
        """The options, with what an earlier plan has brought in pinned to where it is."""
        names = [t.name for t in graph if t.is_leaf and t.name in self._external]
        pins = [Pin(n, self._external[n].buffer.device, whole=True) for n in names]
        several = len(self.backends) > 1
        return replace(self.options, pins=(*self.options.pins, *pins)) if several else self.options

    def _load(
        self, verified: VerifiedPlan, weights: Callable[[Tensor], object], known: dict[str, Tensor]
    ) -> None:
        """Memory for the plan's weights and states that are not `known`, and become so."""
        plan = verified.plan
        for t in (*plan.graph.leaves(Kind.WEIGHT), *plan.graph.leaves(Kind.STATE)):
            buffer = plan.memory.buffers[plan.memory.regions[t.name].buffer]
            if t.name not in self._external:
                self._bring_in(buffer, t, weights)
            there = _described(known.setdefault(t.name, t), self._external[t.name].buffer)
            if (here := _described(t, buffer)) != there:
                raise ModelError(f"{t.name!r} is {here} in this plan, but {there} in another")

    def _bring_in(self, buffer: Buffer, t: Tensor, weights: Callable[[Tensor], object]) -> None:
        backend = self.backends[buffer.device]
        if t.kind is Kind.WEIGHT:
            self._external[t.name] = backend.load(buffer, t, weight_storage(t, weights(t)))
            return
        memory = self._external[t.name] = backend.allocate(buffer)
        if not isinstance(backend, HostMemory):  # which is zero, and costs pages only when used
            backend.write(memory, 0, np.zeros(buffer.nbytes, np.uint8))


def _described(t: Tensor, buffer: Buffer) -> str:
    """What a name means: kind, type and shape, and where its bytes lie."""
    return f"{t.kind.value} {t.dtype}{list(t.shape)} on {buffer.device}"
