"""The fallback for a missing asynchronous read does not wait for queued work."""

from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_sync
from ggraph.hazards.parts import IGPU, E, T, linear, norm
from ggraph.tensor import input


def step() -> Graph:
    """x [T, E] -> y [T, E]."""
    return Graph.of({"y": linear(norm(input("x", (T, E)), "norm"), "out")}, name="step")


HAZARDS = (
    Hazard(
        "13",
        13,
        "A backend without asynchronous get: the blocking copy overtakes the queue",
        ("llama.cpp #19179",),
        "Where a backend has no asynchronous get, the caller falls back to the blocking one. That "
        "one reads the memory at once, although the kernels that fill it are only queued.",
        step,
        (IGPU,),
        Recipe("ggml"),
        "the fallback synchronises with the queue first",
        Recipe("ggml", faults=(forgets_sync("end of run"),)),
        Expected("race", "y", "read:y"),
    ),
)
