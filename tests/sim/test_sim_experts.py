"""Partial copies of experts: a large batch takes host experts to the device, but only those that it
uses. Bytes are counted, values compared, and plans that copy by the wrong indices refused.

Legend: T tokens, X experts, U experts per token, E width, F feed-forward width.
"""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, no_reuse

from ggraph import ops
from ggraph.backends.sim import Machine, Order, Random, SimBackend, SimHost, Simulator
from ggraph.decode.runner import Runner
from ggraph.device import HOST, DeviceSpec
from ggraph.dtype import F32, I32
from ggraph.graph import Graph
from ggraph.ops.copies import slice_runs
from ggraph.ops.evaluate import evaluate
from ggraph.order import order
from ggraph.pipeline import Options, make_plan
from ggraph.place import place
from ggraph.plan import Do, Placed, Placement, Plan, Split, Splits
from ggraph.plan_json import plan_from_json, plan_to_json
from ggraph.session import Session
from ggraph.split import split
from ggraph.tensor import Array, input, weight
from ggraph.verify import CounterExample, examine
from models.registry import open_model

T, X, U, E, F = 6, 32, 2, 16, 24
GPU = replace(SIM0, offload_rows=4, link_bytes_per_s=1e8)  # a link that is worth saving
EXPERT = E * F * 4  # bytes of one expert's matrix


def moe(routed: bool = False) -> Graph:
    """Two products per token and chosen expert: x [T, E] -> [T, U, E]. The experts' indices are
    computed on the device where `routed`, else fed."""
    x = input("x", (T, E))
    if routed:
        ids, _ = ops.moe_route(ops.mul_mat(weight("router", (X, E)), x, name="scores"), U)
    else:
        ids = input("ids", (T, U), I32)
    up = ops.mul_mat_id(weight("up", (X, F, E)), x.reshape(T, 1, E), ids, name="h")  # [T, U, F]
    y = ops.mul_mat_id(weight("down", (X, E, F)), up, ids, name="out")  # [T, U, E]
    return Graph.of({"y": ops.scale(y, 1.0)}, name="experts")


PINS = ("^(up|down)$=cpu", "^router$=sim0")


def plan_of(graph: Graph, device: DeviceSpec = GPU, **options: int) -> Plan:
    pins = tuple(p for p in PINS if "router" not in p or any(t.name == "router" for t in graph))
    return make_plan(graph, [device, CPU], Options(pins=pins, **options)).plan  # type: ignore[arg-type]


def arrays(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Weights of a graph."""
    rng = np.random.default_rng(seed)
    leaves = [t for t in graph if t.is_leaf and t.kind.value == "weight"]
    return {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in leaves}


def feed(seed: int, experts: int = X) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:U] for _ in range(T)]).astype(np.int32)
    return {"x": rng.standard_normal((T, E)).astype(np.float32), "ids": ids}


def test_the_used_experts_move_and_no_others() -> None:
    graph = moe()
    plan = plan_of(graph)
    copies = [t for t in plan.graph.nodes if t.op == "copy" and len(t.sources) == 2]
    assert [t.name for t in copies] == ["up@sim0", "down@sim0"]
    assert plan.schedule.splits.placement.of["h"].cause == f"offload of {T} rows from cpu"
    simulator, given = Simulator(plan, arrays(graph)), feed(1)
    used = len(np.unique(given["ids"]))
    got = simulator.run([given])
    others = sum(a.nbytes for a in given.values()) + graph["y"].nbytes  # in and out
    assert used < X // 2
    assert got.bytes_copied == 2 * used * EXPERT + others
    assert not got.faults
    wanted = evaluate(graph, {**arrays(graph), **given})
    assert got.outputs[0]["y"].tobytes() == wanted["y"].tobytes()
    assert set(got.outputs[0]) == {"y"}, "what the host looks at is no output"


def test_a_whole_copy_moves_all_experts() -> None:
    """Where hardly any expert would stay behind, the host need not look."""
    graph = moe()
    plan = plan_of(graph, replace(GPU, link_bytes_per_s=1e12))
    assert not any(c.chosen_by for c in plan.schedule)
    got = Simulator(plan, arrays(graph)).run([feed(1)])
    assert got.bytes_copied > 2 * X * EXPERT


def test_a_small_batch_stays_with_its_experts() -> None:
    placement = place(moe(), [replace(GPU, offload_rows=T + 1), CPU], PINS[:1])
    assert placement.of["h"].device == placement.of["out"].device == "cpu"


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_every_order_gives_the_same_bits(routed: bool, streams: int) -> None:
    graph = moe(routed)
    plan = plan_of(graph, streams=streams)
    assert sum(c.label.startswith("look:") for c in plan.schedule) == 1, "one look for both"
    weights = arrays(graph)
    simulator, fed = Simulator(plan, weights), [feed(1), feed(2), feed(3, experts=3)]
    feeds = [{"x": f["x"]} for f in fed] if routed else fed
    wanted = [evaluate(graph, {**weights, **f})["y"].tobytes() for f in feeds]
    for seed in range(40):
        got = simulator.run(feeds, Random(seed))
        assert not got.faults, got.faults[0]
        assert [o["y"].tobytes() for o in got.outputs] == wanted


def session(chosen: Order) -> tuple[Session, Machine]:
    machine = Machine(chosen)
    backends = {d.name: SimBackend(d, machine) for d in (GPU, CPU)}
    return Session({**backends, HOST: SimHost(machine)}, Options(pins=PINS)), machine


def test_the_executor_copies_run_by_run() -> None:
    graph, weights = moe(routed=True), arrays(moe(routed=True))
    running, machine = session(Random(5))
    running.prepare("step", lambda: graph, lambda t: weights[t.name])
    moved = []
    for seed in (1, 2):
        given = {"x": feed(seed)["x"]}
        before = machine.bytes_copied
        got = running.run("step", given)
        moved.append(machine.bytes_copied - before)
        assert set(got) == {"y"}
        wanted = evaluate(graph, {**weights, **given}, every=True)
        assert got["y"].tobytes() == wanted["y"].tobytes()
        used = np.unique(wanted[graph["h"].sources[2].name]).size
        assert 2 * used * EXPERT < moved[-1] < 2 * (used + 1) * EXPERT
    running.close()
    assert max(moved) < 2 * X * EXPERT


# What must be refused.


def changed(plan: Plan, **fields: object) -> Plan:
    """The plan with fields of its partial copies replaced."""
    commands = [
        replace(c, **fields) if c.chosen_by else c  # type: ignore[arg-type]
        for c in plan.schedule
    ]
    return replace(plan, schedule=replace(plan.schedule, commands=tuple(commands)))


def without(plan: Plan, start: str) -> Plan:
    commands = tuple(c for c in plan.schedule if not c.label.startswith(start))
    assert len(commands) < len(plan.schedule.commands), start
    return replace(plan, schedule=replace(plan.schedule, commands=commands))


def verdict(plan: Plan) -> str:
    found = examine(plan)
    return f"{found.kind}: {found.message}" if isinstance(found, CounterExample) else ""


def test_a_copy_needs_the_hosts_look_and_the_look_needs_the_indices() -> None:
    plan = plan_of(moe(routed=True))
    assert not verdict(plan)
    ids = next(c.chosen_by for c in plan.schedule if c.chosen_by)
    assert "which the host has not read before" in verdict(without(plan, "look:"))
    waits = [c for c in plan.schedule if c.do is Do.HOST_SYNC and ids in (c.event or "")]
    assert [c.event for c in waits] == [f"after:copy:{ids}@host"]
    assert verdict(without(plan, waits[0].label)).startswith("race")
    assert "chosen by None" in verdict(changed(plan, chosen_by=None))
    assert "chosen by 'scores'" in verdict(changed(plan, chosen_by="scores"))


def test_the_choice_survives_json() -> None:
    plan = plan_of(moe())
    again = plan_from_json(json.dumps(plan_to_json(plan)))
    assert again.schedule.commands == plan.schedule.commands
    assert any(c.chosen_by == "ids" for c in again.schedule)
    assert not verdict(again)


def test_readers_with_indices_of_their_own_get_everything() -> None:
    """A partial copy brings what one tensor of indices names, so two of them mean a whole copy."""
    x, one, two = input("x", (T, 1, E)), input("one", (T, U), I32), input("two", (T, U), I32)
    w = weight("w", (X, F, E))
    graph = Graph.of({"a": ops.mul_mat_id(w, x, one), "b": ops.mul_mat_id(w, x, two)})
    s = split(place(graph, [GPU, CPU], ["^w$=cpu", "^[ab]$=sim0"]))
    assert [len(t.sources) for t in s.placement.graph if t.name == "w@sim0"] == [1]


def mistaken(same: bool) -> Plan:
    """A product on the device whose experts were chosen by `one`, picked by `two` unless `same`."""
    x, one, two = input("x", (T, 1, E)), input("one", (T, U), I32), input("two", (T, U), I32)
    part = ops.copy(weight("w", (X, F, E)), "sim0", used=one, name="part")
    near = [ops.copy(t, "sim0", name=f"{t.name}@sim0") for t in (x, one if same else two)]
    b = ops.mul_mat_id(part, *near, name="b")
    graph = Graph.of({"b": b}, also=[ops.copy(two, "sim0", name="spare")] if same else [])
    homes = {t.name: "cpu" if t.is_leaf else "sim0" for t in graph}
    placement = Placement(graph, (GPU, CPU), {n: Placed(d, "by hand") for n, d in homes.items()})
    copies = tuple(t.name for t in graph.nodes if t.op == "copy")
    return no_reuse(order(Splits(placement, (Split(0, "sim0", ("b",), copies),))))


def test_a_reader_that_picks_by_other_indices_is_refused() -> None:
    assert not verdict(mistaken(same=True))
    found = verdict(mistaken(same=False))
    assert "reads slices of 'part' that its partial copy need not bring" in found


def test_the_simulator_sees_a_slice_that_was_not_brought() -> None:
    ids = feed(1)["ids"]
    given = {"x": feed(1)["x"].reshape(T, 1, E), "one": ids, "two": (ids + 1) % X}
    plan = mistaken(same=False)
    got = Simulator(plan, arrays(plan.graph)).run([given])
    assert got.faults and got.faults[0].found == "bytes that nobody wrote"
    lucky = Simulator(plan, arrays(plan.graph)).run([{**given, "two": ids}])
    assert not lucky.faults, "with equal indices nothing is missing: that is luck"


# The helper.


@given(st.lists(st.integers(-2, 9), max_size=12))
def test_slice_runs_cover_the_named_slices_exactly(ids: list[int]) -> None:
    runs = slice_runs(np.array(ids, np.int32), 8, 8 * 3)
    covered = {b // 3 for start, stop in runs for b in range(start, stop)}
    assert covered == {i for i in ids if 0 <= i < 8}
    assert all(a[1] < b[0] for a, b in pairwise(runs)), "merged and in order"


def test_slice_runs_of_nothing() -> None:
    assert slice_runs(np.zeros(3, np.int32), 0, 0) == ()


# The real decoder.


@pytest.mark.parametrize("streams", [1, 4])
def test_a_mixture_whose_experts_stay_with_the_host_gives_the_unsplit_logits(streams: int) -> None:
    model = open_model(Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_moe")
    gpu = replace(GPU, offload_rows=3)

    def logits(devices: tuple[DeviceSpec, ...], chosen: Options, seeds: range) -> list[bytes]:
        machine = Machine()
        backends = {d.name: SimBackend(d, machine) for d in devices}
        running = Session({**backends, HOST: SimHost(machine)}, chosen)
        runner, found = Runner(model, running, 16, cache_dtype=F32), []
        for seed in seeds:
            machine.order, runner.past = Random(seed), 0
            parts = [runner.text(p, every=True).logits for p in ([3, 5, 8, 13], [21], [34, 55, 89])]
            found.append(b"".join(p.tobytes() for p in parts))
        labels = [s.label for s in machine.timeline if "_exps" in s.label and "copy" in s.label]
        parted = any(re.search(r"_exps\.weight\+[1-9]\d* ->", label) for label in labels)
        assert parted == (len(devices) > 1), "experts are copied, in parts, for the large batches"
        running.close()
        return found

    (wanted,) = logits((CPU,), Options(), range(1))
    got = logits((gpu, CPU), Options(pins=(r"_exps\.weight$=cpu",), streams=streams), range(6))
    assert set(got) == {wanted}
