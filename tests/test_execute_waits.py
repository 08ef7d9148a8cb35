"""A wait that is proved is kept: also the CPU's, which has no queue, for another device's event."""

from dataclasses import replace

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.sim import InOrder, Machine, Random, SimBackend, sim_spec
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Actor, Command, Do, Plan
from ggraph.tensor import input
from ggraph.verify import verify

CPU, SIM = open_backend("cpu", threads=1), sim_spec("sim0")
STREAM = Actor("cpu", 0)


def two_devices() -> Plan:
    """h = x + 1 on the device, y = 10 h on the CPU."""
    h = ops.scale(input("x", (4,)), 1.0, 1.0, name="h")
    graph = Graph.of({"y": ops.scale(h, 10.0, name="y")})
    options = Options(pins=("^h$=sim0", "^y$=cpu"), rewrites=False)
    return make_plan(graph, [SIM, CPU.spec], options).plan


def stream_waits(c: Command) -> list[Command]:
    """The CPU's stream waits for the event where the host did."""
    waits = c.do is Do.HOST_SYNC and c.event
    return [replace(c, do=Do.WAIT, actor=STREAM)] if waits else [c]


def stream_copies(c: Command) -> list[Command]:
    """The CPU's stream waits for the work itself, and fetches the result."""
    if c.do is Do.HOST_SYNC and c.event:
        return []
    fetches = (c.do is Do.COPY and c.node == "h@cpu") or (
        c.do in (Do.RECORD, Do.WAIT) and c.actor == Actor("sim0", 5)
    )
    return [replace(c, actor=STREAM)] if fetches else [c]


@pytest.mark.parametrize("order", [InOrder(), *map(Random, range(4))])
@pytest.mark.parametrize("edit", [stream_waits, stream_copies])
def test_the_cpu_waits_for_another_devices_event(edit: object, order: object) -> None:
    plan = two_devices()
    commands = tuple(k for c in plan.schedule for k in edit(c))  # type: ignore[operator]
    waits = [c for c in commands if c.do is Do.WAIT and c.actor == STREAM]
    assert waits, "nothing to be waited for"
    proved = verify(replace(plan, schedule=replace(plan.schedule, commands=commands)))
    sim = SimBackend(SIM, Machine(order))  # type: ignore[arg-type]
    executor = Executor(proved, {"sim0": sim, "cpu": CPU}, {})
    for k in (1, 2, 3):
        assert executor.run({"x": np.full(4, k, np.float32)})["y"].tolist() == [10.0 * (k + 1)] * 4


def test_the_cpu_does_not_wait_for_itself() -> None:
    """What is recorded on its own stream is done; asking would cost a call per event."""
    plan = two_devices()
    mark = Command(Do.RECORD, STREAM, "own", event="own")
    end = plan.schedule.commands[-2:]
    own = (mark, replace(mark, do=Do.WAIT))
    commands = (*plan.schedule.commands[:-2], *own, *end)
    proved = verify(replace(plan, schedule=replace(plan.schedule, commands=commands)))
    sim = SimBackend(SIM, Machine())
    run = Executor(proved, {"sim0": sim, "cpu": CPU}, {}).run
    assert run({"x": np.ones(4, np.float32)})["y"].tolist() == [20.0] * 4
