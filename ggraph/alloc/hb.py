"""`hb` mode: several placement orders over happens-before, the smallest wins.

No search: a handful of orders, each placed by first fit and by best fit, so that planning a model
takes milliseconds. `ggraph.alloc.search.offline` searches the same problem.
"""

import numpy as np

from ggraph.alloc.fit import Ints, Packing, packed

CONTENDED = "most contended first"


def orders(p: Packing, birth: Ints, life: Ints) -> dict[str, tuple[Ints, ...]]:
    """Named orders to try, by keys. `birth` [m] is each block's first command, `life` its span."""
    sums = np.concatenate([[0], np.cumsum(p.size[p.near])])
    pull = sums[p.start[1:]] - sums[p.start[:-1]]
    return {
        "program order": (birth,),
        "largest first": (-p.size, birth),
        "longest first": (-life, -p.size),
        "largest area first": (-p.size * life, birth),
        CONTENDED: (-(pull + p.size), -p.size, birth),
    }


def solve(p: Packing, birth: Ints, life: Ints, least: int = 0) -> tuple[str, Ints, Ints]:
    """Reason, offsets [m] and order of the smallest packing; the first tried wins ties. No packing
    takes fewer than `least` bytes, nor than blocks that are all in conflict have: the first with as
    many ends the trials."""
    found: tuple[int, str, Ints, Ints] | None = None
    by = {name: np.lexsort(keys[::-1]) for name, keys in orders(p, birth, life).items()}
    for name, order in by.items():
        for best in (True, False):
            total, at = packed(p, order, best=best)
            if found is None and total > least:
                # Asked only here: a stream's own blocks in conflict live at once, those of several
                # streams need not, so that `least` may be far too low for them.
                least = max(least, clique_bytes(p, by[CONTENDED]))
            if found is None or total < found[0]:
                found = (total, f"{name}, {'best' if best else 'first'} fit", at, order)
            if found[0] <= least:
                return found[1:]
    assert found is not None, "there is at least one order"
    return found[1:]


def clique_bytes(p: Packing, order: Ints) -> int:
    """Bytes of blocks any two of which are in conflict: each, in `order`, that is with all that
    were taken before it."""
    met = np.zeros(len(p), dtype=np.int64)  # of those taken, how many each is in conflict with
    taken: list[int] = []
    for b in order.tolist():
        if met[b] == len(taken):
            taken.append(b)
            met[p.near[p.start[b] : p.start[b + 1]]] += 1
    return int(p.size[taken].sum())
