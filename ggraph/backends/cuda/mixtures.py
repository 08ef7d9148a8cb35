"""Mixtures of experts on CUDA: shares, sums of results, rows by expert.

Legend: T tokens, X experts, U experts per token, n values of a result.
"""

from ggraph.backends.cuda.layout import is_flat
from ggraph.backends.cuda.lowering import Lowering, Rule, number
from ggraph.backends.protocol import Launch
from ggraph.dtype import I32


def _shares(low: Lowering, x: Launch) -> None:
    chances, ids = x.sources
    tokens, used = ids.tensor.shape
    low.per_element(
        "moe_shares", tokens, chances=low.at(chances), ids=low.at(ids), y=low.at(x.result),
        experts=chances.tensor.shape[1], used=used, scale=number(x, "scale"),
        normalise=int(number(x, "normalise")),
    )  # fmt: skip


def _mix(low: Lowering, x: Launch) -> None:
    values, shares = x.sources
    _, used, n = values.tensor.shape
    low.per_element(
        "moe_mix", x.result.tensor.size, values=low.at(values), shares=low.at(shares),
        y=low.at(x.result), used=used, n=n,
    )  # fmt: skip


def _add_id(low: Lowering, x: Launch) -> None:
    a, rows, ids = x.sources
    experts, n = rows.tensor.shape
    low.per_element(
        "add_id", x.result.tensor.size, x=low.at(a), rows=low.at(rows), ids=low.at(ids),
        y=low.at(x.result), experts=experts, n=n,
    )  # fmt: skip


RULES: dict[str, Rule] = {
    "moe_shares": Rule(
        lambda t: is_flat(t.sources[0]) and is_flat(t.sources[1], dtype=I32), _shares
    ),
    "moe_mix": Rule(lambda t: is_flat(*t.sources), _mix),
    "add_id": Rule(lambda t: is_flat(*t.sources[:2]) and is_flat(t.sources[2], dtype=I32), _add_id),
}
