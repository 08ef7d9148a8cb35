"""Lowerings of what mixtures of experts add to products."""

from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import is_rows
from ggraph.backends.protocol import Launch
from ggraph.ops.rules import flag, real


def moe_shares(low: Lowering, x: Launch) -> bool:
    """Shares of the chosen."""
    a, ids = (s.tensor for s in x.sources)
    if not is_rows(a) or not ids.is_contiguous:
        return False
    m, n = a.shape
    attrs = x.result.tensor.attrs
    low.add(
        "moe_shares", x=low.at(x.sources[0]), ids=low.at(x.sources[1]), y=low.at(x.result), m=m,
        n=n, u=ids.shape[1], xs=n * 4, normalise=int(flag(attrs, "normalise")),
        scale=real(attrs, "scale"),
    )  # fmt: skip
    return True


def moe_mix(low: Lowering, x: Launch) -> bool:
    """Their results put together."""
    values, shares = (s.tensor for s in x.sources)
    if not (is_rows(values) and is_rows(shares)):
        return False
    m, u, n = values.shape
    low.add(
        "moe_mix", x=low.at(x.sources[0]), shares=low.at(x.sources[1]), y=low.at(x.result), m=m,
        n=n, u=u,
    )  # fmt: skip
    return True


def add_id(low: Lowering, x: Launch) -> bool:
    """Rows of the chosen added."""
    a, rows, ids = (s.tensor for s in x.sources)
    if not (is_rows(a) and is_rows(rows) and ids.is_contiguous):
        return False
    low.add(
        "add_id", x=low.at(x.sources[0]), rows=low.at(x.sources[1]), ids=low.at(x.sources[2]),
        y=low.at(x.result), m=ids.size, n=rows.shape[1], limit=rows.shape[0],
    )  # fmt: skip
    return True
