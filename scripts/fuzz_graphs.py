"""Random graphs of all ops, run in many worlds, against the NumPy references of the graph as built.

    python scripts/fuzz_graphs.py --graphs 20000           # seeds 0 .. 19999
    python scripts/fuzz_graphs.py --seed 4711              # one graph again, in every world
    python scripts/fuzz_graphs.py --graphs 500 --first 9000 --worlds cpu

A world is a device (the CPU with 1, 2 or 4 threads, exact or as by default; one or two simulated
devices, with or without the CPU, in a random legal order; the CUDA backend on its host stand-in)
and options (rewriting or not, streams, slots, allocator). Each graph runs twice in a few worlds
that its seed draws, so that states live on. A graph that differs is made as small as it stays wrong
and printed with its seed; the exit status is then 1.

What a world may be off is what the references themselves are moved by noise as large as the ops'
tolerances (see tests/fuzz_kit.py). Worlds of one family must have the same bits: threads, streams,
memory, orders and captures change none.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / d) for d in (".", "tests")]

from cuda_host import COMPILER, HostDriver
from fuzz_kit import Grown, graph_of, grow, meaning, other_feeds

from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.protocol import Backend, Backends, Store
from ggraph.backends.sim import Machine, Random, SimBackend, SimHost, sim_spec
from ggraph.device import HOST, DeviceSpec
from ggraph.graph import Graph
from ggraph.ops.evaluate import to_logical, to_storage
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import Array, Kind, Tensor, input

SLACK = 8.0  # times what noise moved, from three draws of it
FLOOR = 2e-5  # of the largest value: rounding of sums in another order
DRAWS = 3
RUNS = 2


@dataclass(frozen=True)
class World:
    """Where and how a graph runs; `name` says it all. Those of one family have the same bits."""

    name: str
    family: str
    opened: Callable[[], Backends]
    options: Options


def _cpu(threads: int, exact: bool) -> Callable[[], dict[str, Backend]]:
    return lambda: {"cpu": open_backend("cpu", threads=threads, exact=exact)}


def _sims(count: int, beside: bool, seed: int) -> Callable[[], Backends]:
    def opened() -> Backends:
        machine = Machine(Random(seed))
        found: dict[str, Backend | Store] = {
            f"sim{i}": SimBackend(sim_spec(f"sim{i}"), machine) for i in range(count)
        }
        if beside:
            spec = DeviceSpec("cpu", "cpu", host_visible=True)
            found["cpu"] = SimBackend(spec, machine)
        return {**found, HOST: SimHost(machine)}

    return opened


def _cuda(graphs: bool) -> Callable[[], dict[str, Backend]]:
    def opened() -> dict[str, Backend]:
        driver = HostDriver()
        cuda = CudaBackend(cuda_spec("cuda0", driver), driver, graphs, Events())
        return {"cuda0": cuda, "cpu": open_backend("cpu", threads=1, exact=True)}

    return opened


def worlds(r: random.Random, graph: Graph) -> Iterator[World]:
    """All worlds, with the choices that `r` makes within each."""
    for rewrites in (False, True):
        said = "rewritten" if rewrites else "as built"
        memory = r.choice(("hb", "hb", "offline"))
        plain = Options(rewrites=rewrites, memory=memory, offline_seconds=0.002)
        for threads in (1, 2, 4):
            for exact in (False, True):
                family = f"cpu, {'exact' if exact else 'default'}, {said}"
                name = f"{family}, {threads} threads"
                yield World(name, family, _cpu(threads, exact), plain)
        for count, beside in ((1, False), (1, True), (2, True)):
            streams, copies = r.randint(1, 4), r.choice((1, 1, 2))
            chosen = replace(plain, streams=streams, copies=copies, overlap=r.random() < 0.3)
            if count > 1 and not rewrites:
                chosen = replace(chosen, pins=_pins(r, graph, ("sim0", "sim1", "cpu")))
            name = (
                f"sim, {count} devices{' and a cpu' if beside else ''}, {streams} streams, {said}"
            )
            yield World(name, f"sim, {said}", _sims(count, beside, r.randrange(1 << 30)), chosen)
        if COMPILER is not None:
            graphs = r.random() < 0.5
            streams = r.randint(1, 4)
            name = f"cuda, {streams} streams, {'captured' if graphs else 'launched'}, {said}"
            yield World(name, f"cuda, {said}", _cuda(graphs), replace(plain, streams=streams))


def _pins(r: random.Random, graph: Graph, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Some results on devices of their own; what overwrites stays where it is."""
    free = [t.name for t in graph.nodes if t.overwritten is None]
    over = {t.storage.name for t in graph.nodes if t.overwritten is not None}
    chosen = r.sample(free, min(len(free), r.randint(0, 3)))
    return tuple(f"^{n}$={r.choice(devices)}" for n in chosen if n not in over)


@dataclass(frozen=True)
class Expected:
    """What a run must give: outputs and states, and how far each may be off (None: anything)."""

    feeds: Mapping[str, Array]
    outputs: Mapping[str, Array]
    states: Mapping[str, Array]
    allowed: Mapping[str, float | None]


def expected(grown: Grown, graph: Graph, seed: int) -> list[Expected]:
    """The runs of a graph by the references, as it was built."""
    values, found = dict(grown.feeds), []
    states = {t.name: np.zeros_like(grown.feeds[t.name]) for t in graph.leaves(Kind.STATE)}
    noisy = [states] * DRAWS
    for run in range(RUNS):
        values |= other_feeds(grown, graph, seed + run) if run else {}
        outputs, after = meaning(graph, values, states)
        moved = []
        for k in range(DRAWS):
            rng = np.random.default_rng([seed, run, k])
            shown, noisy[k] = meaning(graph, values, noisy[k], grown.noise, rng)
            moved.append({**{f"state {n}": a for n, a in noisy[k].items()}, **shown})
        right = {**{f"state {n}": a for n, a in after.items()}, **outputs}
        allowed = {n: _allowed(a, [m[n] for m in moved]) for n, a in right.items()}
        if not all(np.isfinite(a).all() for a in right.values() if a.dtype.kind == "f"):
            for n in _unsettled(grown, graph, values, states, right):
                allowed[n] = None
        feeds = {t.name: values[t.name] for t in graph.leaves(Kind.INPUT)}
        found.append(Expected(feeds, outputs, after, allowed))
        states = after
    return found


def _unsettled(
    grown: Grown,
    graph: Graph,
    values: Mapping[str, Array],
    states: Mapping[str, Array],
    right: Mapping[str, Array],
) -> set[str]:
    """Names of which noise as large as what is allowed decides what is not finite, such as the sign
    of a small value over zero."""
    found = set()
    for k in range(DRAWS):
        noise = {n: SLACK * x for n, x in grown.noise.items()}
        shown, after = meaning(graph, values, states, noise, np.random.default_rng(k))
        moved = {**{f"state {n}": a for n, a in after.items()}, **shown}
        for n, a in right.items():
            there = ~np.isfinite(a) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
            if not np.array_equal(moved[n][there], a[there], equal_nan=True):
                found.add(n)
    return found


def _allowed(right: Array, moved: list[Array]) -> float | None:
    if right.dtype.kind != "f":
        return 0.0 if all(np.array_equal(right, m) for m in moved) else None
    finite = np.isfinite(right)
    if any(not np.array_equal(finite, np.isfinite(m)) for m in moved):
        return None
    off = max((float(np.abs(m[finite] - right[finite]).max(initial=0)) for m in moved), default=0)
    return SLACK * off + FLOOR * float(np.abs(right[finite]).max(initial=0))


Found = dict[str, Array]  # outputs and states of all runs, by what they are


def difference(
    worlds: Sequence[World], grown: Grown, graph: Graph, runs: list[Expected]
) -> tuple[str, tuple[World, ...]]:
    """What is wrong with a graph in some worlds, and in which; nothing when all is right."""
    first: dict[str, tuple[World, Found]] = {}
    for world in worlds:
        said, found = _ran(world, grown, graph, runs)
        if said:
            return said, (world,)
        other, before = first.setdefault(world.family, (world, found))
        for what, a in found.items():
            if not _same_bits(a, before[what]):
                return f"bits differ, {what}", (other, world)
    return "", ()


def _same_bits(a: Array, b: Array) -> bool:
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = a.reshape(-1).view(bits) == b.reshape(-1).view(bits)
    if a.dtype.kind == "f":
        same |= np.isnan(a).reshape(-1) & np.isnan(b).reshape(-1)
    return bool(same.all())


def _ran(world: World, grown: Grown, graph: Graph, runs: list[Expected]) -> tuple[str, Found]:
    """What is wrong with a graph in a world, and what it gave."""
    session, everything = None, Found()
    try:
        session = Session(world.opened(), world.options)
        stored = {t.name: to_storage(grown.feeds[t.name], t) for t in graph.leaves(Kind.WEIGHT)}
        session.prepare("fuzz", graph, stored)
        for i, run in enumerate(runs):
            inputs = graph.leaves(Kind.INPUT)
            feeds = {t.name: to_storage(run.feeds[t.name], t) for t in inputs}
            got = session.run("fuzz", feeds)
            found = {f"output %{t.name}": to_logical(got[t.name], t) for t in graph.outputs}
            right = {f"output %{n}": (a, run.allowed[n]) for n, a in run.outputs.items()}
            for name, last in graph.updates.items():
                if last.is_leaf:
                    continue  # nothing writes it, and nothing may need it
                what = f"state %{name}"
                found[what] = to_logical(session.read_state(name), graph[name])
                right[what] = run.states[name], run.allowed[f"state {name}"]
            for what, a in found.items():
                if wrong := _compared(a, *right[what]):
                    return f"run {i}, {what}: {wrong}", everything
                everything[f"run {i}, {what}"] = np.array(a, order="C")
    except Exception as error:  # whatever escapes is a finding
        return f"{type(error).__name__}: {error}", everything
    finally:
        if session is not None:
            session.close()
    return "", everything


def _compared(got: Array, right: Array, allowed: float | None) -> str:
    if got.shape != right.shape:
        return f"shape {list(got.shape)}, expected {list(right.shape)}"
    if allowed is None:
        return ""
    if right.dtype.kind != "f":
        same = np.array_equal(got, right)
        return "" if same else f"{int((got != right).sum())} of {got.size} integers differ"
    finite = np.isfinite(right)
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return "what is not finite differs"
    off = np.abs(np.where(finite, got, 0) - np.where(finite, right, 0))
    worst = float(np.max(off, initial=0)) if not np.isnan(off).any() else float("nan")
    if worst <= allowed:
        return ""
    places = int((~(off <= allowed)).sum())
    return f"off by {worst:.3g} where {allowed:.3g} is allowed, in {places} places"


def smallest(worlds: Sequence[World], grown: Grown, graph: Graph, seed: int, found: str) -> Graph:
    """A part of the graph that is wrong alike: fewer outputs, then results fed instead of made."""
    while True:
        for smaller in _smaller(grown, graph):
            if _size(smaller) >= _size(graph):
                continue
            again, _ = difference(worlds, grown, smaller, expected(grown, smaller, seed))
            if _kind(again) == _kind(found):
                graph = smaller
                break
        else:
            return graph


def _size(graph: Graph) -> int:
    return len(graph.nodes) + len(graph.outputs)


def _kind(found: str) -> str:
    """The error's name, or that values or bits differ."""
    known = [kind for kind in ("run ", "bits ") if found.startswith(kind)]
    return known[0] if known else found.partition(":")[0]


def _smaller(grown: Grown, graph: Graph) -> Iterator[Graph]:
    updates = [t for t in graph.updates.values() if not t.is_leaf]
    for t in graph.outputs if len(graph.outputs) > 1 else ():
        yield _of(graph, [t], [])
        yield _of(graph, [t], updates)
    fixed = {t.overwritten.root.name for t in graph.nodes if t.overwritten is not None}
    if updates and graph.outputs:
        yield _of(graph, list(graph.outputs), [])
    for t in graph.nodes:
        if t.overwritten is None and not t.is_output and t.name not in fixed:
            fed = input(f"{t.name}.fed", t.shape, t.dtype)
            shown, _ = meaning(_of(graph, [t], []), grown.feeds, _zeros(grown, graph))
            grown.feeds[fed.name] = shown[t.name]
            yield graph.replace({t.name: fed})


def _zeros(grown: Grown, graph: Graph) -> dict[str, Array]:
    return {t.name: np.zeros_like(grown.feeds[t.name]) for t in graph.leaves(Kind.STATE)}


def _of(graph: Graph, outputs: list[Tensor], also: list[Tensor]) -> Graph:
    return Graph.of({t.name: t for t in outputs}, also=also, name=graph.name)


def check(seed: int, kinds: tuple[str, ...], count: int) -> tuple[int, str]:
    """Run the graph of a seed in `count` worlds (0: all). Returns runs made, and what is wrong."""
    grown = grow(seed)
    graph = graph_of(grown)
    if graph is None:
        return 0, ""
    runs = expected(grown, graph, seed)
    r = random.Random(seed)
    known = [w for w in worlds(r, graph) if w.name.startswith(kinds)]
    chosen = r.sample(known, min(count, len(known))) if count else known
    found, wrong = difference(chosen, grown, graph, runs)
    if not found:
        return len(chosen), ""
    small = smallest(wrong, grown, graph, seed, found)
    said, _ = difference(wrong, grown, small, expected(grown, small, seed))
    return len(chosen), f"seed {seed}, {' and '.join(w.name for w in wrong)}: {said}\n{small!r}"


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="number of graphs")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="only this graph, in every world")
    parser.add_argument("--worlds", default="", help="only worlds that begin so: cpu, sim, cuda")
    parser.add_argument("--each", type=int, default=3, help="worlds per graph, drawn by its seed")
    asked = parser.parse_args()
    one = asked.seed is not None
    seeds = [asked.seed] if one else range(asked.first, asked.first + asked.graphs)
    kinds = (asked.worlds,) if asked.worlds else ("cpu", "sim", "cuda")
    begun, runs, bad, graphs = time.perf_counter(), 0, 0, 0
    for seed in seeds:
        made, wrong = check(seed, kinds, 0 if one else asked.each)
        runs, bad, graphs = runs + made, bad + bool(wrong), graphs + bool(made)
        if wrong:
            print(wrong, end="\n\n", flush=True)
        if graphs % 1000 == 0 and made:
            print(f"{graphs} graphs, {runs} runs, {bad} differ", flush=True)
    took = time.perf_counter() - begun
    print(f"{graphs} graphs in {runs} worlds, {bad} differ, {took:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
