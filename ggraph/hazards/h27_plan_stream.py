"""The stream that prepares the next step overwrites what this step still reads."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import state

PLAN = ("plan.map", "plan.kept")
FORWARD = ("y", "forward.late", "forward.kept")
STREAMS = {**dict.fromkeys(PLAN, 1), **dict.fromkeys(FORWARD, 0)}
LISTED = (*PLAN, *FORWARD)


def step() -> Graph:
    """The plan stream makes a map [T, E] from the lengths; the forward pass reads it."""
    lens, memory = state("seq_lens", (T, E)), state("memory", (T, E))
    mapped = ops.scale(lens, 1.5, 0.25, name="plan.map")
    grown = ops.cpy(mapped, lens, name="plan.kept")
    out = linear(memory, "out")
    late = ops.cpy(linear(mapped, "forward.late"), memory, name="forward.kept")
    return Graph.of({"y": out}, also=[grown, late], name="plan and forward")


HAZARDS = (
    Hazard(
        "27",
        27,
        "A plan stream beside the forward pass writes the next index map too early",
        ("SGLang #28034", "SGLang #22113", "SGLang #26380"),
        "One stream prepares indices, another runs the model. The model waited for the indices; "
        "nothing made the next step's indices wait for the model. A barrier both ways cost 4 %.",
        step,
        (GPU,),
        Recipe("ggml", streams=2, overlap=True, on_stream=STREAMS, listed=LISTED),
        "the plan stream waits for the end of the forward pass of the step before",
        Recipe(
            "ggml",
            streams=2,
            overlap=True,
            on_stream=STREAMS,
            listed=LISTED,
            faults=(forgets_wait("end:sim0.0"),),
        ),
        Expected("race", "forward.late", "plan.map"),
        runs=3,
    ),
)
