"""Lowerings of systems of equations."""

from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import is_rows
from ggraph.backends.protocol import Launch


def lower(low: Lowering, x: Launch) -> bool:
    """Systems without gaps."""
    a, b = x.sources
    if not (is_rows(a.tensor) and is_rows(b.tensor)):
        return False
    n, columns = b.tensor.shape[-2:]
    low.add(
        "solve_tri", a=low.at(a), b=low.at(b), y=low.at(x.result), n=n, k=columns,
        count=b.tensor.size // (n * columns),
    )  # fmt: skip
    return True
