"""An event that is recorded before the copy whose end it should mark."""

from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import records_early
from ggraph.hazards.parts import GPU, GPU1, E, T, linear
from ggraph.tensor import input


def two_gpus() -> Graph:
    """The first product on sim0, the second on sim1."""
    return Graph.of({"y": linear(linear(input("x", (T, E)), "a"), "b.y")}, name="two devices")


HAZARDS = (
    Hazard(
        "14",
        14,
        "Cross-device copy: the event is recorded in another command buffer than the copy",
        ("llama.cpp #19402",),
        "On Metal the copy and the event that marks its end were put into different command "
        "buffers. The event could be signalled while the copy was still running.",
        two_gpus,
        (GPU, GPU1),
        Recipe("ggml"),
        "the event is recorded behind the copy, in the same queue",
        Recipe("ggml", faults=(records_early("after:copy:a@sim1"),)),
        Expected("race", "copy:a@sim1", "y"),
        pins=("^a=sim0", "^b=sim1"),
    ),
)
