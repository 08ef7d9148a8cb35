"""`hb` mode: several placement orders over happens-before, the smallest wins.

No search: a handful of orders, each placed by first fit and by best fit, so that planning a model
takes milliseconds. `ggraph.alloc.search.offline` searches the same problem.
"""

from collections.abc import Iterator

import numpy as np

from ggraph.alloc.fit import Ints, Packing, packed


def orders(p: Packing, birth: Ints, life: Ints) -> Iterator[tuple[str, Ints]]:
    """Named orders to try. `birth` [m] is each block's first command, `life` [m] its span."""
    sums = np.concatenate([[0], np.cumsum(p.size[p.near])])
    pull = sums[p.start[1:]] - sums[p.start[:-1]]
    keys: dict[str, tuple[Ints, ...]] = {
        "program order": (birth,),
        "largest first": (-p.size, birth),
        "longest first": (-life, -p.size),
        "largest area first": (-p.size * life, birth),
        "most contended first": (-(pull + p.size), -p.size, birth),
    }
    for name, by in keys.items():
        yield name, np.lexsort(tuple(reversed(by)))


def solve(p: Packing, birth: Ints, life: Ints, least: int = 0) -> tuple[str, Ints, Ints]:
    """Reason, offsets [m] and order of the smallest packing; the first tried wins ties. No packing
    takes fewer than `least` bytes, so that the first with as many ends the trials."""
    found: tuple[int, str, Ints, Ints] | None = None
    for name, order in orders(p, birth, life):
        for best in (True, False):
            total, at = packed(p, order, best=best)
            if found is None or total < found[0]:
                found = (total, f"{name}, {'best' if best else 'first'} fit", at, order)
            if found[0] <= least:
                return found[1:]
    assert found is not None, "orders() yields at least one order"
    return found[1:]
