"""Launches piece by piece where a kernel would read what it has just written.

A kernel writes its result in pieces of some order, while other pieces still read. Where the result
lies on a source's bytes and the op's record does not say that this is right, the pieces are made
one after the other, each from the bytes as they are by then: what is wrong shows.
"""

from itertools import pairwise

import numpy as np

from ggraph.backends.protocol import Launch, Ref
from ggraph.backends.reference import bytes_of, run_reference
from ggraph.ops.evaluate import Bytes, compute
from ggraph.tensor import Tensor


def run_launch(launch: Launch) -> None:
    """One launch by its NumPy meaning: at once where the op works in place, else in three pieces.

    From the first piece to the last; backwards where that has shown nothing, so that every piece
    is seen changed by every other one. Raises as `run_reference` does.
    """
    if _is_right(launch):
        run_reference(launch)
        return
    r, sources = launch.result, [bytes_of(s) for s in launch.sources]
    home = r.memory.handle[r.offset : r.offset + r.tensor.nbytes]
    before, right = home.copy(), home.copy()
    compute(Bytes(r.tensor, right), sources)
    for pieces in (_pieces(r.tensor), _pieces(r.tensor)[::-1]):
        home[:] = before
        for start, stop in pieces:
            apart = home.copy()
            compute(Bytes(r.tensor, apart), sources)
            home[start:stop] = apart[start:stop]
        if not np.array_equal(home, right):
            return


def _pieces(t: Tensor) -> list[tuple[int, int]]:
    """Byte ranges of three pieces, cut within rows where there are rows to cut."""
    unit, row = t.dtype.block_bytes, t.shape[-1] // t.dtype.block if t.shape else 1
    count = t.nbytes // unit
    cuts = [c + (c % row == 0 and row > 1) for c in (count // 3, 2 * count // 3)]
    edges = [0, *(min(c, count) * unit for c in cuts), t.nbytes]
    return list(pairwise(edges))


def _is_right(launch: Launch) -> bool:
    """Whether the op's record allows the result on the bytes of every source that it meets."""
    result, spec = launch.result, launch.result.tensor.spec
    met = [i for i, s in enumerate(launch.sources) if s.tensor.nbytes and _meet(s, result)]
    if spec is None or not met or not result.tensor.nbytes:
        return True
    if spec.overwrites is not None:
        return met == [spec.overwrites]
    alike = all(_place(launch.sources[i]) == _place(result) for i in met)
    promised = any(i in spec.inplace_ok for i in met)
    return alike and promised and (spec.elementwise or len(met) == 1)


def _meet(a: Ref, b: Ref) -> bool:
    """Whether two tensors lie on common bytes, gaps of views included."""
    begin, end = max(a.offset, b.offset), min(_stop(a), _stop(b))
    return a.memory.handle is b.memory.handle and begin < end


def _stop(r: Ref) -> int:
    return r.offset + r.tensor.nbytes


def _place(r: Ref) -> tuple[object, ...]:
    t = r.tensor
    return r.offset, t.shape, t.is_contiguous, t.dtype
