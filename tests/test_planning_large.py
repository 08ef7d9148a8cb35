"""Planning large graphs: the work grows with the graph, not with its square.

All passes are run, `verify` included, and what they do is counted, not timed.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from growth_kit import work

from ggraph import Graph, Tensor, input, ops, state, weight
from ggraph.device import DeviceSpec
from ggraph.pipeline import Options, make_plan

WIDTH = 8
ONE = DeviceSpec("d", "sim", host_visible=True)
FOUR = DeviceSpec("d", "sim", streams=4, copy_streams=1)
TWO = (DeviceSpec("d", "sim", streams=2), DeviceSpec("e", "sim", host_visible=True))


def recurrence(steps: int) -> list[Tensor]:
    """A cell, step by step over the rows of one input."""
    u = weight("u", (WIDTH, WIDTH))
    x, h = input("x", (steps, WIDTH)), input("h", (1, WIDTH))
    for t in range(steps):
        h = h + ops.tanh(ops.mul_mat(u, h) + x[t : t + 1])
    return [h]


def in_place(steps: int) -> list[Tensor]:
    """A chain of results each of which may replace the one before."""
    x = input("x", (1, WIDTH))
    for _ in range(steps):
        x = ops.tanh(x)
    return [x]


def overwritten(steps: int) -> list[Tensor]:
    """A state that every step writes a row of and reads."""
    cache, at, x = state("c", (steps, WIDTH)), input("at", (1,), "i32"), input("x", (1, WIDTH))
    for t in range(steps):
        cache = ops.set_rows(cache, x, at)
        x = ops.tanh(x + cache[t : t + 1])
    return [x]


def branches(steps: int) -> list[Tensor]:
    """Branches that fork from one result and are joined."""
    u, x = weight("u", (WIDTH, WIDTH)), input("x", (1, WIDTH))
    for _ in range(steps):
        x = ops.tanh(ops.mul_mat(u, x)) + ops.sigmoid(ops.mul_mat(u, x))
    return [x]


def read_by_all(steps: int) -> list[Tensor]:
    """One input that every step reads, as a mask is."""
    u, x = weight("u", (WIDTH, WIDTH)), input("x", (1, WIDTH))
    h = input("h", (1, WIDTH))
    for _ in range(steps):
        h = ops.tanh(ops.mul_mat(u, h)) + x
    return [h]


def wide(steps: int) -> list[Tensor]:
    """A product of each row of the input, all made before the first step folds one in."""
    u, x, h = weight("u", (WIDTH, WIDTH)), input("x", (steps, WIDTH)), input("h", (1, WIDTH))
    made = [ops.mul_mat(u, x[t : t + 1]) for t in range(steps)]
    for m in made:
        h = ops.tanh(ops.mul_mat(u, h) + m)
    return [h]


Case = tuple[Callable[[int], list[Tensor]], Sequence[DeviceSpec], Options]
CASES: dict[str, Case] = {
    "a recurrence": (recurrence, (ONE,), Options()),
    "a recurrence, runs overlapping": (recurrence, (FOUR,), Options(overlap=True, copies=2)),
    "results in place": (in_place, (ONE,), Options()),
    "a state overwritten": (overwritten, (ONE,), Options()),
    "branches on four streams": (branches, (FOUR,), Options(streams=4)),
    "one input read by all, on two devices": (read_by_all, TWO, Options()),
    "branches on two devices": (branches, TWO, Options(pins=("sigmoid.*=e",))),
}


@pytest.mark.parametrize("name", CASES)
def test_four_times_the_graph_takes_about_four_times_the_work(name: str) -> None:
    build, devices, options = CASES[name]
    graphs = Graph.of(build(30)), Graph.of(build(120))
    plans = (partial(make_plan, g, devices, options) for g in graphs)
    small, large = (work(plan)[1] for plan in plans)
    assert large.lines < 4 * 1.1 * small.lines
    assert not large.steeper(small, 4 * 1.5)


def test_planning_leaves_no_cycles_and_does_not_look_for_them() -> None:
    """The search for cycles rests while a plan is made, so that none may be left behind."""
    build, devices, options = next(iter(CASES.values()))
    graph, was = Graph.of(build(30)), gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        make_plan(graph, devices, options)
        assert not gc.isenabled(), "who had put it to rest finds it so"
        assert gc.collect() == 0
        gc.enable()
        make_plan(graph, devices, options)
        assert gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()
