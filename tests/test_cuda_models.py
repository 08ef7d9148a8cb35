"""Whole models on the CUDA backend without a GPU: captured graphs and the plans.

The backend is the real one, over the host stand-in for a driver (see `cuda_host`). Golden logits
are in `test_cuda_golden.py`.
"""

from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from cuda_host import Graph, HostDriver, need_compiler
from golden_kit import NAMES
from test_models_plans import GRAPHS

from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.protocol import Launch
from ggraph.backends.sim import Random, Simulator
from ggraph.decode.model import StepShape
from ggraph.device import DeviceSpec
from ggraph.execute import Executor
from ggraph.graph import Graph as IrGraph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import HOST_STEPS, Do, VerifiedPlan
from ggraph.tensor import Kind
from models.registry import open_model

GOLDEN = Path(__file__).parent / "golden"
CPU = DeviceSpec("cpu", "cpu", host_visible=True)


def made(name: str, streams: int) -> VerifiedPlan:
    return planned(GRAPHS[name](), streams)


def planned(graph: IrGraph, streams: int) -> VerifiedPlan:
    options = Options(streams=streams)
    return make_plan(graph, [cuda_spec("cuda0", HostDriver()), CPU], options)


def left_to_the_cpu(verified: VerifiedPlan) -> list[str]:
    """Labels of the launches that the GPU has no kernel for."""
    launches = (c for c in verified.plan.schedule if c.do is Do.LAUNCH)
    return [c.label for c in launches if c.actor.device == "cpu"]


def weights_of(verified: VerifiedPlan) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for t in verified.plan.graph.leaves(Kind.WEIGHT):
        values = (rng.standard_normal(t.shape) / np.sqrt(t.shape[-1])).astype(np.float32)
        found[t.name] = values.astype(t.dtype.np)
    return found


def feeds_of(verified: VerifiedPlan) -> dict[str, Any]:
    """Small distinct indices, and floats where floats are asked for."""
    rng = np.random.default_rng(1)
    found = {}
    for t in verified.plan.graph.leaves(Kind.INPUT):
        if t.dtype.is_float:
            found[t.name] = rng.standard_normal(t.shape).astype(t.dtype.np)
        else:
            found[t.name] = np.arange(t.size).reshape(t.shape).astype(t.dtype.np)
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_is_planned_for_the_gpu_and_runs_on_sim(name: str) -> None:
    """All work is on the GPU; the command stream is verified, and random orders agree."""
    for streams in (1, 4):
        verified = made(name, streams)
        on_cpu = left_to_the_cpu(verified)
        assert on_cpu in ([], ["moved"]), f"{name}: {on_cpu} fell back"  # an input's copy
    if "64" in name or "moe" in name:
        return  # the same commands again, only slower
    simulator = Simulator(verified.plan, weights_of(verified))
    feeds = [feeds_of(verified)]
    runs = [simulator.run(feeds, Random(seed)) for seed in range(2)]
    assert not runs[0].faults and not runs[1].faults
    for key, value in runs[0].outputs[0].items():
        assert value.tobytes() == runs[1].outputs[0][key].tobytes()


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("tiny2/")])
def test_every_architecture_is_planned_for_the_gpu_alone(name: str) -> None:
    model = open_model(GOLDEN / name)
    for rows in (5, 64):
        shape = StepShape(rows, 256, 1 if rows > 8 else rows, 513, ())
        assert left_to_the_cpu(planned(model.build(shape), 1)) == [], rows


class Recording(CudaBackend):
    """Keeps every graph that it captures."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: list[Graph] = []

    def _captured(self, streams: Any, enqueue: Any) -> Any:
        self.made.append(super()._captured(streams, enqueue))
        return self.made[-1]


def bound(verified: VerifiedPlan) -> tuple[Recording, Executor]:
    driver = HostDriver(1 << 32)
    cuda = Recording(cuda_spec("cuda0", driver), driver, True, Events())
    backends = {"cuda0": cuda, "cpu": open_backend("cpu", threads=1)}
    external = {}
    weights = weights_of(verified)
    plan = verified.plan
    for t in (*plan.graph.leaves(Kind.WEIGHT), *plan.graph.leaves(Kind.STATE)):
        buffer = plan.memory.buffers[plan.memory.regions[t.name].buffer]
        owner = backends[buffer.device]
        external[t.name] = owner.allocate(buffer)
        raw = weights.get(t.name, np.zeros(buffer.nbytes, np.uint8))
        owner.write(external[t.name], 0, raw)
    return cuda, Executor(verified, backends, external)


@need_compiler
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("name", ["llama_tied, 1 row", "qwen3_moe, 5 rows", "eagle3 fed back"])
def test_a_captured_graph_orders_all_that_the_verified_plan_orders(name: str, streams: int) -> None:
    """One node per step and none for host steps; every ordering that the verifier relied on
    between two commands is a path of the graph."""
    verified = made(name, streams)
    cuda, executor = bound(verified)
    executor.run(feeds_of(verified))
    assert not cuda.made, "the first run loads what a capture cannot"
    executor.run(feeds_of(verified))
    assert len(cuda.made) == 1, "nothing but the host's first and last steps is outside the graph"
    graph = cuda.made[0]
    nodes = _nodes_by_command(cuda, executor, verified)
    assert sum(map(len, nodes.values())) == len(graph.nodes)
    reach = nx.transitive_closure_dag(nx.DiGraph(_edges(cuda, graph)))
    wanted = nx.transitive_closure_dag(verified.plan.schedule.to_networkx())
    host = {i for i, c in enumerate(verified.plan.schedule) if c.do in HOST_STEPS}
    orderings = [(i, j) for i, j in wanted.edges if i in nodes and j in nodes]
    through_host = {(i, j) for h in host for i in wanted.predecessors(h)
                    for j in wanted.successors(h)}  # fmt: skip
    assert orderings and not (set(orderings) & through_host)
    for i, j in orderings:
        assert all(reach.has_edge(a, b) for a in nodes[i][-1:] for b in nodes[j][:1]), (i, j)
    executor.close()


def _edges(cuda: Recording, graph: Graph) -> list[tuple[int, int]]:
    return list(cuda.driver.edges(graph))


def _nodes_by_command(
    cuda: Recording, executor: Executor, verified: VerifiedPlan
) -> dict[int, list[int]]:
    """Numbers of the graph's nodes for each command, in enqueue order."""
    counts: dict[int, int] = {}
    commands = list(enumerate(verified.plan.schedule))
    for (do, _), run in groupby(commands, lambda c: (c[1].do, c[1].actor)):
        indices, members = zip(*run, strict=True)
        if do is Do.COPY:
            counts.update(dict.fromkeys(indices, 1))
        elif do is Do.LAUNCH:  # lowered together: later ones use what earlier ones made
            launches: list[Launch] = [executor._launch(c, 0) for c in members]
            steps = [0, *(len(cuda.lower(launches[: n + 1]).steps) for n in range(len(launches)))]
            counts.update((i, b - a) for i, (a, b) in zip(indices, pairwise(steps), strict=True))
    ends = list(accumulate(counts.get(i, 0) for i, _ in commands))
    return {i: list(range(ends[i] - n, ends[i])) for i, n in counts.items() if n}


@need_compiler
def test_a_lost_edge_would_be_seen() -> None:
    """The stand-in runs a graph's nodes in another order than they were captured in."""
    verified = made("llama_tied, 1 row", 4)
    cuda, executor = bound(verified)
    feeds = feeds_of(verified)
    right = executor.run(feeds)["logits"]
    other = {**feeds, "tokens": feeds["tokens"] + 7}
    assert not cuda.made and np.array_equal(executor.run(feeds)["logits"], right)
    assert not np.array_equal(executor.run(other)["logits"], right)
    assert np.array_equal(executor.run(feeds)["logits"], right)
    executor.run(other)
    cuda.made[0].before = [() for _ in cuda.made[0].before]
    assert not np.array_equal(executor.run(feeds)["logits"], right)
    executor.close()
