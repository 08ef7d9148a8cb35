"""What is enqueued is what was proved: the same commands, in the same order, on the same bytes.

Every call that the executor makes of a backend is written down and held against the proved list,
command by command and byte by byte (what a launch is given to read, to write and beside), for every
model graph on the CPU, on simulated devices and on the stand-in for a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from test_cuda_models import feeds_of, weights_of
from test_models_plans import GRAPHS

from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Backend, Memory, Ref, Scratch
from ggraph.backends.sim import Machine, SimBackend, SimHost, sim_spec
from ggraph.device import HOST
from ggraph.execute import Executor
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Access, Do, Plan, VerifiedPlan
from ggraph.tensor import Kind

Call = tuple[object, ...]
Range = tuple[str, int, int]  # bytes of a buffer


class Watched(Backend):
    """A backend whose calls are written down; it offers no windows, so that the host's accesses are
    calls as well."""

    captures = False

    def __init__(self, name: str, inner: Any, log: list[Call]) -> None:
        self.name, self.inner, self.log = name, inner, log
        self.allocate, self.free = inner.allocate, inner.free
        for further in ("spec", "lower", "capture", "captures"):  # the host's memory has none
            if hasattr(inner, further):
                setattr(self, further, getattr(inner, further))

    def write(self, memory: Memory, offset: int, data: Any) -> None:
        self.log.append(("write", memory.buffer.name, offset, data.nbytes))
        self.inner.write(memory, offset, data)

    def read(self, memory: Memory, offset: int, nbytes: int) -> Any:
        self.log.append(("read", memory.buffer.name, offset, nbytes))
        return self.inner.read(memory, offset, nbytes)

    def submit(self, stream: int, program: Any) -> None:
        for x in program.launches:
            made = [s for s in x.scratch.values() if not s.ready]
            held = [s for s in x.scratch.values() if s.ready]
            writes = merged([*shown(x.result), *map(room, made)])
            reads = merged([*(r for s in x.sources for r in shown(s)), *map(room, held)])
            self.log.append(("launch", self.name, stream, x.command.node, reads, writes))
        self.inner.submit(stream, program)

    def copy(self, stream: int, target: Any, source: Any, nbytes: int) -> None:
        ends = (source[0].buffer.name, source[1], target[0].buffer.name, target[1])
        self.log.append(("copy", self.name, stream, *ends, nbytes))
        self.inner.copy(stream, target, source, nbytes)

    def record(self, stream: int, event: str) -> None:
        self.log.append(("record", self.name, stream, event.partition("/")[2]))
        self.inner.record(stream, event)

    def wait(self, stream: int, event: str) -> None:
        self.log.append(("wait", self.name, stream, event.partition("/")[2]))
        self.inner.wait(stream, event)

    def synchronise(self, stream: int | None = None, event: str | None = None) -> None:
        name = None if event is None else event.partition("/")[2]
        self.log.append(("sync", self.name, stream, name))
        self.inner.synchronise(stream, event)


def shown(ref: Ref) -> list[Range]:
    """The bytes that a backend is given for a tensor."""
    base = ref.offset - ref.tensor.offset
    name = ref.memory.buffer.name
    return [(name, base + a, base + b) for a, b in ref.tensor.byte_ranges()]


def room(s: Scratch) -> Range:
    """The bytes that a launch is given beside its operands."""
    return s.memory.buffer.name, s.offset, s.offset + s.nbytes


def merged(ranges: list[Range]) -> tuple[Range, ...]:
    """The same bytes as few ranges, in order."""
    found: list[Range] = []
    for name, start, stop in sorted(ranges):
        if found and found[-1][0] == name and start <= found[-1][2]:
            found[-1] = (name, found[-1][1], max(found[-1][2], stop))
        elif start < stop:
            found.append((name, start, stop))
    return tuple(found)


def proved(plan: Plan, run: int, devices: list[str]) -> Iterator[Call]:
    """The calls that the proved list stands for, in its order."""
    recorder = {c.event: c.actor.device for c in plan.schedule if c.do is Do.RECORD}

    def at(a: Access) -> tuple[str, int]:
        region = plan.memory.regions[a.value]
        return region.buffer, region.offsets[run % len(region.offsets)] + a.start

    def ranges(accesses: tuple[Access, ...]) -> tuple[Range, ...]:
        return merged([(*at(a), at(a)[1] + a.stop - a.start) for a in accesses])

    for c in plan.schedule:
        who = (c.actor.device, c.actor.stream)
        if c.do is Do.LAUNCH:
            yield "launch", *who, c.node, ranges(c.reads), ranges(c.writes)
        elif c.do is Do.COPY:
            (r,), (w,) = c.reads, c.writes
            yield "copy", *who, *at(r), *at(w), r.stop - r.start
        elif c.do in (Do.RECORD, Do.WAIT):
            yield c.do.value, *who, c.event
        elif c.do is Do.HOST_SYNC:
            if c.event is not None:
                yield "sync", recorder[c.event], None, c.event
            elif c.waits_for is not None:
                yield "sync", c.waits_for.device, c.waits_for.stream, None
            else:
                yield from (("sync", d, None, None) for d in devices)
        for a in c.writes if c.do is Do.HOST_WRITE else ():
            yield "write", *at(a), a.stop - a.start
        for a in c.reads if c.do is Do.HOST_READ else ():
            yield "read", *at(a), a.stop - a.start


def bound(
    verified: VerifiedPlan, backends: Mapping[str, Any]
) -> tuple[Executor, list[Call], list[str]]:
    """An executor over watched backends with random weights, and the log of its calls."""
    log: list[Call] = []
    watched = {name: Watched(name, b, log) for name, b in backends.items()}
    plan, external, weights = verified.plan, {}, weights_of(verified)
    for t in (*plan.graph.leaves(Kind.WEIGHT), *plan.graph.leaves(Kind.STATE)):
        buffer = plan.memory.buffers[plan.memory.regions[t.name].buffer]
        external[t.name] = backends[buffer.device].allocate(buffer)
        raw = weights.get(t.name, np.zeros(buffer.nbytes, np.uint8))
        backends[buffer.device].write(external[t.name], 0, raw)
    executor = Executor(verified, watched, external)  # type: ignore[arg-type]
    return executor, log, [n for n in backends if n != HOST]


def cpu() -> tuple[dict[str, Any], Options]:
    return {"cpu": open_backend("cpu", threads=1)}, Options()


def sims() -> tuple[dict[str, Any], Options]:
    """Two devices of four streams that reach each other through the host alone."""
    machine = Machine()
    specs = [sim_spec(n, peer_bytes_per_s=0.0) for n in ("sim0", "sim1")]
    backends = {s.name: SimBackend(s, machine) for s in specs} | {HOST: SimHost(machine)}
    return backends, Options(streams=4, copies=2, overlap=True)


def stand_in() -> tuple[dict[str, Any], Options]:
    driver = HostDriver(1 << 32)
    cuda = CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())
    backends = {"cuda0": cuda, "cpu": open_backend("cpu", threads=1), HOST: HostMemory()}
    return backends, Options(streams=4)


def same_commands(name: str, made: Callable[[], tuple[dict[str, Any], Options]], runs: int) -> int:
    """How many calls of `runs` runs were compared; all are as proved."""
    backends, options = made()
    specs = [b.spec for n, b in backends.items() if n != HOST]
    graph = GRAPHS[name]()
    layered = sum(any(f"blk.{i}." in t.name for t in graph) for i in range(8)) > 1
    if layered and "sim1" in backends:
        options = replace(options, layers={"sim0": 1, "sim1": 99})
    verified = make_plan(graph, specs, options)
    executor, log, devices = bound(verified, backends)
    feeds = feeds_of(verified)
    compared = 0
    for run in range(runs):
        log.clear()
        executor.run(feeds)
        assert log == list(proved(verified.plan, run, devices)), f"{name}, run {run}"
        compared += len(log)
    return compared


@pytest.mark.parametrize("name", GRAPHS)
def test_the_cpu_gets_the_proved_list(name: str) -> None:
    assert same_commands(name, cpu, 2) > 4


@pytest.mark.parametrize("name", GRAPHS)
def test_simulated_devices_get_the_proved_list(name: str) -> None:
    """Runs that overlap, inputs that rotate."""
    assert same_commands(name, sims, 3) > 4


@need_compiler
@pytest.mark.parametrize("name", GRAPHS)
def test_a_gpu_gets_the_proved_list(name: str) -> None:
    """The first run enqueues, the second one captures: both by the proved list."""
    assert same_commands(name, stand_in, 2) > 4
