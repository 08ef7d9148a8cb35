"""After a run that failed half-way the next begins from a proved state; nothing unproved runs."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_verify_trust import GRAPH, PLAN, SIM0, SIM1, numbers, wanted

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.sim import Machine, Random, SimBackend, SimHost
from ggraph.device import HOST
from ggraph.dtype import I32
from ggraph.errors import GgraphError, InputError, PlanError
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.pipeline import Options, begin, make_plan, run_passes
from ggraph.plan import VerifiedPlan
from ggraph.session import Session
from ggraph.tensor import Array, Kind, input, weight
from ggraph.verify import verify

OPTIONS = Options(streams=4, layers={}, pins=("^(y2|z)$=sim1",))
CALLS = ("submit", "copy", "record", "wait", "write", "read", "synchronise")


class Failing:
    """A backend of which call number `at` (of all that share `count`) raises `error` instead."""

    def __init__(self, inner: Any, count: list[int], at: int, error: type[BaseException]) -> None:
        self.inner, self.count, self.at, self.error = inner, count, at, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in CALLS:
            return found

        def call(*given: Any, **named: Any) -> Any:
            self.count[0] += 1
            if self.count[0] == self.at:
                raise self.error("in the middle")
            return found(*given, **named)

        return call


def failing(at: int, options: Options, error: type[BaseException], seed: int) -> bool:
    """Whether a run whose call number `at` fails leaves an executor whose next runs are right."""
    machine, count = Machine(Random(seed)), [-(1 << 30)]
    plain = {d.name: SimBackend(d, machine) for d in (SIM0, SIM1)} | {HOST: SimHost(machine)}
    verified = make_plan(GRAPH, [SIM0, SIM1], options)
    weights, feeds = numbers(GRAPH)
    external = {}
    for b in verified.plan.memory.buffers.values():
        if b.external:
            external[b.name] = plain[b.device].allocate(b)
            plain[b.device].write(
                external[b.name], 0, weights.get(b.name, np.zeros(b.nbytes, "u1"))
            )
    backends = {n: Failing(b, count, at, error) for n, b in plain.items()}
    executor = Executor(verified, backends, external)  # type: ignore[arg-type]
    assert executor.torn == frozenset()
    count[0] = 0
    try:
        for feed in feeds:
            executor.run(feed)
    except error:
        pass
    else:
        return False  # there is no call of that number
    assert executor.torn == {"cache"}
    assert not machine.pending() and executor.runs == 0
    cache = external["cache"]
    plain[cache.buffer.device].write(cache, 0, np.zeros(cache.buffer.nbytes, np.uint8))
    got = [executor.run(feed) for feed in feeds]
    for one, right in zip(got, wanted(GRAPH), strict=True):
        for name in right:
            assert np.allclose(one[name], right[name], rtol=1e-5), (at, name)
    return True


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [GgraphError, KeyboardInterrupt])
def test_a_run_may_fail_at_any_call(overlap: bool, error: type[BaseException]) -> None:
    """Where runs overlap, a run also fails while the run before is still computing."""
    options = replace(OPTIONS, overlap=overlap, copies=2 if overlap else 1)
    at = 1
    while failing(at, options, error, seed=at):
        at += 3
    assert at > 60, "three runs make more calls than that"


def table(rows: int) -> Graph:
    """Rows of a table by numbers that the user gives, summed."""
    ids = input("ids", (rows,), I32)
    return Graph.of({"y": ops.sum_rows(ops.get_rows(weight("w", (4, 4)), ids))})


@pytest.mark.parametrize("device", ["sim0", "cpu"])
def test_a_session_goes_on_after_a_bad_index(device: str) -> None:
    backend = SimBackend(SIM0, Machine()) if device == "sim0" else open_backend("cpu", threads=1)
    session = Session({device: backend})
    session.prepare("k", lambda: table(1), lambda t: np.full((4, 4), 4.0, np.float32))
    for bad in (7, 1 << 30):
        with suppress(InputError):
            session.run("k", {"ids": np.array([bad], np.int32)})
        assert session.run("k", {"ids": np.array([3], np.int32)})["y"].item() == 16
    session.close()


def test_two_executors_on_one_device_share_no_event() -> None:
    machine = Machine()
    seen: list[set[str]] = []
    for _ in range(2):
        before = set(machine._latest)
        devices = {d.name: SimBackend(d, machine) for d in (SIM0, SIM1)}
        session = Session({**devices, HOST: SimHost(machine)}, OPTIONS)
        weights, feeds = numbers(GRAPH)
        session.prepare("k", lambda: GRAPH, lambda t: weights[t.name])  # noqa: B023
        session.run("k", feeds[0])
        seen.append(set(machine._latest) - before)
    assert seen[0] and len(seen[0]) == len(seen[1]) and not seen[0] & seen[1]


# What an executor takes.


def bare(plan: Any) -> Executor:
    return Executor(plan, {"sim0": SimBackend(SIM0, Machine())}, {})


def test_an_executor_takes_what_verify_made_and_nothing_else() -> None:
    class Alike:
        plan, certificate = PLAN, verify(PLAN).certificate

    for fake in (PLAN, Alike()):
        with pytest.raises(TypeError, match="takes what verify made, got"):
            bare(fake)
    with pytest.raises(InputError, match=r"'\S+': expected \d+ bytes on sim0, got nothing"):
        bare(verify(PLAN))


def test_what_verify_made_cannot_be_changed() -> None:
    values = dict(PLAN.schedule.values)
    regions = dict(PLAN.memory.regions)
    plan = replace(
        PLAN,
        schedule=replace(PLAN.schedule, values=values),
        memory=replace(PLAN.memory, regions=regions),
    )
    verified = verify(plan)
    regions["y"] = regions["h"]
    assert verified.plan.memory.regions["y"] == PLAN.memory.regions["y"]
    held = verified.plan
    tables: list[Mapping[str, object]] = [
        held.schedule.values,
        held.schedule.carried,
        held.memory.regions,
        held.memory.buffers,
        held.graph.updates,
        held.schedule.splits.placement.of,
    ]
    for table_ in tables:
        with pytest.raises(TypeError):
            table_["y"] = None  # type: ignore[index]
    with pytest.raises(AttributeError, match="cannot be changed: plan"):
        verified.plan = PLAN  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot be changed: del plan"):
        del verified.plan
    lists = replace(plan, schedule=replace(plan.schedule, commands=list(plan.schedule.commands)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        verify(replace(PLAN, schedule=lists.schedule)).plan.schedule.commands.clear()  # type: ignore[attr-defined]


def test_a_plan_that_does_not_wait_for_its_end_is_made_only_where_runs_may_overlap() -> None:
    plain = make_plan(GRAPH, [SIM0], Options())
    overlapped = make_plan(GRAPH, [SIM0], Options(overlap=True))
    assert plain.certificate.ends_complete and not overlapped.certificate.ends_complete
    planning = run_passes(begin(GRAPH, [SIM0], Options(overlap=True)))
    forged = replace(planning, options=Options(), verify=None)
    with pytest.raises(PlanError, match="ends while its work goes on"):
        run_passes(forged)


def test_names_of_states(device: str = "sim0") -> None:
    """A run that fails tears no state where the plan overwrites none."""
    graph = table(1)
    assert not graph.leaves(Kind.STATE)
    backend = SimBackend(SIM0, Machine())
    verified: VerifiedPlan = make_plan(graph, [SIM0])
    memory = backend.load(
        next(b for b in verified.plan.memory.buffers.values() if b.external),
        graph["w"],
        np.ones((4, 4), np.float32),
    )
    executor = Executor(verified, {device: backend}, {"w": memory})
    feeds: dict[str, Array] = {"ids": np.array([9], np.int32)}
    with pytest.raises(InputError):
        executor.run(feeds)
    assert executor.torn == frozenset()
