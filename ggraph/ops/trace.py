"""What an op computes, element by element, read off its NumPy reference.

`trace` calls the reference with symbols in place of arrays. They answer NumPy's own protocols
(`__array_ufunc__`, `__array_function__`), so that the one description of an op, its meaning, is
also what kernels are generated from. A trace is a list of steps over one index space; windows on
sources keep strides of their own, found by NumPy on an array of the same layout that is never read.

What it follows: arithmetic of floats, comparisons, `where`, `clip`, reductions, products of
matrices (as sums over products), views, and boxes side by side (`concatenate`, `pad`, `roll`).
Sorting, arithmetic of integers alone, and indices that are themselves values, are refused with
`Untraceable`; such ops have kernels by hand, or are NumPy's.
"""

import numpy as np

from ggraph.ops import functions  # noqa: F401  (symbols answer them)
from ggraph.ops.evaluate import check_shape
from ggraph.ops.steps import ROOM, Box, Shape, Step, Trace, Untraceable
from ggraph.ops.symbols import FLOAT, WORDS, Boxes, Symbol, Window, box_of, ghost, place, symbol
from ggraph.tensor import Tensor


def trace(t: Tensor) -> Trace:
    """What the op of `t` computes. Untraceable where it is not element by element."""
    if t.spec is None or t.dtype.is_block or any(s.dtype.is_block for s in t.sources):
        raise Untraceable(f"{t.op}: not of plain types")
    found = Trace()
    given = [_source(found, i, s) for i, s in enumerate(t.sources)]
    found.target = None if t.spec.overwrites is None else given[t.spec.overwrites]
    try:
        with np.errstate(all="ignore"):
            result = t.spec.reference(*given, **t.attrs)
    except Untraceable:
        raise
    except Exception as error:  # a meaning may ask for arrays in any way, as by an assertion
        raise Untraceable(f"{t.op}: {error!r}") from None
    if t.spec.overwrites is not None:
        parts = found.written
    else:
        whole = result if isinstance(result, Boxes) else symbol(found, result)
        check_shape(t, whole.shape)
        parts = [((0,) * len(t.shape), whole)] if isinstance(whole, Symbol) else whole.parts
    found.boxes = tuple(box_of(t.shape, starts, s) for starts, s in parts)
    return found


def _source(found: Trace, number: int, t: Tensor) -> Symbol:
    like = ghost(t.shape, t.strides, t.dtype.block_bytes)
    step = found.add("source", shape=t.shape, data=(number, 0, t.strides))
    kind = FLOAT if t.dtype.is_float else t.dtype.np
    return Symbol(found, step, t.shape, kind, Window(number, like, place(like)))


__all__ = ["ROOM", "WORDS", "Box", "Shape", "Step", "Trace", "Untraceable", "trace"]
