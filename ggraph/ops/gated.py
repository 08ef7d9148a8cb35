"""Which gated units of a graph are of two products of the same rows, and so may be one launch."""

from collections.abc import Container

from ggraph.tensor import Tensor, apply


def gated(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """The unit `t` with the products that only it reads (`lonely`, by name) as one op, for any
    number of rows; None where it is not of that kind."""
    gate, up = t.sources
    if gate.op != up.op or gate.op not in ("mul_mat", "mul_mat_id"):
        return None
    if any(s.name not in lonely for s in t.sources):
        return None
    (w, *rows), (v, *others) = gate.sources, up.sources
    if w.shape != v.shape or any(a is not b for a, b in zip(rows, others, strict=True)):
        return None
    x, *ids = rows
    return apply("mul_mat_gated", w, x, v, *ids, name=t.name, unit=t.op, has_ids=bool(ids))
