"""Experts that are chosen by groups: those of the best groups alone can be.

Legend: T token rows, X experts, G groups.
"""

from ggraph import Tensor, dtypes, ops


def limited(worth: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """What experts are worth, f32 [T, X], and -inf outside of the `kept` best of so many groups of
    neighbours: [T, X]; as it is where there is one group. A group is worth what the `best` best of
    its experts are together.

    Why ranks and not a bound: of groups that are worth the same the first ones are kept, so that
    there are never more. Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, for the maximum;
    DeepSeek-V3 (arXiv 2412.19437) and its release, for the sum of two.
    """
    if groups < 2:
        return worth
    rows, experts = worth.shape
    each = worth.reshape(rows * groups, experts // groups)
    heads = ops.moe_shares(each, ops.top_k(each, best), normalise=False)  # [T*G, best]
    order = ops.argsort(ops.sum_rows(heads).reshape(rows, groups), "desc")
    rank = ops.argsort(ops.cast(order, dtypes.F32))  # of each group, [T, G]
    stays = ops.step(float(kept) - ops.cast(rank, dtypes.F32))
    barred = ops.log(stays).reshape(rows, groups, 1)  # by -inf, or 0
    return (worth.reshape(rows, groups, experts // groups) + barred).reshape(rows, experts)
