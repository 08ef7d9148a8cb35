"""Which drafted tokens stay: sample-and-match, and stochastic rejection.

Both are lossless. *Match* runs the real sampler on each verified row and goes on while the token
it chose is a child of the node; sampler state and random numbers are used exactly as without
speculation, so with equal logits the text is equal too. *Reject* accepts a child x drawn from law
q with chance min(1, p(x) / q(x)) and else goes on with the residual law max(p - q, 0), normalised:
each round keeps p, because min(p, q) plus the residual's share is p again (Leviathan et al. 2023,
arXiv 2211.17192; Miao et al. 2023, arXiv 2305.09781 for several children).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggraph.decode.draft.tree import ROOT, Draft
from ggraph.errors import InputError
from ggraph.tensor import Array

Pick = Callable[[Array], int]  # what a step brings back of a row -> token
Accept = Callable[[int], object]  # told of a token that is kept; a true answer ends the round


@dataclass(frozen=True)
class Kept:
    """The nodes that stay, from the root's child down, and the tokens that the text gains.

    `tokens` is one longer than `nodes`, unless choosing the token behind the last node raised
    `error`: without a draft, the tokens before it would have been there by then.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    error: Exception | None = None


def only(row: Array) -> int:
    """The token of a row of which the device took one. InputError where it found no number."""
    if (token := int(row[0])) < 0:
        raise InputError("logits: the greatest value is no finite number")
    return token


def match(
    draft: Draft, logits: Array, pick: Pick, accept: Accept, ends: frozenset[int], limit: int
) -> Kept:
    """Sample row by row; descend while the sampled token was drafted. `logits` is [N+1, V], or
    what else `pick` takes a token of."""

    def choose(node: int) -> tuple[int, int | None]:
        token = pick(logits[node + 1])
        below = (c for c in draft.children(node) if draft.tokens[c] == token)
        return token, next(below, None)

    return _descended(choose, accept, ends, limit)


def reject(
    draft: Draft,
    law_of: Callable[[int], Array],
    accept: Accept,
    uniform: Callable[[], float],
    ends: frozenset[int],
    limit: int,
) -> Kept:
    """Stochastic rejection. `law_of(row)` is the target's law f64 [V] for row `node + 1`, asked
    after the tokens above it were accepted (penalties look back); `uniform()` draws from [0, 1)."""

    def choose(node: int) -> tuple[int, int | None]:
        return _round(draft, node, law_of(node + 1), uniform)

    return _descended(choose, accept, ends, limit)


def _descended(
    choose: Callable[[int], tuple[int, int | None]],
    accept: Accept,
    ends: frozenset[int],
    limit: int,
) -> Kept:
    """Go down from the root by what is chosen behind each node: a token, and the child that it
    is, if any."""
    node = ROOT
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        try:
            token, child = choose(node)
            ended = accept(token)
        except Exception as error:
            return Kept(tuple(nodes), tuple(tokens), error)
        tokens.append(token)
        if child is None or ended or token in ends or len(tokens) >= limit:
            return Kept(tuple(nodes), tuple(tokens))
        node = child
        nodes.append(node)


def _round(
    draft: Draft, node: int, p: Array, uniform: Callable[[], float]
) -> tuple[int, int | None]:
    """One step down: a child that was accepted, or a token from what is left of the law."""
    q = draft.laws.get(node)
    for child in draft.children(node):
        token = draft.tokens[child]
        proposal = 1.0 if q is None else float(q[token])
        if proposal > 0 and uniform() * proposal < p[token]:
            return token, child
        p = residual(p, q, token)
        q = without(q, token)
    return draw(p, uniform()), None


def residual(p: Array, q: Array | None, token: int) -> Array:
    """max(p - q, 0) normalised; a certain guess (q None) removes just its token."""
    rest = p.copy()
    if q is None:
        rest[token] = 0.0
    else:
        np.maximum(rest - q, 0.0, out=rest)
    total = rest.sum()
    return rest / total if total > 0 else p


def without(q: Array | None, token: int) -> Array | None:
    """The law of the next sibling, drawn without replacement."""
    if q is None:
        return None
    rest = q.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest


def draw(law: Array, uniform: float) -> int:
    """The token at which the cumulated law passes `uniform` in [0, 1)."""
    cumulated = np.cumsum(law)
    return int(min(np.searchsorted(cumulated, uniform * cumulated[-1], "right"), law.size - 1))
