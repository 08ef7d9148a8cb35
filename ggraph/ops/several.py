"""Which products of a graph read the same rows, and so may be one launch."""

from collections.abc import Container, Iterator, Mapping, Sequence
from math import prod

from ggraph.ops.fused import FEW_ROWS, MOST_MATRICES
from ggraph.ops.shape import view
from ggraph.tensor import Kind, Tensor, apply


def alike(
    nodes: Sequence[Tensor], hidden: Container[str], homes: Mapping[str, str]
) -> Iterator[list[Tensor]]:
    """Products of few rows with weights of one type, two to MOST_MATRICES, of those that are
    `hidden`, by name, and wanted on one device."""
    found: dict[tuple[object, ...], list[Tensor]] = {}
    for t in nodes:
        if t.op != "mul_mat" or t.name not in hidden or prod(t.shape[:-1]) > FEW_ROWS:
            continue
        w, x = t.sources
        if w.root.kind is Kind.WEIGHT and len(w.shape) == 2:
            found.setdefault((x.name, w.dtype, homes.get(t.name)), []).append(t)
    for group in found.values():
        for i in range(0, len(group) - 1, MOST_MATRICES):
            yield group[i : i + MOST_MATRICES]


def joined(products: Sequence[Tensor]) -> Tensor:
    """The products as one op."""
    (w, x), *others = (t.sources for t in products)
    more = (v for v, _ in others)
    return apply("mul_mats", w, x, *more, name=f"{products[0].name}@joined")


def views(made: Tensor, products: Sequence[Tensor]) -> dict[str, Tensor]:
    """Where each product lies in `made`, by its name."""
    start, found = 0, dict[str, Tensor]()
    for t in products:
        found[t.name] = view(made, t.shape, start=start, name=t.name)
        start += t.size
    return found
