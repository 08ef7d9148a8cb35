"""Two graphs share a tensor, and each is planned as if it were alone."""

from functools import partial

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import planned_apart
from ggraph.hazards.parts import GPU, E, T, linear, norm
from ggraph.tensor import input, weight

FIRST = ("write:x", "copy:x", "shared.rms", "shared")
LISTED = ("shared", "squared", "other", "reader")


def both() -> Graph:
    """Graph one makes `shared` [T, E]; graph two does other work, then reads it."""
    shared = norm(input("x", (T, E)), "shared")
    other = linear(ops.sqr(weight("table", (T, E)), name="squared"), "other")
    return Graph.of({"y": other + linear(shared, "reader")}, name="two graphs")


HAZARDS = (
    Hazard(
        "21",
        21,
        "A tensor of an earlier graph is used by a later one, whose plan does not know it",
        ("ggml #999",),
        "The allocator planned the second graph over the same buffer. A tensor of the first graph "
        "that the second one reads had its address already, so the plan neither placed nor spared "
        "it, and the second graph's own tensors were laid over it. No race: always wrong.",
        both,
        (GPU,),
        Recipe("ggml", listed=LISTED),
        "both graphs are planned as one, so that the shared tensor lives until its last reader",
        Recipe(
            "ggml",
            listed=LISTED,
            layout=partial(planned_apart, first=FIRST),
        ),
        Expected("stale", "squared", "reader"),
    ),
)
