"""A fused kernel writes over an operand that its own threads still read."""

from functools import partial

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import before_fusing
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input, weight


def residual(fused: bool = True) -> Graph:
    """y = h + h W, in one kernel or in two: h [T, E] is the product's operand and the addend."""
    h, w = linear(input("x", (T, E)), "h"), weight("w", (E, E))
    one, two = ops.mul_mat_add(w, h, h, name="sum"), ops.mul_mat(w, h, name="product")
    total = one if fused else ops.add(h, two, name="sum")
    return Graph.of({"y": linear(total, "y")}, name="residual")


HAZARDS = (
    Hazard(
        "17",
        17,
        "A fused kernel is put in place over an operand that its own threads still read",
        ("llama.cpp #19768", "ggraph 1a12b36"),
        "Memory is laid out for single ops, and the backend fuses some of them afterwards. The sum "
        "alone may take its addend's bytes, since the product is done by then; in one kernel its "
        "first elements are written while others still need the operand below them. ggraph allowed "
        "itself the same once, with the fused op in its graph.",
        residual,
        (GPU,),
        Recipe("ggml"),
        "an op works in place only over bytes that no other source shows",
        Recipe("ggml", layout=partial(before_fusing, parts=partial(residual, False))),
        Expected("alias", "sum", ""),
    ),
)
