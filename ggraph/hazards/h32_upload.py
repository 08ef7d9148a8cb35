"""A kernel starts before the upload of its input is complete."""

from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input


def step() -> Graph:
    """x [T, E] -> y [T, E]."""
    return Graph.of({"y": linear(linear(input("x", (T, E)), "h"), "out")}, name="executable")


HAZARDS = (
    Hazard(
        "32",
        32,
        "Host-to-device stream and compute stream: no event carries the upload over",
        ("ROCm/xla #964", "ROCm/xla #839"),
        "Inputs are uploaded on a stream of their own. The event of the producer was not attached "
        "to the buffer, so the kernel did not wait for it.",
        step,
        (GPU,),
        Recipe("ggml"),
        "the consumer waits for the producer's event",
        Recipe("ggml", faults=(forgets_wait("after:copy:x", on="sim0.0"),)),
        Expected("race", "copy:x", "h"),
    ),
)
