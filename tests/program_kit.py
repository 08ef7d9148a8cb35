"""Flat programs taken apart: run in any order that their barriers allow, or next to guard pages.

No test is in here. As a program of its own it runs every example of every op that has a CPU kernel
with each value between two pages that nobody may touch: `python program_kit.py FORM [MUTANT]`.
"""

import ctypes
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import numpy as np
from guard_pages import guarded

from ggraph import ops
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.codegen.simd import BARRIER
from ggraph.backends.cpu.lowering.lower import LOWERINGS
from ggraph.backends.cpu.runtime.program import Flat
from ggraph.backends.protocol import Memory
from ggraph.dtype import F32, I32, I64, Q4_0
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import to_storage
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import Buffer, MemoryMap, Plan, Region, Schedule, VerifiedPlan
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.tensor import (
    Arg,
    Array,
    Example,
    Kind,
    OpSpec,
    Tensor,
    apply,
    input,
    leaf,
    state,
    weight,
)
from ggraph.verify import verify

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Order = Callable[[int], Sequence[int]]  # of the threads between two barriers


def run_parts(flat: Flat, threads: int, turn: Order) -> None:
    """Run a program as one legal order of its threads: between two barriers one thread after the
    other, each as far as the barrier."""
    segment: list[Array] = []
    for words in flat.code:
        segment.append(words)
        if words[1] & BARRIER or words is flat.code[-1]:
            _segment(segment, threads, turn)
            segment = []
    _segment(segment, threads, turn)


def _segment(segment: list[Array], threads: int, turn: Order) -> None:
    for thread in turn(threads):
        for words in segment:
            KERNEL(int(words[0]))(words.ctypes.data, thread, threads)


def mutated(flat: Flat, change: Callable[[Array], None]) -> Flat:
    """The program with its words changed."""
    code = flat.code.copy()
    change(code)
    return replace(flat, code=code)


def block(rows: int = 3, width: int = 64, slots: int = 40) -> Graph:
    """A layer with all that needs bytes beside operands: experts, attention, a cache of blocks, a
    gated unit of two products."""
    heads, dim = 2, width // 2
    x, mask = input("x", (rows, width)), input("mask", (rows, slots))
    at, positions = input("at", (rows,), I64), input("positions", (rows,), I32)
    norm = ops.mul(ops.rms_norm(x, eps=1e-5), weight("norm", (width,)))
    q, k, v = (ops.mul_mat(weight(f"w{n}", (width, width), Q4_0), norm) for n in "qkv")
    turned = ops.rope(ops.reshape(k, rows, heads, dim), positions, n_rot=dim)
    keys = ops.set_rows(state("keys", (slots, heads, dim)), turned, at)
    held = state("values", (slots, heads, dim))
    values = ops.set_rows(held, ops.reshape(v, rows, heads, dim), at)
    asked = ops.rope(ops.reshape(q, rows, heads, dim), positions, n_rot=dim)
    mixed = ops.flash_attn(asked, keys, values, mask, scale=dim**-0.5)
    h = ops.add(x, ops.mul_mat(weight("wo", (width, width), Q4_0), ops.reshape(mixed, rows, width)))
    experts = weight("we", (4, width, width), Q4_0)
    chosen = ops.mul_mat_id(experts, ops.reshape(h, rows, 1, width), input("ids", (rows, 1), I32))
    inner = 96
    gate, up = (ops.mul_mat(weight(n, (inner, width), Q4_0), norm) for n in ("gate", "up"))
    unit = ops.mul_mat(weight("down", (width, inner), Q4_0), ops.swiglu(gate, up))
    y = ops.add(ops.reshape(chosen, rows, width), ops.swiglu(h, unit))
    return Graph.of({"y": ops.mul_mat(weight("head", (width, width)), y)})


def fed(graph: Graph, seed: int = 1) -> dict[str, Array]:
    """Storage of all leaves but states."""
    rng = np.random.default_rng(seed)
    fills = {"at": "ids:40", "positions": "ids:40", "ids": "ids:4", "mask": "mask"}

    def stored(t: Tensor) -> Array:
        arg = Arg(t.shape, t.dtype, fills.get(t.name, "normal"))
        return to_storage(examples.values(arg, rng), t)

    return {t.name: stored(t) for t in graph if t.is_leaf and t.kind is not Kind.STATE}


def planned(graph: Graph, backend: CpuBackend) -> Schedule:
    """The schedule of the graph as written, on this CPU."""
    spec = backend.spec
    return order(split(place(rewrite(graph, [spec]), [spec], ())))


def apart(schedule: Schedule) -> VerifiedPlan:
    """Each value in a buffer of its own, but for those that overwrite another."""
    regions: dict[str, Region] = {}
    buffers: dict[str, Buffer] = {}
    for v in schedule.values.values():
        if v.same_as is not None:
            regions[v.name] = regions[v.same_as]
            continue
        regions[v.name] = Region(v.name, (0,), v.nbytes)
        buffers[v.name] = Buffer(v.name, v.device, v.nbytes, 64, v.external)
    return verify(Plan(schedule, MemoryMap("flat", buffers, regions)))


class Guarded(CpuBackend):
    """A CPU whose buffers lie between guard pages, with a canary in what is left of theirs."""

    at_end = True

    def allocate(self, buffer: Buffer) -> Memory:
        return Memory(buffer, guarded(buffer.nbytes, buffer.alignment, self.at_end))


def executor(verified: VerifiedPlan, backend: CpuBackend, given: dict[str, Array]) -> Executor:
    """The plan with its weights loaded and its states zero."""
    external = {}
    for t in verified.plan.graph:
        if t.is_leaf and t.kind in (Kind.WEIGHT, Kind.STATE):
            buffer = verified.plan.memory.buffers[t.name]
            stored = given.get(t.name)
            made = backend.allocate(buffer) if stored is None else None
            external[t.name] = made or backend.load(buffer, t, given[t.name])
    return Executor(verified, {"cpu": backend}, external)


def cases(
    names: Container[str] = LOWERINGS,
) -> Iterator[tuple[str, Graph, dict[str, Array]]]:
    """Every example of these ops (those with a CPU kernel), operands as weights and as inputs."""
    for spec, i, example in examples.every():
        if spec.name in names:
            for kind in (Kind.INPUT, Kind.WEIGHT):
                graph = _example(spec, example, kind)
                if graph is not None:
                    rng = np.random.default_rng(i)
                    args = {chr(ord("a") + n): a for n, a in enumerate(example.args)}
                    given = {
                        t.name: to_storage(examples.values(args[t.name], rng), t)
                        for t in graph
                        if t.is_leaf and t.kind is not Kind.STATE
                    }
                    yield f"{spec.name} {i} {kind.value}", graph, given
    for rows in (1, 3, 11):
        graph = block(rows)
        yield f"block {rows}", graph, fed(graph)


def _example(spec: OpSpec, example: Example, kind: Kind) -> Graph | None:
    first = spec.overwrites if spec.overwrites is not None else -1
    sources: list[Tensor] = [
        leaf(Kind.STATE if n == first else kind if n == 0 else Kind.INPUT, chr(ord("a") + n),
             a.shape, a.dtype)
        for n, a in enumerate(example.args)
    ]  # fmt: skip
    y = apply(spec.name, *sources, name="y", **example.attrs)
    out = y if y.overwritten is None else ops.cont(y, name="read")
    return Graph.of([out]) if y.dtype is F32 or y.overwritten is None else None


def main(form: str, mutant: str = "") -> None:
    """Run all cases; each is named before it runs, so that a crash has a name."""
    count = 0
    for exact in (False, True):
        backends = []
        for threads in (1, 2, 4):
            plain = open_cpu("cpu", threads=threads, exact=exact)
            backends.append(Guarded(plain.spec, plain.pool, exact))
            backends[-1].at_end = form == "end"
            if mutant:
                _spoil(backends[-1], MUTANTS[mutant])
        for title, graph, given in cases():
            verified = apart(planned(graph, backends[0]))  # which knows of no threads
            for backend in backends:
                sys.stdout.write(f"{title} {backend.pool.threads} {exact}\n")
                sys.stdout.flush()
                bound = executor(verified, backend, given)
                bound.run({t.name: given[t.name] for t in graph.leaves(Kind.INPUT)})
                bound.close()
                count += 1
        for backend in backends:
            backend.close()
    sys.stdout.write(f"cases {count}\n")


def _spoil(backend: CpuBackend, change: Callable[[Array], None]) -> None:
    run = backend.pool.run

    def spoilt(program: Flat) -> None:
        run(mutated(program, change))

    backend.pool.run = spoilt  # type: ignore[method-assign]  # a mutant, seen by every caller


def _further(code: Array) -> None:
    """Each instruction one row further than it was told: `m` of what has x, y and m first."""
    code[:, 2 + 2] += 1


MUTANTS: dict[str, Callable[[Array], None]] = {"one row further": _further}

if __name__ == "__main__":
    main(*sys.argv[1:])
