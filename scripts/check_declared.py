"""Declared is done: does each op touch what its launch says, on each backend, and nothing else?

    python scripts/check_declared.py [--backend cpu] [--every 1]

Each example of each op by itself, fused ones and odd sizes included, with operands plain, computed
before, as windows on something larger (from the front, from behind, with gaps, turned), and with
the result in place of what it may replace. Each case runs twice. Between the runs every byte that
nobody declares is changed: what the operands' roots have beside the windows, what results and
scratch held before, and the rest of the pages on which buffers lie. Results must keep every bit,
and undeclared bytes must keep theirs. Each buffer ends at a page that nobody may touch, or begins
behind one (not on `sim`, whose bytes are NumPy's), and nothing is allocated while a plan runs.

Prints counts; a case is named before it runs, so that a crash has a name.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from cuda_host import COMPILER
from declared_ground import World, worlds
from program_kit import block, fed
from test_shared_operands import LARGER

from ggraph import ops
from ggraph.backends.sim import SimBackend
from ggraph.device import HOST
from ggraph.dtype import A8, F32
from ggraph.errors import GraphError, ShapeError
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import encode, to_storage
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import Buffer, MemoryMap, Plan, Region, VerifiedPlan
from ggraph.rewrite import rewrite
from ggraph.split import split
from ggraph.tensor import OPS, Arg, Array, Example, Kind, OpSpec, Tensor, apply, leaf
from ggraph.verify import verify

GAP = 3  # elements that a window leaves out


# Cases: an op's example in one form, as a graph, with storage for its leaves.

Case = tuple[str, Graph, dict[str, Array]]


def windows(name: str, arg: Arg, kind: Kind) -> Iterator[tuple[str, Tensor]]:
    """An operand of this shape as part of something larger, where its type can be cut."""
    shape = arg.shape
    if arg.dtype.is_block or arg.dtype is A8 or not shape or 0 in shape:
        return
    size = int(np.prod(shape))
    flat = leaf(kind, name, (size + 2 * GAP,), arg.dtype)
    yield "from the front", ops.view(flat, shape)
    yield "from behind", ops.view(flat, shape, start=2 * GAP)
    wide = leaf(kind, name, (*shape[:-1], shape[-1] + GAP), arg.dtype)
    yield "with gaps", ops.slice(wide, [0] * (len(shape) - 1) + [1], shape)
    if len(shape) > 1:
        tall = leaf(kind, name, (shape[0] + 2, *shape[1:]), arg.dtype)
        yield "rows", ops.narrow(tall, 0, 1, shape[0])
        turned = leaf(kind, name, (shape[1] + 1, shape[0], *shape[2:]), arg.dtype)
        axes = (1, 0, *range(2, len(shape)))
        yield "turned", ops.permute(ops.narrow(turned, 0, 0, shape[1]), *axes)


def cases(every: int) -> Iterator[Case]:
    """Every `every`-th case of all ops, and whole layers of odd sizes."""
    count = 0
    for name in sorted(n for n in OPS if n != "copy"):
        for i, example in enumerate((*OPS[name].examples, *LARGER.get(name, ()))):
            for form, sources in forms(OPS[name], example):
                count += 1
                made = None if count % every else graph_of(OPS[name], example, sources)
                if made is not None:
                    yield f"{name} {i} {form}", made, stored_of(made, example, i)
    for rows in (1, 3, 11) if every == 1 else (3,):
        graph = block(rows)
        zeros = {t.name: np.zeros(t.shape, t.dtype.np) for t in graph.leaves(Kind.STATE)}
        yield f"block {rows}", graph, {**fed(graph), **zeros}


def forms(spec: OpSpec, example: Example) -> Iterator[tuple[str, list[Tensor]]]:
    """Sources as inputs, as weights, computed, and each in turn as a window."""

    def plain(kind: Kind) -> list[Tensor]:
        return [
            leaf(Kind.STATE if n == spec.overwrites else kind, f"x{n}", a.shape, a.dtype)
            for n, a in enumerate(example.args)
        ]

    yield "inputs", plain(Kind.INPUT)
    yield "weight", [*plain(Kind.WEIGHT)[:1], *plain(Kind.INPUT)[1:]]
    computed = [
        ops.scale(t, 1.0, name=f"made{n}") if t.dtype is F32 and t.shape else t
        for n, t in enumerate(plain(Kind.INPUT))
    ]
    if any(not t.is_leaf for t in computed):
        yield "computed", computed
    for n, arg in enumerate(example.args):
        if n != spec.overwrites:
            for how, window in windows(f"x{n}", arg, Kind.INPUT):
                sources = plain(Kind.INPUT)
                sources[n] = window
                yield f"source {n} {how}", sources


def graph_of(spec: OpSpec, example: Example, sources: list[Tensor]) -> Graph | None:
    """The op and a reader of what it overwrites; None for what its rule refuses."""
    try:
        y = apply(spec.name, *sources, name="y", **example.attrs)
        if y.is_view or y.overwritten is not None:
            y = ops.cont(y, name="read")
        return Graph.of([y])
    except (ShapeError, GraphError):
        return None


def stored_of(graph: Graph, example: Example, seed: int) -> dict[str, Array]:
    """Storage of every leaf, filled as the example asks; states too."""
    rng = np.random.default_rng(seed)
    fills = {f"x{n}": a for n, a in enumerate(example.args)}
    found = {}
    for t in graph:
        if t.is_leaf:
            arg = replace(fills[t.name], shape=t.shape)
            if arg != fills[t.name] and t.dtype.is_float:
                arg = replace(arg, fill="normal")
            found[t.name] = to_storage(examples.values(arg, rng), t)
    for t in graph.nodes:  # what values mean may hang on their place: parents come before
        for s in t.sources:
            if s.is_view and s.root.is_leaf and not s.dtype.is_block and s.size:
                held = found[s.root.name] = found[s.root.name].copy()
                shown: Array = np.ndarray(s.shape, s.dtype.np, held, s.offset, s.strides)
                values = examples.values(replace(fills[s.root.name], shape=s.shape), rng)
                shown[...] = encode(values, s.dtype).reshape(s.shape)
    return found


def elsewhere(graph: Graph, stored: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """The leaves with other bytes wherever no source of any launch shows them."""
    shown = {t.name: np.zeros(t.nbytes, bool) for t in graph if t.is_leaf}
    for t in graph.nodes:
        for s in () if t.is_view else t.sources:
            if s.root.name in shown:
                for start, stop in s.byte_ranges(1 << 20):
                    shown[s.root.name][start:stop] = True
    found = {}
    for name, array in stored.items():
        raw = np.frombuffer(array.tobytes(), np.uint8).copy()
        raw[~shown[name]] = rng.integers(0, 256, int((~shown[name]).sum()), np.uint8)
        found[name] = raw.view(array.dtype).reshape(array.shape)
    return found


# Plans: each value in a buffer of its own, or results in place of what they may replace.


def planned(graph: Graph, world: World, in_place: bool) -> VerifiedPlan | None:
    """The verified plan; None where nothing can be put in place."""
    specs = [world.device.spec]
    schedule = order(split(place(rewrite(graph, specs), specs, ())))
    regions: dict[str, Region] = {}
    buffers: dict[str, Buffer] = {}
    readers = Counter(a.value for c in schedule for a in c.reads)
    replaced = 0
    for v in schedule.values.values():
        over = v.same_as
        fits = [
            o for o in v.may_replace if schedule.values[o].nbytes == v.nbytes and readers[o] == 1
        ]
        if over is None and in_place and fits and v.nbytes:
            over, replaced = fits[-1], replaced + 1
        if over is not None:
            regions[v.name] = replace(regions[over], nbytes=v.nbytes)
            continue
        regions[v.name] = Region(v.name, (0,), v.nbytes)
        alignment = specs[0].alignment
        buffers[v.name] = Buffer(v.name, v.device, v.nbytes, alignment, v.external)
    if in_place and not replaced:
        return None
    return verify(Plan(schedule, MemoryMap("flat", buffers, regions)))


class Fault(Exception):
    """A byte that nobody declared was read or written."""


def bound(world: World, verified: VerifiedPlan, stored: dict[str, Array]) -> Executor:
    """An executor whose weights and states hold these bytes."""
    external = {}
    for t in verified.plan.graph:
        if t.is_leaf and t.kind in (Kind.WEIGHT, Kind.STATE):
            buffer = verified.plan.memory.buffers[t.name]
            raw = np.frombuffer(stored[t.name].tobytes(), np.uint8)
            if t.kind is Kind.WEIGHT:
                external[t.name] = world.device.load(buffer, t, raw)
            else:
                external[t.name] = world.device.allocate(buffer)
                world.device.write(external[t.name], 0, raw)
    return Executor(verified, world.backends, external)


def outcome(
    world: World, verified: VerifiedPlan, stored: dict[str, Array], rng: np.random.Generator
) -> dict[str, bytes]:
    """Outputs and states after a run on memory that was disturbed. Fault: see there."""
    ground = world.ground
    ground.clear()
    held = bound(world, verified, stored)
    owned = {id(m.handle) for m in held._arenas.values()}
    for memory in held._arenas.values():
        if world.name == "cpu" and not isinstance(world.device, SimBackend):
            memory.handle[:] = rng.integers(0, 256, memory.handle.size, np.uint8)
        elif world.name == "cuda0" and memory.buffer.device != HOST:
            noise = rng.integers(0, 256, memory.buffer.nbytes, np.uint8)
            world.device.write(memory, 0, noise)
    assert owned or not held._arenas
    ground.disturb(rng)
    around = ground.around()
    ground.running = True
    try:
        inputs = verified.plan.graph.leaves(Kind.INPUT)
        out = held.run({t.name: stored[t.name] for t in inputs})
    finally:
        ground.running = False
    if ground.around() != around:
        raise Fault("bytes around a buffer were changed")
    found = {name: a.tobytes() for name, a in out.items()}
    weights = {t.name: t for t in verified.plan.graph if t.kind is Kind.WEIGHT and t.is_leaf}
    for name, memory in held._memory.buffers.items():
        if name in weights and memory.buffer.external:
            now = world.device.read(memory, 0, memory.buffer.nbytes).tobytes()
            if now != stored[name].tobytes():
                raise Fault(f"weight {name!r} was changed")
    held.close()
    return found


def check(world: World, case: Case, seed: int) -> int:
    """How many runs of a case agreed. Fault where one did not."""
    _, graph, stored = case
    wanted: dict[str, bytes] = {}
    runs = 0
    for in_place in (False, True):
        verified = planned(graph, world, in_place)
        if verified is None:
            continue
        for changed in (False, True):
            rng = np.random.default_rng((seed, runs))
            given = elsewhere(graph, stored, rng) if changed else stored
            found = outcome(world, verified, given, rng)
            wanted = wanted or found
            if found != wanted:
                how = "bytes that nobody declares" if changed else "its place"
                raise Fault(f"the result depends on {how}{' (in place)' if in_place else ''}")
            runs += 1
    return runs


def fits(world: World, graph: Graph) -> bool:
    """Whether the backend has a kernel for all of it."""
    specs = [world.device.spec]
    return all(t.is_view or world.accepts(t) for t in rewrite(graph, specs).nodes)


def run(kind: str, every: int, only: str = "") -> Counter[str]:
    """Counts of one kind of backend; writes a line for each fault."""
    counts: Counter[str] = Counter()
    for title, world in worlds(kind):
        for n, case in enumerate(cases(every)):
            if only not in case[0] or not fits(world, case[1]):
                counts["left out"] += 1
                continue
            sys.stdout.write(f"\r{title}: {case[0]:<60}")
            sys.stdout.flush()
            try:
                counts["runs"] += check(world, case, n)
                counts["cases"] += 1
            except Fault as fault:  # told at once: whoever stops the rest has it
                counts["faults"] += 1
                sys.stdout.write(f"\r{f'{title}: {case[0]}: {fault}':<78}\n")
        world.device.close()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """All backends, or one; exits with 1 if there was a fault."""
    parser = argparse.ArgumentParser(description="declared is done")
    parser.add_argument("--backend", choices=("cpu", "cuda", "sim"), action="append")
    parser.add_argument("--every", type=int, default=1, help="of the cases, each N-th")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    wanted = parser.parse_args(argv)
    failed = False
    for kind in wanted.backend or ("cpu", "cuda", "sim"):
        if kind == "cuda" and COMPILER is None:
            sys.stdout.write("cuda: left out, g++ is not installed\n")
            continue
        counts = run(kind, wanted.every, wanted.only)
        told = ", ".join(f"{n} {counts[n]}" for n in ("cases", "runs", "left out", "faults"))
        sys.stdout.write(f"\r{kind}: {told}{'':<40}\n")
        failed = failed or counts["faults"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
