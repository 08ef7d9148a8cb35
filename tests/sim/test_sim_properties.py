"""The properties that carry the project, over random graphs of real ops on several devices.

1. Any graph, placement, number of streams and legal interleaving gives the reference's values.
2. `verify` accepts every plan that the pipeline makes; of a damaged one the verdict and the
   executions agree, in both directions, over all orders where these can be counted.
3. Arenas lie between the live-bytes bound and the sum of all values.
4. The same input gives the same plan and the same text, in every process.

`test_verify_brute` compares `verify` with a second executor that knows no kernels; here it is the
simulator that users have, which sees a fault only when some command reads foreign bytes.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from graph_kit import random_devices, random_graph, random_options
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import mutants
from worlds import CPU, SIM0, SIM1, E, T, linear

from ggraph import ops
from ggraph.alloc import allocate
from ggraph.backends.sim import Order, Random, Simulated, Simulator, every_order, sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import F32, I32
from ggraph.errors import GgraphError
from ggraph.graph import Graph
from ggraph.hazards.run import adversary
from ggraph.ops.evaluate import evaluate
from ggraph.order import order
from ggraph.pipeline import make_plan
from ggraph.place import place
from ggraph.plan import Plan, VerifiedPlan
from ggraph.plan_json import plan_to_json
from ggraph.show import graph_text, schedule_text
from ggraph.split import split
from ggraph.tensor import Array, Kind, Tensor, input, state
from ggraph.verify import CounterExample, examine, verify

RUNS, ORDERS = 2, 120
SEEN_IN = {"race", "stale", "unwritten"}  # kinds that an execution of whole kernels can show


def planned(r: random.Random) -> tuple[Graph, VerifiedPlan]:
    """A random graph, and its plan on random devices."""
    graph, devices = random_graph(r, 10), random_devices(r)
    return graph, make_plan(graph, devices, random_options(r, graph, devices))


def data(graph: Graph, seed: int) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Weights, and one feed per run; indices are distinct rows of a cache."""
    rng = np.random.default_rng(seed)

    def fill(t: Tensor) -> Array:
        if t.dtype is F32:
            return rng.standard_normal(t.shape).astype(np.float32)
        return rng.permutation(t.size).astype(t.dtype.np).reshape(t.shape)

    weights = {t.name: fill(t) for t in graph.leaves(Kind.WEIGHT)}
    feeds = [{t.name: fill(t) for t in graph.leaves(Kind.INPUT)} for _ in range(RUNS)]
    return weights, feeds


def reference(
    graph: Graph, weights: dict[str, Array], feeds: list[dict[str, Array]]
) -> list[bytes]:
    """The outputs' bytes of all runs by NumPy alone, states carried over."""
    states: dict[str, Array] = {}
    found = []
    for feed in feeds:
        values = evaluate(graph, {**weights, **states, **feed})
        states = {s: values[s] for s in graph.updates}
        found += [values[t.name].tobytes() for t in graph.outputs]
    return found


def outputs(graph: Graph, done: Simulated) -> list[bytes]:
    return [run[t.name].tobytes() for run in done.outputs for t in graph.outputs]


@given(st.randoms(use_true_random=False), st.integers(0, 1 << 30))
def test_any_interleaving_gives_the_references_values(r: random.Random, seed: int) -> None:
    graph, verified = planned(r)
    weights, feeds = data(graph, seed)
    simulator, wanted = Simulator(verified.plan, weights), reference(graph, weights, feeds)
    for k in range(4):
        done = simulator.run(feeds, Random(seed + k))
        assert not done.faults, done.faults[0]
        assert outputs(graph, done) == wanted


@given(st.randoms(use_true_random=False))
def test_every_plan_of_the_pipeline_is_accepted_and_lies_between_its_bounds(
    r: random.Random,
) -> None:
    _, verified = planned(r)
    certificate = verify(verified.plan).certificate
    assert certificate == verified.certificate
    plan = verified.plan
    arenas = {b.name: b for b in plan.memory.buffers.values() if not b.external}
    rooms = [
        -(-v.nbytes // max(b.alignment, 64)) * max(b.alignment, 64) * v.slots
        for v in plan.schedule.values.values()
        if (b := arenas.get(plan.memory.regions[v.name].buffer)) is not None and v.same_as is None
    ]
    assert certificate.live_bound_bytes <= plan.memory.arena_bytes <= sum(rooms)


@given(st.randoms(use_true_random=False))
def test_the_same_input_gives_the_same_plan_and_text(r: random.Random) -> None:
    seed = r.randrange(1 << 30)
    one, two = (planned(random.Random(seed)) for _ in range(2))
    assert text_of(*one) == text_of(*two)


def text_of(graph: Graph, verified: VerifiedPlan) -> str:
    """Everything that is printed of a plan but its times."""
    plan = replace(verified.plan, log=())
    parts = (graph_text(graph), schedule_text(plan.schedule), json.dumps(plan_to_json(plan)))
    return "\n".join(parts)


def test_hash_seeds_change_nothing() -> None:
    here = Path(__file__).parents[2]
    code = (
        "import hashlib, random, sys; sys.path[:0] = ['.', 'tests', 'tests/sim']\n"
        "import test_sim_properties as t\n"
        "texts = [t.text_of(*t.planned(random.Random(k))) for k in range(6)]\n"
        "print(hashlib.sha256('\\n'.join(texts).encode()).hexdigest())"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=here,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


# Damaged plans. First those of any size, under the order that their own counter-example suggests.


@given(st.randoms(use_true_random=False), st.integers(0, 1 << 20))
def test_no_accepted_mutant_of_a_real_plan_ever_reads_foreign_bytes(
    r: random.Random, seed: int
) -> None:
    """One direction for plans of any size: what `verify` lets pass is never seen to go wrong."""
    graph, verified = planned(r)
    weights, feeds = data(graph, seed)
    for name, mutant in mutants(verified.plan, r):
        verdict = examine(mutant)
        if isinstance(verdict, CounterExample):
            continue
        for chosen in (Random(seed), Random(seed + 1)):
            assert not Simulator(mutant, weights).run(feeds, chosen).faults, name


def small_graph(r: random.Random) -> Graph:
    """Two to four ops: chains, forks, joins, now and then a cache."""
    x = input("x", (T, E))
    pool: list[Tensor] = [x]
    for i in range(r.randint(2, 3)):
        a, b = r.choice(pool), r.choice(pool)
        pool.append(linear(a, f"n{i}") if r.random() < 0.5 else ops.add(a, b, name=f"n{i}"))
    ends = [pool[-1]]
    if r.random() < 0.3:
        slots = input("slots", (T,), I32)
        ends.append(ops.scale(ops.set_rows(state("s", (T, E)), pool[-1], slots, name="kept"), 2.0))
    return Graph.of(ends)


VISIBLE = sim_spec("sim0", host_visible=True, copy_streams=0)
SMALL: tuple[tuple[DeviceSpec, ...], ...] = ((VISIBLE,), (SIM0,), (SIM0, CPU), (SIM0, SIM1))


def small_plans(r: random.Random) -> Iterator[tuple[str, Plan]]:
    """A small plan as made for one or two devices in list order or soundly, and its mutants."""
    graph, devices = small_graph(r), r.choice(SMALL)
    pins = [f"^{t.name}$={r.choice(devices).name}" for t in graph.nodes if t.op == "mul_mat"]
    schedule = order(split(place(graph, devices, pins[:2])), streams=2, overlap=r.random() < 0.2)
    plan = Plan(schedule, allocate(schedule, mode=r.choice(("hb", "ggml"))))
    yield "as planned", plan
    yield from mutants(plan, r)


def some(r: random.Random) -> Iterator[tuple[str, Plan]]:
    """The plan as made, and a few of its mutants."""
    first, *others = small_plans(r)
    yield first
    yield from r.sample(others, min(2, len(others)))


def executions(p: Plan, weights: dict[str, Array], feeds: list[dict[str, Array]]) -> bool | None:
    """Whether some order reads foreign bytes; None where there are too many orders to try all.
    The likeliest order is tried first."""
    simulator = Simulator(p, weights)
    verdict = examine(p)
    suspected, _ = adversary(verdict if isinstance(verdict, CounterExample) else None, p)
    if simulator.run(feeds, suspected).faults:
        return True

    def run(chosen: Order) -> bool:
        return bool(simulator.run(feeds, chosen).faults)

    tried = 0
    for bad in every_order(run, ORDERS):
        tried += 1
        if bad:
            return True
    return None if tried == ORDERS else False


def test_the_small_plans_are_of_both_kinds_and_mostly_counted_out() -> None:
    """The comparison above is not empty: sound and refused plans, and few with too many orders."""
    found: dict[tuple[bool, bool | None], int] = {}
    for seed in range(12):
        r = random.Random(seed)
        for _, p in some(r):
            refused = isinstance(examine(p), CounterExample)
            if not refused:
                key = (refused, executions(p, *data(p.graph, 1)))
                found[key] = found.get(key, 0) + 1
            found[refused, True] = found.get((refused, True), 0) + refused
    assert found[True, True] >= 8
    assert found[False, False] >= 8 and found.get((False, None), 0) < found[False, False]


def is_unread(p: Plan, verdict: CounterExample) -> bool:
    """Whether no command reads what the race can spoil, so that no execution can show it."""
    read = {a.value for c in p.schedule for a in c.reads}
    lasting = {n for n, v in p.schedule.values.items() if v.kept} | set(p.schedule.carried)
    return not (set(verdict.values) & (read | lasting))


@given(st.randoms(use_true_random=False))
def test_verdicts_and_all_orders_agree_on_small_plans(r: random.Random) -> None:
    for name, p in some(r):
        verdict = examine(p)
        if isinstance(verdict, CounterExample) and verdict.kind not in SEEN_IN:
            continue  # refused before any order is looked at
        weights, feeds = data(p.graph, 1)
        try:
            faulty = executions(p, weights, feeds)
        except GgraphError as error:  # an index from foreign bytes, or a machine that is stuck
            assert isinstance(verdict, CounterExample), (name, error)
            continue
        if faulty:
            assert isinstance(verdict, CounterExample), (name, "accepted, but some order is wrong")
        elif faulty is not None and isinstance(verdict, CounterExample):
            assert is_unread(p, verdict), (name, str(verdict))
