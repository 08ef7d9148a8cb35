"""Which rows of a graph become 8 bits: those that products with quantised weights read."""

from collections.abc import Callable

from ggraph.dtype import A8, F32
from ggraph.graph import Graph, over
from ggraph.tensor import Kind, Tensor, apply, leaf

QUANTISED_PARTS = {
    "rms_norm_mul": "rms_norm_quantise",
    "swiglu": "swiglu_quantise",
    "mul_mat_gated": "mul_mat_gated_quantise",
}

PRODUCTS = ("mul_mat", "mul_mat_add", "mul_mat_gated", "mul_mat_id")


def quantise_activations(
    graph: Graph, known: frozenset[str], runs: Callable[[Tensor], bool]
) -> Graph:
    """Products with quantised weights take their rows in 8 bits, once for all that share them,
    where every device has a kernel for that.

    Where nothing else reads a norm or a gated unit, it gives 8 bits itself. This approximates.
    """
    if "quantise" not in known:
        return graph
    users = graph.users()
    tried = {t.name: _of_8_bits(t) for t in graph.nodes if _takes_8_bits(t)}
    products = {name: p for name, p in tried.items() if runs(p)}
    made: dict[str, Tensor] = {}
    heirs: dict[str, Tensor] = {}
    for name, product in products.items():
        w, x, *rest = graph[name].sources
        if x.name not in made:
            only = not x.is_output and all(u.name in products for u in users[x.name])
            made[x.name] = _in_8_bits(heirs.get(x.name, x), known if only else frozenset(), runs)
        heirs[name] = over(product, (w, made[x.name], *rest))
    return graph.replace(heirs) if heirs else graph


def _of_8_bits(t: Tensor) -> Tensor:
    """The product of some rows in 8 bits."""
    w, x, *rest = t.sources
    rows = leaf(Kind.INPUT, "rows", x.shape, A8)
    return apply(t.op, w, rows, *rest, name=t.name, **t.attrs)


def _in_8_bits(x: Tensor, known: frozenset[str], runs: Callable[[Tensor], bool]) -> Tensor:
    """x as A8, by the op that computes x where one in `known` gives 8 bits itself."""
    name, fused = f"{x.name}@a8", QUANTISED_PARTS.get(x.op, "")
    if fused in known:
        made = apply(fused, *x.sources, name=name, **x.attrs)
        if runs(made):
            return made
    return apply("quantise", x, name=name)


def _takes_8_bits(t: Tensor) -> bool:
    if t.op not in PRODUCTS:
        return False
    x = t.sources[1]
    matrices = [t.sources[0], *(t.sources[2:3] if t.op == "mul_mat_gated" else ())]
    axes = 3 if t.op == "mul_mat_id" or t.attrs.get("has_ids") else 2
    if any(w.kind is not Kind.WEIGHT or not w.dtype.is_block for w in matrices):
        return False
    stored = all(w.is_leaf and len(w.shape) == axes for w in matrices)
    return stored and x.dtype is F32 and x.is_contiguous and x.shape[-1] % A8.block == 0
