"""How planning grows, and what a step of a model takes until it can run.

    python bench/planning.py [--commands 20000]
    python bench/planning.py --model FILE [--rows 1 5 128] [--rounds 5]

With a model: milliseconds of this process for building its graph, for each pass, and for binding
what was planned, the least of the rounds; weights are loaded and kernels compiled by then.
Without: commands, and seconds of this process. The graphs are those of
tests/test_planning_large.py, which counts the same work, and a recurrence whose graph lists all
that the steps need of the input before the first step, so that thousands of values are alive at
once: what that costs grows with the pairs of them. Bar: 20,000 commands in 5 s.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from test_planning_large import CASES, ONE, WIDTH

from ggraph import Graph, Tensor, input, ops, weight
from ggraph.decode.runner import Runner
from ggraph.env import uncollected
from ggraph.execute import Executor
from ggraph.face import unscoped
from ggraph.pipeline import PASSES, Options, begin, make_plan
from models.registry import Model, open_model
from models.run.load import open_session

CONTEXT = 256  # slots that a step of a model sees
Made = TypeVar("Made")


def gated(steps: int) -> list[Tensor]:
    """A gated cell, step by step over the rows of one input."""
    w, u = weight("w", (4 * WIDTH, WIDTH)), weight("u", (4 * WIDTH, WIDTH))
    b, x = weight("b", (4 * WIDTH,)), input("x", (steps, WIDTH))
    h, c = input("h", (1, WIDTH)), input("c", (1, WIDTH))
    for t in range(steps):
        g = ops.mul_mat(w, x[t : t + 1]) + ops.mul_mat(u, h) + b
        i, f, o, z = (g[:, k * WIDTH : (k + 1) * WIDTH] for k in range(4))
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(z)
        h = ops.sigmoid(o) * ops.tanh(c)
    return [h]


def stages(model: Model, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each stage of a step of `rows` rows, the least of the rounds."""
    least: dict[str, float] = {}
    with open_session() as session:
        runner = Runner(model, session, CONTEXT)
        shape = runner.shape(rows, rows, rows)
        runner.plan(shape)
        for _ in range(rounds):
            for stage, seconds in _round(runner, rows).items():
                least[stage] = min(1e3 * seconds, least.get(stage, seconds * 1e3))
    return least


def _round(runner: Runner, rows: int) -> dict[str, float]:
    """Seconds of each stage, as `Session.prepare` goes through them."""
    session, shape, took = runner.session, runner.shape(rows, rows, rows), dict[str, float]()

    def timed(stage: str, work: Callable[[], Made]) -> Made:
        begun = time.process_time()
        made = work()
        took[stage] = time.process_time() - begun
        return made

    with uncollected():
        graph = timed("build", lambda: runner.model.build(shape))
        specs = [b.spec for b in session.backends.values()]
        planning = begin(graph, specs, session.options)
        with unscoped():
            for title, step in PASSES:
                planning = timed(title, lambda step=step, p=planning: step(p))  # type: ignore[misc]
        assert planning.verify is not None, "the last pass"
        verified, external = planning.verify, session._external
        timed("bind", lambda: Executor(verified, session.backends, external)).close()
    return took


def main() -> None:
    """Plan each graph at a quarter of the size and at the size, or steps of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 5, 128])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.model is not None:
        for rows in given.rows:
            found = stages(open_model(given.model), rows, given.rounds)
            parts = ", ".join(f"{stage} {ms:.1f}" for stage, ms in found.items() if ms >= 0.05)
            print(f"{rows:>4} rows: {sum(found.values()):6.1f} ms: {parts}")
        return
    wanted = given.commands
    for name, (build, devices, options) in {
        **CASES,
        "a gated cell": (gated, (ONE,), Options()),
    }.items():
        a_step = len(make_plan(Graph.of(build(20)), devices, options).plan.schedule.commands) / 20
        for commands in (wanted // 4, wanted):
            graph = Graph.of(build(int(commands / a_step)))
            begun = time.process_time()
            made = make_plan(graph, devices, options)
            seconds = time.process_time() - begun
            print(f"{name:32} {len(made.plan.schedule.commands):>7} commands {seconds:6.2f} s")


if __name__ == "__main__":
    main()
