"""Two dispatches in one concurrent region: one reads a buffer, the other is tied to it."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input, state

STREAMS = {"y": 0, "update": 1, "tied": 1}


def region() -> Graph:
    """A state [T, E] is read by one dispatch and overwritten by another: y [T, E]."""
    held = state("held", (T, E))
    update = linear(input("x", (T, E)), "update")
    tied = ops.cpy(update, held, name="tied")
    return Graph.of({"y": linear(held, "reader")}, also=[tied], name="concurrent region")


HAZARDS = (
    Hazard(
        "29",
        29,
        "A dispatch that writes its tied operand runs beside one that reads it",
        ("IREE #14889", "IREE #14893", "IREE #19355"),
        "Two dispatches were put into one concurrent region. One reads the buffer; the other's "
        "result is tied to it and overwrites it. The region's hazards did not include tied users.",
        region,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS),
        "the writer of a tied operand waits for its readers",
        Recipe(
            "ggml", streams=2, on_stream=STREAMS, faults=(forgets_wait("after:y", on="sim0.1"),)
        ),
        Expected("race", "y", "tied"),
        runs=3,
    ),
)
