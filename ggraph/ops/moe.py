"""Mixture-of-experts parts, as plain compositions of other ops. Registers nothing.

Legend: T tokens, X experts, U experts per token, E width.
"""

from ggraph.ops.attention import soft_max
from ggraph.ops.elementwise import div, mul
from ggraph.ops.reduce import sum_rows
from ggraph.ops.rows import get_rows
from ggraph.ops.rules import rank
from ggraph.ops.sort import top_k
from ggraph.tensor import Tensor


def moe_route(logits: Tensor, used: int, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Choose experts: logits [T, X] -> ids i32 [T, U] and shares f32 [T, U, 1].

    Shares are soft_max chances, divided by the sum of the chosen where `normalise`. Errors:
    ShapeError unless `used` is in 1 .. X. ggml: llama.cpp's `build_moe_ffn`.
    """
    rank(logits, 2, 2)
    t, x = logits.shape
    chances = soft_max(logits)  # [T, X]
    ids = top_k(chances, used)
    shares = get_rows(chances.reshape(t, x, 1), ids)  # [T, U, 1]
    if normalise:
        flat = shares.reshape(t, used)
        shares = div(flat, sum_rows(flat)).reshape(t, used, 1)
    return ids, shares


def moe_mix(values: Tensor, shares: Tensor, *, name: str = "") -> Tensor:
    """Sum of experts' results weighted by their shares: [T, U, E] and [T, U, 1] -> [T, E]."""
    rank(values, 3, 3)
    weighted = mul(values, shares)  # [T, U, E]
    summed = sum_rows(weighted.permute(0, 2, 1))  # [T, E, 1]
    return summed.reshape(values.shape[0], values.shape[2]).named(name)
