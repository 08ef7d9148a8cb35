"""Negative control: a race between the threads of one kernel."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input


def step() -> Graph:
    """A softmax, whose kernel shares partial sums between threads: x [T, E] -> y [T, E]."""
    return Graph.of({"y": ops.soft_max(linear(input("x", (T, E)), "scores"))}, name="one kernel")


HAZARDS = (
    Hazard(
        "33",
        33,
        "Negative control: a missing barrier inside a kernel is out of a plan's reach",
        ("llama.cpp #13294", "llama.cpp #13299", "llama.cpp #28475", "SGLang #34297"),
        "A kernel shared partial sums between warps without a barrier. A plan says what a kernel "
        "reads and writes, not how its threads do it: the plan is sound and is accepted, and the "
        "fault is still there. Tools such as racecheck find it.",
        step,
        (GPU,),
        Recipe("ggml"),
        "outside of this corpus: a barrier in the kernel",
    ),
)
