"""Orders, winners and draws on CUDA.

Legend: n row length, k picks per row.
"""

import math
from typing import Any

from ggraph.backends.cuda.layout import (
    PLAIN,
    has_rows,
    is_flat,
    is_plain,
    row_count,
    row_sizes,
    row_steps,
)
from ggraph.backends.cuda.lowering import MAX_GRID_Y, Lowering, Rule, number, threads
from ggraph.backends.protocol import Launch
from ggraph.device import Need
from ggraph.dtype import F64
from ggraph.tensor import Tensor

LONGEST_SORT = 4096  # a full sort takes n passes over n values
LONG_ROW, PART = 4096, 2048  # rows of more values are searched in parts, by a block each


def _orderable(t: Tensor) -> bool:
    x = t.sources[0]
    return is_plain(x) and has_rows(x) and (t.op != "argsort" or x.shape[-1] <= LONGEST_SORT)


def _count(t: Tensor) -> int:
    """Picks of each row."""
    if t.op == "draw":
        k = t.attrs["k"]
        assert isinstance(k, int), f"k = {k!r}"
        return k
    return 1 if t.op == "argmax" else t.shape[-1]


def _is_long(t: Tensor) -> bool:
    """Whether the best of a row are found by several blocks, each of which has as many values."""
    x = t.sources[0]
    long = x.shape[-1] > LONG_ROW and row_count(x) <= MAX_GRID_Y
    return long and t.op != "argsort" and _count(t) <= PART


def _first_k(low: Lowering, x: Launch) -> None:
    _find(low, x, low.at(x.result))


def _find(low: Lowering, x: Launch, y: int) -> None:
    """Write the places of each row's picks, in order, to `y`."""
    a, t = x.sources[0].tensor, x.result.tensor
    n, k, rows = a.shape[-1], _count(t), row_count(a)
    source: dict[str, Any] = {
        "x": low.at(x.sources[0]), "n": n, "k": k, "shape": row_sizes(a), "strides": row_steps(a),
        "type_": PLAIN[a.dtype],
    }  # fmt: skip
    if not _is_long(t):
        rising = int(t.attrs.get("order") == "asc")
        low.call("first_k", (rows, 1, 1), threads(n), y=y, ascending=rising, **source)
        return
    picks, parts = low.at(x.room("picks")), -(-n // PART)
    low.call("first_parts", (parts, rows, 1), 512, picks=picks, each=PART, **source)
    count = parts * k
    low.call("first_of", (rows, 1, 1), threads(count), picks=picks, y=y, count=count, k=k)


def _order_needs(t: Tensor) -> tuple[Need, ...]:
    """ "picks": of long rows the best values and their places in each part."""
    if not _is_long(t):
        return ()
    x = t.sources[0]
    return (Need("picks", row_count(x) * -(-x.shape[-1] // PART) * _count(t) * 8),)


def _drawable(t: Tensor) -> bool:
    logits, numbers = t.sources
    return is_flat(logits) and is_flat(numbers, dtype=F64)


def _draw(low: Lowering, x: Launch) -> None:
    t, ids, least = x.result.tensor, low.at(x.room("ids")), number(x, "min_p")
    k = _count(t)
    _find(low, x, ids)
    low.call(
        "draw", (t.shape[0], 1, 1), -(-k // 32) * 32, logits=low.at(x.sources[0]), ids=ids,
        numbers=low.at(x.sources[1]), y=low.at(x.result), n=x.sources[0].tensor.shape[-1], k=k,
        temp=number(x, "temp"), top_p=number(x, "top_p"),
        least=math.log(least) if least else -math.inf, always=int(bool(t.attrs["always"])),
    )  # fmt: skip


def _draw_needs(t: Tensor) -> tuple[Need, ...]:
    """ "ids": the candidates, best first."""
    return (*_order_needs(t), Need("ids", t.shape[0] * _count(t) * 4))


RULES: dict[str, Rule] = {
    **{name: Rule(_orderable, _first_k, _order_needs) for name in ("argmax", "top_k", "argsort")},
    "draw": Rule(_drawable, _draw, _draw_needs),
}
