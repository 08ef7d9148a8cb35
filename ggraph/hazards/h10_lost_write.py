"""An op that writes through an alias runs where the bytes are not."""

from ggraph import ops
from ggraph.dtype import I64
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import runs_on, still_means
from ggraph.hazards.parts import GPU, GPU1, E, T, linear
from ggraph.tensor import input, state


def recurrent() -> Graph:
    """y [T, E] reads the state's rows of earlier steps, then this step's rows are stored."""
    x, old = input("x", (T, E)), state("memory", (8, E))
    y = linear(ops.rows(old, 0, T), "read") + x
    stored = ops.set_rows(old, linear(x, "write"), input("ids", (T,), I64), name="stored")
    return Graph.of({"y": y}, also=[stored], name="recurrent state")


HAZARDS = (
    Hazard(
        "10",
        10,
        "A write through an alias is lost: it went to the copy on another device",
        ("llama.cpp #27311",),
        "The scheduler copies operands to the device that runs a node, and nothing back. A node "
        "that writes into its operand on another device therefore writes into the copy. There is "
        "no race: every order gives the same wrong values, from the second step on.",
        recurrent,
        (GPU, GPU1),
        Recipe(),
        "an overwriting op runs where the overwritten bytes are",
        Recipe(
            "ggml",
            split=runs_on({"stored": "sim1"}),
            faults=(still_means({"memory": "stored"}),),
        ),
        Expected("stale", "", "read"),
    ),
)
