"""Work moves to a stream that was created later, its events do not."""

from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import launches_on
from ggraph.hazards.parts import GPU, E, T, linear, norm
from ggraph.tensor import input


def layer() -> Graph:
    """x [T, E] -> y [T, E]."""
    h = linear(norm(input("x", (T, E)), "norm"), "up")
    return Graph.of({"y": linear(h, "y")}, name="layer")


HAZARDS = (
    Hazard(
        "25",
        25,
        "A stream created on first use does not wait for the stream it takes over from",
        ("vLLM #56382", "vLLM #41834"),
        "A side stream is created when it is first wanted, and work continues there. What was "
        "already queued on the old stream is not waited for.",
        layer,
        (GPU,),
        Recipe("ggml", streams=2, on_stream={"up": 1, "norm": 0, "norm.rms": 0, "y": 0}),
        "the new stream begins by waiting for an event of the old one",
        Recipe("ggml", faults=(launches_on("up", 1),)),
        Expected("race", "norm", "up"),
    ),
)
