"""What a step brings back of a row in place of its logits: the greatest, or a token that is drawn.

Legend: M wanted rows, V tokens of the vocabulary, K greatest.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from ggraph import ops
from ggraph.decode.rows import Rows
from ggraph.decode.sampler import CANDIDATE, Sampler, SamplerConfig
from ggraph.tensor import Array, Tensor


def greatest_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens i32 [M, K] of the `count` greatest of logits [M, V], or i32 [M] of one, and those
    logits f32 [M, K, 1]."""
    rows, size = logits.shape
    count = min(count, size)
    best = ops.argmax(logits) if count == 1 else ops.top_k(logits, count)
    return best, ops.get_rows(logits.reshape(rows, size, 1), best.reshape(rows, count))


def drawn_of(
    logits: Tensor, numbers: Tensor, config: SamplerConfig, *, always: bool = False
) -> Tensor:
    """A token i32 [M] of rows of logits [M, V], by the stages of `config` and numbers f64 [M]."""
    top_k, temp, top_p, min_p = config.stages
    return ops.draw(
        logits, numbers, temp=temp, best=min(top_k, logits.shape[1]), top_p=top_p, min_p=min_p,
        always=always,
    )  # fmt: skip


def best_of(out: Mapping[str, Array], count: int) -> Array:
    """i32 [count, 1]: the token of each row's greatest logit, below 0 where that is no finite
    number: only who looks at the row is to be told, since a wrong guess may bring it about."""
    best: Array = out["best"][:count, None]
    for row, greatest in enumerate(out["greatest"].ravel()[:count].tolist()):
        if not isfinite(greatest):
            best[row] = -1
    return best


def candidates(out: Mapping[str, Array], count: int) -> Array:
    """CANDIDATE [count, K], the best first: what `picking` brings back of so many rows."""
    logits = out["greatest"][:count, :, 0]
    found = np.empty(logits.shape, CANDIDATE)
    found["id"], found["logit"] = out["best"][:count].reshape(logits.shape), logits
    return found


def numbers_of(sampler: Sampler, rows: Rows, wanted: Sequence[int], count: int) -> Array:
    """f64 [count]: what each wanted row's token is drawn with, one number for each place behind the
    first of them."""
    first = rows.positions[wanted[0]]
    numbers = np.zeros(count)
    numbers[: len(wanted)] = sampler.ahead([rows.positions[w] - first for w in wanted])
    return numbers
