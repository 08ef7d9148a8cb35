"""Drawing tokens on the device, as a plain composition of other ops. Registers nothing.

The stages are those of `ggraph.decode.sampler`, in float32: top-k, top-p, min-p, temperature, and
the first token, in order of ids, at which the summed law exceeds a uniform number.
Legend: T rows, V tokens in the vocabulary, k candidates, best first or by id.
"""

import math

from ggraph.dtype import F32, I32
from ggraph.ops.attention import soft_max
from ggraph.ops.copies import cast
from ggraph.ops.elementwise import clamp, mul, scale, sub
from ggraph.ops.reduce import cumsum
from ggraph.ops.rows import get_rows
from ggraph.ops.rules import expect, rank
from ggraph.ops.shape import columns
from ggraph.ops.sort import argmax, argsort, top_k
from ggraph.ops.unary import step
from ggraph.tensor import Tensor

LARGEST = 1 << 24  # vocabularies up to here have ids that float32 holds exactly
LEAST = 1e-6  # of a share: what rounding may take from it


def draw(
    logits: Tensor,
    uniform: Tensor,
    *,
    temp: float = 0.8,
    best: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    name: str = "",
) -> Tensor:
    """A token of each row: logits f32 [T, V], uniform f32 [T, 1] in [0, 1) -> i32 [T].

    Of the `best` greatest logits those stay whose better ones sum to less than `top_p`, and whose
    chance is at least `min_p` of the greatest. `temp` <= 0 takes the best token. Errors: ShapeError
    unless `best` is in 1 .. V. llama.cpp: `llama_sampler_chain`.
    """
    rank(logits, 2, 2)
    t, v = logits.shape
    expect(v <= LARGEST, f"%{logits.name}: {v} tokens, expected at most {LARGEST}")
    if temp <= 0:
        return argmax(logits, name=name)
    ids = top_k(logits, min(best, v))  # [T, k]
    scores = get_rows(logits.reshape(t, v, 1), ids).reshape(*ids.shape)  # [T, k], best first
    weights = soft_max(scores, scale=1.0 / temp)
    if top_p < 1:
        weights = mul(weights, _nucleus(scores, top_p))
    if min_p > 0:
        weights = mul(weights, _likely(scores, min_p))
    return _first_beyond(weights, ids, uniform, name)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """1 where the better candidates sum to less than top_p, else 0: [T, k]."""
    law = soft_max(scores)
    before = sub(cumsum(law), law)
    return step(scale(before, -1.0, max(top_p, LEAST)))


def _likely(scores: Tensor, min_p: float) -> Tensor:
    """1 where a candidate has min_p of the greatest chance, else 0: [T, k]."""
    behind = sub(scores, columns(scores, 0, 1))
    return step(scale(behind, 1.0, LEAST - math.log(min_p)))


def _first_beyond(weights: Tensor, ids: Tensor, uniform: Tensor, name: str) -> Tensor:
    """The first id, ascending, at which summed weights exceed their share `uniform`: i32 [T]."""
    t, k = ids.shape
    plain = cast(ids, F32)  # [T, k]
    order = argsort(plain)
    by_id = get_rows(plain.reshape(t, k, 1), order)  # [T, k, 1]
    total = cumsum(get_rows(weights.reshape(t, k, 1), order).reshape(t, k))
    share = mul(columns(total, k - 1, 1), clamp(uniform, 0.0, 1.0 - LEAST))  # [T, 1]
    first = argmax(step(sub(total, share)))  # [T]
    return cast(get_rows(by_id, first.reshape(t, 1)).reshape(t), I32, name=name)
