"""A pipeline's copy slot is overwritten while the next device still reads it."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, GPU1, E, T, linear
from ggraph.tensor import input, state


def pipeline() -> Graph:
    """The first half of a model on sim0, the second on sim1; sim1 reads h once more at the end."""
    h = ops.silu(linear(input("x", (T, E)), "first.up"), name="first.h")
    old = state("second.carry", (T, E))
    logits = linear(h + old, "second.out")
    kept = ops.cpy(linear(h, "second.late"), old, name="second.kept")
    return Graph.of({"logits": logits}, also=[kept], name="pipeline")


HAZARDS = (
    Hazard(
        "11",
        11,
        "Pipeline over two GPUs: the copy for step k+1 lands in a slot that step k still reads",
        ("llama.cpp #17795", "llama.cpp #20463", "llama.cpp #20793", "llama.cpp #25138"),
        "The activation goes from one GPU to the next. The wait for the slot was queued on another "
        "stream than the one that copies, so the copy of a later step did not wait for the reads "
        "of this one. Attempts to drop synchronisations here were reverted twice.",
        pipeline,
        (GPU, GPU1),
        Recipe("ggml", overlap=True, copies=2),
        "the copying stream waits for the readers of the slot",
        Recipe(
            "ggml",
            overlap=True,
            copies=2,
            faults=(forgets_wait("end:sim1.0"),),
        ),
        Expected("race", "second.late", "copy:first.h@sim1"),
        {"one step at a time": Recipe("ggml")},
        pins=("first.*=sim0", "second.*=sim1"),
        runs=3,
        agreement=True,
    ),
)
