"""Inputs of the next micro-batch overtake the computation of this one."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, E, T, linear, norm
from ggraph.tensor import input, state


def ubatch() -> Graph:
    """x [T, E] -> logits [T, E]; after them x is read once more, for the next batch's use."""
    x, old = input("x", (T, E)), state("carry", (T, E))
    logits = linear(norm(x + old, "norm"), "out")
    kept = ops.cpy(linear(x, "mtp"), old, name="kept")
    return Graph.of({"logits": logits}, also=[kept], name="micro-batch")


HAZARDS = (
    Hazard(
        "08",
        8,
        "Several micro-batches: inputs of the next one are uploaded over those in use",
        ("llama.cpp #27572", "llama.cpp #27579", "llama.cpp #27506", "llama.cpp #27311"),
        "A prompt longer than one micro-batch sets its inputs again while the first one computes. "
        "The upload runs on its own stream and waited for nothing. Perplexity rose to 986,205, "
        "where it should have been 79.64.",
        ubatch,
        (GPU,),
        Recipe("ggml", overlap=True),
        "the upload waits for the end of the step before",
        Recipe(
            "ggml",
            overlap=True,
            faults=(forgets_wait("end:sim0.0", on="sim0.4"), forgets_wait("end:sim0.0", on="host")),
        ),
        Expected("race", "mtp", "copy:x"),
        {"inputs in two slots": Recipe("ggml", overlap=True, copies=2)},
        runs=3,
        agreement=True,
    ),
)
