"""A captured graph against the verified plan that it came from. NumPy is all it needs.

The plan's side is the verifier's own order (`ggraph.verify.clocks`), the graph's side its edges.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ggraph.backends.cuda import CudaBackend
from ggraph.backends.cuda.lower import emit
from ggraph.backends.cuda.lowering import Lowering
from ggraph.execute import Executor
from ggraph.plan import HOST_STEPS, Do, VerifiedPlan
from ggraph.verify.clocks import clocks


class Recording(CudaBackend):
    """Keeps every graph that it captures."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: list[Any] = []

    def _captured(self, streams: Any, enqueue: Any) -> Any:
        self.made.append(super()._captured(streams, enqueue))
        return self.made[-1]


def nodes_by_command(
    cuda: CudaBackend, executor: Executor, verified: VerifiedPlan
) -> dict[int, list[int]]:
    """Numbers of the graph's nodes for each command, in enqueue order; host steps have none.

    Neighbouring launches of a stream are lowered together, as runs do it.
    """
    found: dict[int, list[int]] = {}
    at = 0
    commands = enumerate(verified.plan.schedule)
    for (do, _), run in groupby(commands, lambda c: (c[1].do, c[1].actor)):
        low = Lowering(cuda)
        for i, c in run:
            before = len(low.steps)
            if do is Do.LAUNCH:
                emit(low, executor._launch(c, 0))
            count = len(low.steps) - before + (do is Do.COPY)
            if count:
                found[i] = list(range(at, at + count))
            at += count
    return found


def lost_orderings(
    verified: VerifiedPlan, nodes: dict[int, list[int]], edges: Sequence[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """How many orderings of commands the verifier relied on, and those that no path of the graph
    keeps. The graph's nodes are numbered in enqueue order, so all edges go upwards."""
    count = max((n for held in nodes.values() for n in held), default=-1) + 1
    before: list[set[int]] = [set() for _ in range(count)]
    for a, b in sorted(edges, key=lambda e: e[1]):
        before[b] |= {a} | before[a]
    order = clocks(list(verified.plan.schedule), 1)
    wanted = [(i, j) for i in nodes for j in nodes if i < j and order.ordered(i, j)]
    return len(wanted), [(i, j) for i, j in wanted if nodes[i][-1] not in before[nodes[j][0]]]


def waits_between(verified: VerifiedPlan) -> list[int]:
    """Host steps with device work before and after them that wait or read: what no capture may
    hide. Host writes may go first, which `ggraph.execute` sees to."""
    schedule = list(verified.plan.schedule)
    device = [i for i, c in enumerate(schedule) if c.do not in HOST_STEPS]
    waiting = (Do.HOST_SYNC, Do.HOST_READ)
    return [i for i, c in enumerate(schedule) if c.do in waiting and device[0] < i < device[-1]]
