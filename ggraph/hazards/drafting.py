"""A real drafter over plans that nobody proved: what a race does to acceptance.

`UnprovedSession` offers what a drafter needs of a session, plans every graph by
a recipe of the corpus, and replays it on the simulator: a refused plan under the adversarial order
of its own counter-example, a sound one as timed. Memory lives on from step to step, so a read that
comes too early finds what the step before left there, as on a device.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ggraph.arrays import WeightSource
from ggraph.backends.sim import Simulator
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.hazards.corpus import Recipe, planned
from ggraph.hazards.faults import forgets_waits_before
from ggraph.hazards.parts import GPU
from ggraph.hazards.run import adversary
from ggraph.plan import Plan
from ggraph.tensor import Array, Kind
from ggraph.verify import CounterExample, examine

# The three forms of the EAGLE-3 case, and the repair of the second, for any head.
DRAFT_RECIPES: Mapping[str, Recipe] = {
    "sound, one stream (01S)": Recipe("ggml"),
    "sound, two streams (01P fixed)": Recipe(streams=2),
    "host reads too early (01H)": Recipe(
        "ggml", faults=(forgets_waits_before("copy:logits@host"),)
    ),
    "two streams, list-order reuse (01P)": Recipe("ggml", streams=2),
}


@dataclass(frozen=True, eq=False)
class _Step:
    """One plan with its simulated memory, and why it is refused (None: it is sound)."""

    plan: Plan
    simulator: Simulator
    verdict: CounterExample | None


class UnprovedSession:
    """Runs graphs by `recipe` on one simulated device. `refused` collects the counter-examples of
    its plans, `plans` counts them, `faults` counts reads that found foreign bytes."""

    replays = False  # the simulator captures nothing, so chains go step by step

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.refused: list[CounterExample] = []
        self.plans = self.faults = 0
        self._steps: dict[Hashable, _Step] = {}
        self._weights: dict[str, Array] = {}
        self._states: dict[str, Array] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether a plan was prepared under `key`."""
        return key in self._steps

    def prepare(self, key: Hashable, build: Callable[[], Graph], weights: WeightSource) -> None:
        """Plan the graph for `key` and bind it to memory, the first time."""
        if key in self._steps:
            return
        graph = build()
        # Rows that are only read give the host nothing, so that it cannot come too early for them.
        drafts = any(t.name == "logits" for t in graph.outputs)
        recipe = self.recipe if drafts else replace(self.recipe, faults=())
        plan = planned(graph, (GPU,), recipe)
        verdict = examine(plan)
        for t in plan.graph.leaves(Kind.WEIGHT):
            if t.name not in self._weights:
                self._weights[t.name] = np.asarray(weights(t))
        refusal = verdict if isinstance(verdict, CounterExample) else None
        self.refused += [refusal] if refusal is not None else []
        self.plans += 1
        self._steps[key] = _Step(plan, Simulator(plan, self._weights), refusal)

    def inputs(self, key: Hashable) -> frozenset[str]:
        """Names of the inputs of the graph under `key`."""
        leaves = self._steps[key].plan.graph.leaves(Kind.INPUT)
        return frozenset(t.name for t in leaves)

    def run(self, key: Hashable, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One step. InputError when nothing was prepared under `key`."""
        if key not in self._steps:
            raise InputError(f"no plan was prepared for {key!r}")
        step = self._steps[key]
        for name, held in self._states.items():
            if name in step.plan.schedule.carried:
                step.simulator.write_state(name, held)
        order, _ = adversary(step.verdict, step.plan)
        done = step.simulator.run([_typed(step.plan.graph, feeds)], order, fresh=False)
        self._states.update(done.states)
        self.faults += len(done.faults)
        return dict(done.outputs[0])


def _typed(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The fed arrays in the types that the graph stores them in."""
    inputs = graph.leaves(Kind.INPUT)
    return {t.name: np.ascontiguousarray(feeds[t.name], t.dtype.np) for t in inputs}


__all__ = ["DRAFT_RECIPES", "UnprovedSession"]
