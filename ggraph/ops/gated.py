"""Which gated units of a graph are of two products of the same rows, and so may be one launch."""

from collections.abc import Container

from ggraph.tensor import Tensor, apply


def gated(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """The unit `t` with the products that only it reads (`lonely`, by name) as one op, for any
    number of rows; None where it is not of that kind."""
    gate, up = t.sources
    if any(s.op != "mul_mat" or s.name not in lonely for s in t.sources):
        return None
    (w, x), (v, z) = gate.sources, up.sources
    if x is not z or w.shape != v.shape:
        return None
    return apply("mul_mat_gated", w, x, v, name=t.name, unit=t.op)
