"""Which passes over a reduced space compute a step, and which step the result's memory can hold.

Each reduction is a pass over the space, and storing a result that spans it is the last one. A step
that several passes need is computed in each of them. `DEAR` functions cost more than memory does,
so one such step may be left where the result will be, by the first pass that computes it: later
ones read it there. They must then read no source that spans the space, since the result may lie on
one (docs/log/2026-11-23-library.md).
"""

from collections.abc import Mapping
from math import prod

from ggraph.ops.steps import Trace

DEAR = frozenset({"exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "power"})
REDUCTIONS = frozenset({"sum", "mean", "dot", "max", "min"})  # as traces call them


def _passes(found: Trace, root: int, held: int | None = None) -> Mapping[int, frozenset[int]]:
    """For each step that `root` needs the passes that compute it, by their reductions; `root` names
    that which stores. What `held` needs is computed in the first pass of `held` alone."""
    known: dict[int, frozenset[int]] = {i: frozenset() for i in found.reached(root)}
    known[root] |= {root}
    for i in reversed(known):
        step, mine = found.steps[i], known[i]
        if step.op in REDUCTIONS:
            mine = frozenset({i})
        elif i == held:
            mine = frozenset({min(mine)})
        for a in step.args:
            known[a] |= mine
    return known


def held(found: Trace, root: int) -> int | None:
    """The step of `root`, whose result spans the space, that is left in the result's memory."""
    again = _dear_again(found, _passes(found, root))
    if not again:
        return None
    last = max(again)
    passes = _passes(found, root, last)
    first, size = min(passes[last]), prod(found.steps[last].shape)
    late = any(
        max(mine) > first
        for i, mine in passes.items()
        if found.steps[i].op == "source" and prod(found.steps[i].shape) == size and mine
    )
    alone = _dear_again(found, passes) == [last]
    whole = found.steps[last].shape == found.steps[root].shape
    return last if alone and whole and not late else None


def _dear_again(found: Trace, passes: Mapping[int, frozenset[int]]) -> list[int]:
    """The dear steps that several passes compute."""
    return [i for i, mine in passes.items() if len(mine) > 1 and found.steps[i].op in DEAR]
