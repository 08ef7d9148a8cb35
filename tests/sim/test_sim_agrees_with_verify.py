"""`verify` and the simulator agree: certified plans never fault, refused ones fault in some order.

The two share no code: one reasons about all executions, the other performs some and tags bytes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, SIM2, feeds, schedule_of, tiny, weights

from ggraph.alloc import allocate
from ggraph.backends.sim import Adversarial, Order, Random, Simulator
from ggraph.device import DeviceSpec
from ggraph.plan import Certificate, Plan
from ggraph.verify import CounterExample, examine

WAYS: dict[str, tuple[tuple[DeviceSpec, ...], tuple[str, ...], dict[str, int]]] = {
    "one cpu": ((CPU,), (), {}),
    "one sim": ((SIM0,), (), {}),
    "layers": ((SIM0, SIM1, CPU), (), {"sim0": 1, "sim1": 1}),
    "through the host": ((SIM0, SIM2), (), {"sim0": 1, "sim2": 1}),
    "pins": ((SIM0, SIM1, CPU), (r"blk\.1\.(q|v)\.weight=sim1", r"^head=cpu"), {}),
    "cache elsewhere": ((SIM0, SIM1, CPU), (r"cache\.0=sim1", r"cache\.1=cpu"), {}),
}
OPTIONS: tuple[dict[str, int | bool], ...] = (
    {},
    {"streams": 4},
    {"streams": 2, "n_copies": 2, "overlap": True},
)
GRAPH = tiny()
WEIGHTS, FEEDS = weights(GRAPH), feeds(GRAPH, 3)


def plan_of(way: str, options: dict[str, int | bool], mode: str) -> Plan:
    devices, pins, layers = WAYS[way]
    schedule = schedule_of(GRAPH, devices, pins, layers, **options)
    return Plan(schedule, allocate(schedule, mode=mode))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", ["hb", "ggml"])
def test_verdict_and_execution_agree(way: str, options: dict[str, int | bool], mode: str) -> None:
    plan = plan_of(way, options, mode)
    verdict = examine(plan)
    is_sound = isinstance(verdict, Certificate)
    simulator = Simulator(plan, WEIGHTS)
    orders: list[Order] = [Random(seed) for seed in range(20)]
    if isinstance(verdict, CounterExample) and verdict.first and verdict.second:
        commands = plan.schedule.commands  # a race may show in few orders: this one is such
        first, second = (commands[s.index].label for s in (verdict.first, verdict.second))
        orders.append(Adversarial(first, second))
    faulty = any(simulator.run(FEEDS, order).faults for order in orders)
    assert is_sound != faulty, (way, options, mode)
    assert is_sound or mode == "ggml", "the planner's own modes are sound by construction"


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(WAYS)), st.sampled_from(OPTIONS))
def test_planned_memory_gives_the_unsplit_values(
    seed: int, way: str, options: dict[str, int | bool]
) -> None:
    wanted = Simulator(plan_of("one cpu", {}, "hb"), WEIGHTS).run(FEEDS)
    got = Simulator(plan_of(way, options, "hb"), WEIGHTS).run(FEEDS, Random(seed))
    assert not got.faults
    for a, b in zip(got.outputs, wanted.outputs, strict=True):
        assert a["y"].tobytes() == b["y"].tobytes()
