"""What a hazard is: a published race as graph, bad plan, fixed plan, and verdict.

The nouns of the corpus, and `plan_of`, which follows a `Recipe`. A recipe is the pipeline's list of
passes with another engine's habits in the place of some of them; it never says at which offset
anything lies. One file per hazard holds one or more `Hazard` records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ggraph.alloc import allocate
from ggraph.device import DeviceSpec
from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.place import place
from ggraph.plan import MemoryMap, Placement, Plan, Schedule, Splits
from ggraph.split import split

Fault = Callable[[Schedule], Schedule]


@dataclass(frozen=True)
class Recipe:
    """How one plan of a hazard is made.

    `memory` is the allocator's mode, `listed` a list order of the nodes other than the graph's own,
    `on_stream` another engine's choice of streams. `faults` change the schedule before memory is
    laid out; `split` and `layout` stand in for those passes where the engine's own one is at fault.
    """

    memory: str = "hb"
    streams: int = 1
    copies: int = 1
    overlap: bool = False
    forced_sync: tuple[str, ...] = ()
    on_stream: Mapping[str, int] = field(default_factory=dict)
    listed: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    split: Callable[[Placement], Splits] = split
    layout: Callable[[Schedule], MemoryMap] | None = None


@dataclass(frozen=True)
class Expected:
    """The verifier's counter-example: its kind, and the labels of the two commands in question.

    A label is "" where the kind knows no such command.
    """

    kind: str
    first: str = ""
    second: str = ""


@dataclass(frozen=True, eq=False)
class Hazard:
    """One entry of the corpus.

    `row` is the number in docs/hazards.md. Without `bad` and `expected` the entry documents that a
    plan is sound, or that a fault is out of reach. `others` are further plans whose price is shown,
    such as upstream's workaround. Integer inputs are distinct numbers below 8. With `agreement`
    the output "logits" is also compared by the token that each row would draft.
    """

    id: str
    row: int
    title: str
    upstream: tuple[str, ...]
    story: str
    build: Callable[[], Graph]
    devices: tuple[DeviceSpec, ...]
    fixed: Recipe
    repair: str
    bad: Recipe | None = None
    expected: Expected | None = None
    others: Mapping[str, Recipe] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    runs: int = 2
    agreement: bool = False


def plan_of(hazard: Hazard, recipe: Recipe) -> Plan:
    """The plan that `recipe` makes of the hazard's graph; nobody has verified it.

    Raises PlanError where a pass refuses.
    """
    return planned(hazard.build(), hazard.devices, recipe, hazard.pins)


def planned(
    graph: Graph, devices: Sequence[DeviceSpec], recipe: Recipe, pins: Sequence[str] = ()
) -> Plan:
    """The plan that `recipe` makes of any graph; nobody has verified it."""
    if recipe.listed:
        graph = listed(graph, recipe.listed)
    splits = recipe.split(place(graph, devices, pins))
    schedule = order(
        splits,
        streams=recipe.streams,
        n_copies=recipe.copies,
        forced_sync=recipe.forced_sync,
        overlap=recipe.overlap,
        on_stream=recipe.on_stream,
    )
    for fault in recipe.faults:
        schedule = fault(schedule)
    memory = recipe.layout(schedule) if recipe.layout else allocate(schedule, mode=recipe.memory)
    return Plan(schedule, memory)


def listed(graph: Graph, names: tuple[str, ...]) -> Graph:
    """The graph with its nodes in the order of `names`, each after what it needs; others last."""
    if unknown := {n for n in names if graph.get(n) is None}:
        raise PlanError(f"graph {graph.name!r} has no {', '.join(sorted(unknown))} to list")
    done: dict[str, None] = {}

    def put(name: str) -> None:
        if name not in done:
            for s in graph[name].sources:
                put(s.name)
            done[name] = None

    for name in (*names, *(t.name for t in graph)):
        put(name)
    return replace(graph, tensors=tuple(graph[n] for n in done))
