"""What of a graph one fused op can make: a tensor with those that only it reads.

Those are `lonely`, by name; a function gives None where a tensor is not of its kind.
"""

from collections.abc import Callable, Container

from ggraph.dtype import F32
from ggraph.tensor import Tensor, apply


def gated(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """A unit of two products of the same rows as one op, for any number of rows."""
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


def _fused_norm(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """`mul(rms_norm(x), w)` -> `rms_norm_mul(x, w)`."""
    x, w = t.sources
    vector = w.is_leaf and w.dtype is F32 and w.shape == x.shape[-1:]
    if x.op != "rms_norm" or x.name not in lonely or not vector:
        return None
    return apply("rms_norm_mul", x.sources[0], w, name=t.name, **x.attrs)


def _fused_product(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """`add(a, mul_mat(w, x))`, in either order -> `mul_mat_add(w, x, a)`."""
    if t.sources[0].shape != t.sources[1].shape:
        return None
    for product, rest in (t.sources, t.sources[::-1]):
        if product.op == "mul_mat" and product.name in lonely and rest.dtype is F32:
            return apply("mul_mat_add", *product.sources, rest, name=t.name)
    return None


def _fused_rope(t: Tensor, lonely: Container[str]) -> Tensor | None:
    """`set_rows(cache, rope(x), index)` -> `rope_set_rows(cache, x, positions, index)`."""
    if t.sources[1].op != "rope" or t.sources[1].name not in lonely:
        return None
    cache, turned, index = t.sources
    x, positions, *factors = turned.sources
    if any(s.root is cache.root for s in turned.sources):
        return None  # it would read what it overwrites
    return apply("rope_set_rows", cache, x, positions, index, *factors, name=t.name, **turned.attrs)


FUSIONS: dict[str, tuple[str, Callable[[Tensor, Container[str]], Tensor | None]]] = {
    "mul": ("rms_norm_mul", _fused_norm),
    "add": ("mul_mat_add", _fused_product),
    "set_rows": ("rope_set_rows", _fused_rope),
}
"""By the op that ends them: the fused op, and what makes it."""
