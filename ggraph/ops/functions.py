"""NumPy's functions of arrays, as symbols answer them. See `symbols.py`."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from ggraph.ops.steps import Trace, Untraceable
from ggraph.ops.symbols import FUNCTIONS, Boxes, Symbol, call


def _einsum(rule: str, *operands: Symbol, **how: Any) -> Symbol:
    """A sum over products of elements, the axes as the rule's letters say."""
    given, kept = rule.split("->")
    gone = [a for a in dict.fromkeys(given.replace(",", "")) if a not in kept]
    product = None
    for letters, x in zip(given.split(","), operands, strict=True):
        order = [a for a in (*kept, *gone) if a in letters]
        spread = tuple(slice(None) if a in letters else None for a in (*kept, *gone))
        laid = x.transpose([letters.index(a) for a in order])[spread]
        product = laid if product is None else product * laid
    assert product is not None, rule
    return product._reduced("dot", tuple(range(len(kept), len(kept) + len(gone))), False)


def _of(*values: Any) -> Trace:
    return next(v.trace for v in values if isinstance(v, Symbol))


def _where(condition: Any, then: Any, other: Any) -> Symbol:
    return call(_of(condition, then, other), "where", condition, then, other)


def _clip(x: Symbol, low: Any = None, high: Any = None, **other: Any) -> Symbol:
    x = x if low is None else call(x.trace, "maximum", x, low)
    return x if high is None else call(x.trace, "minimum", x, high)


def _concatenate(parts: Sequence[Symbol], axis: int = 0) -> Boxes:
    at, found = 0, []
    for p in parts:
        axis %= p.ndim
        found.append((tuple(at if i == axis else 0 for i in range(p.ndim)), p))
        at += p.shape[axis]
    first = parts[0].shape
    return Boxes((*first[:axis], at, *first[axis + 1 :]), found)


def _pad(x: Symbol, border: Sequence[tuple[int, int]], **how: Any) -> Any:
    if how.get("mode", "constant") != "constant":
        raise Untraceable(f"np.pad of the mode {how['mode']}")
    if not any(a or b for a, b in border):
        return x
    whole = tuple(a + n + b for n, (a, b) in zip(x.shape, border, strict=True))
    value = x.trace.add("number", data=float(how.get("constant_values", 0)))
    zero = Symbol(x.trace, x.trace.add("fill", (value,), whole), whole)
    return Boxes(whole, [((0,) * x.ndim, zero), (tuple(a for a, _ in border), x)])


def _roll(x: Symbol, shift: Sequence[int], axis: Sequence[int]) -> Boxes:
    """Each axis in two parts that change places."""
    cuts = []
    for n, s in zip(x.shape, shift, strict=True):
        s = s % n if n else 0
        cuts.append([(0, n - s, s), (n - s, s, 0)])  # from, count, to
    found = []
    for parts in product(*cuts):
        if all(count for _, count, _ in parts):
            key = tuple(slice(first, first + count) for first, count, _ in parts)
            found.append((tuple(to for _, _, to in parts), x[key]))
    return Boxes(x.shape, found)


def _tile(x: Symbol, times: Sequence[int]) -> Symbol:
    """Every axis as a pair (repetition, place), then one again; axes of one place broadcast."""
    x = x[(*(None for _ in range(len(times) - x.ndim)), ...)]
    if all(1 in pair for pair in zip(times, x.shape, strict=True)):
        whole = tuple(t * n for t, n in zip(times, x.shape, strict=True))
        return x._looked_at(lambda a: np.broadcast_to(a, whole))
    pairs = [size for t, n in zip(times, x.shape, strict=True) for size in (t, n)]
    keys = tuple(k for _ in x.shape for k in (None, slice(None)))
    wide = x[keys]._looked_at(lambda a: np.broadcast_to(a, tuple(pairs)))
    whole = tuple(t * n for t, n in zip(times, x.shape, strict=True))
    return Symbol(x.trace, wide.step, whole, x.dtype)


def _isneginf(x: Symbol) -> Symbol:
    return call(x.trace, "equal", x, -math.inf)


FUNCTIONS |= {
    np.where: _where,
    np.clip: _clip,
    np.concatenate: _concatenate,
    np.einsum: _einsum,
    np.pad: _pad,
    np.roll: _roll,
    np.tile: _tile,
    np.isneginf: _isneginf,
    np.swapaxes: lambda x, a, b: x.swapaxes(a, b),
    np.transpose: lambda x, axes=None: x.transpose(axes),
    np.reshape: lambda x, shape: x.reshape(shape),
    np.broadcast_to: lambda x, shape: x._looked_at(lambda a: np.broadcast_to(a, shape)),
    np.lib.stride_tricks.sliding_window_view: lambda x, window, axis: x._looked_at(
        lambda a: np.lib.stride_tricks.sliding_window_view(a, window, axis)
    ),
    np.sum: lambda x, axis=None, dtype=None, keepdims=False: x.sum(axis, dtype, keepdims),
    np.max: lambda x, axis=None, keepdims=False: x.max(axis, keepdims),
    np.min: lambda x, axis=None, keepdims=False: x.min(axis, keepdims),
    np.mean: lambda x, axis=None, dtype=None, keepdims=False: x.mean(axis, dtype, keepdims),
}
