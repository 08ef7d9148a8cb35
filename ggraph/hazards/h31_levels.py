"""An executor runs all nodes of a level at once, over memory planned for a list."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T
from ggraph.tensor import input, state, weight

STREAMS = {"shifted": 0, "scored": 1, "kept": 0, "squashed": 1, "y": 1}
LISTED = ("shifted", "kept", "scored", "squashed", "y")


def shift_register() -> Graph:
    """buf [2T, E] takes x [T, E] at its end; beside it x is scored: y [T, E]."""
    x, buf = input("x", (T, E)), state("buf", (2 * T, E))
    shifted = ops.concat([ops.rows(buf, T, T), x], axis=0, name="shifted")  # [2T, E]
    kept = ops.cpy(shifted, buf, name="kept")
    scored = ops.mul_mat(weight("score.weight", (2 * E, E)), x, name="scored")  # [T, 2E]
    squashed = ops.reglu(ops.columns(scored, 0, E), ops.columns(scored, E, E), name="squashed")
    y = ops.add(squashed, ops.rows(kept, 0, T))
    return Graph.of({"y": y}, name="shift register")


HAZARDS = (
    Hazard(
        "31",
        31,
        "Level-parallel execution of a plan whose lifetimes follow a list",
        ("tinygrad #15698", "npatsakula/svod #86"),
        "A shift register is built by a concatenation and assigned to itself. Memory was planned "
        "in list order, where the concatenation is dead once it is assigned; the executor runs "
        "independent nodes at once. Without memory planning the result was right.",
        shift_register,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS, listed=LISTED),
        "lifetimes over happens-before instead of list positions",
        Recipe("ggml", streams=2, on_stream=STREAMS, listed=LISTED),
        Expected("race", "kept", "scored"),
        runs=3,
    ),
)
