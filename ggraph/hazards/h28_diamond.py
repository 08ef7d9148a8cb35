"""A diamond whose second branch is put in place over the common source."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, norm
from ggraph.tensor import input

STREAMS = {"a.rms": 0, "a": 0, "b.rms": 1, "b": 1, "y": 0}


def diamond() -> Graph:
    """x [T, E] -> two norms -> their sum: the smallest graph with this race (facts G3)."""
    x = input("x", (T, E))
    return Graph.of({"y": ops.add(norm(x, "a"), norm(x, "b"))}, name="diamond")


HAZARDS = (
    Hazard(
        "28",
        28,
        "Diamond on two streams: the second branch works in place over the common source",
        ("ONNX Runtime #7645", "ONNX Runtime #19480", "ONNX Runtime #4829", "ONNX Runtime #32342"),
        "In list order the first branch has read x when the second is placed, so x has one reader "
        "left and the second branch may take its bytes. On two streams the first branch may still "
        "be reading them.",
        diamond,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS),
        "in place only if every other reader is done in every order",
        Recipe("ggml", streams=2, on_stream=STREAMS),
        Expected("race", "a.rms", "b.rms"),
        {"one stream": Recipe("ggml")},
    ),
)
