"""How planning grows: commands, seconds of this process, seconds of each pass.

    python bench/planning.py [--commands 20000]

The graphs are those of tests/test_planning_large.py, which counts the same work, and a recurrence
whose graph lists all that the steps need of the input before the first step, so that thousands of
values are alive at once: what that costs grows with the pairs of them. Bar: 20,000 commands in 5 s.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from test_planning_large import CASES, ONE, WIDTH

from ggraph import Graph, Tensor, input, ops, weight
from ggraph.pipeline import Options, make_plan


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


def main() -> None:
    """Plan each graph at a quarter of the size and at the size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=20_000)
    wanted = parser.parse_args().commands
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
