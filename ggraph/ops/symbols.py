"""Symbols in place of arrays, which note what NumPy is asked to do with them. See `trace.py`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph.ops.steps import ROOM, Box, Shape, Trace, Untraceable
from ggraph.tensor import Array


def ghost(shape: Shape, strides: Shape, nbytes: int) -> Array:
    """An array of this layout over memory that nobody may touch."""
    element: Any = np.dtype(f"V{nbytes}")
    return np.lib.stride_tricks.as_strided(np.empty(1, element), shape, strides)


def place(a: Array) -> int:
    """Address of an array's first byte, to tell how far a view begins."""
    return int(a.__array_interface__["data"][0])


FLOAT: "np.dtype[Any]" = np.dtype(np.float32)  # what kernels compute in, float64 included
TRUTH: "np.dtype[Any]" = np.dtype(np.bool_)


@dataclass(frozen=True, eq=False)
class Window:
    """A view of a source: views of it are taken by NumPy."""

    number: int  # of the source; of a constant: -1 - its number
    view: Array
    base: int

    def step(self, found: Trace, view: Array) -> int:
        """The step that reads through `view`."""
        data = (self.number, place(view) - self.base, view.strides)
        return found.add("source", shape=view.shape, data=data)


def symbol(found: Trace, value: Any) -> "Symbol":
    """A symbol for a symbol, a number or an array."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, bool | int | float | np.generic):
        return Symbol(found, found.add("number", data=float(value)), (), _kind(np.asarray(value)))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return symbol(found, value.item())
    if not isinstance(value, np.ndarray):
        raise Untraceable(f"{type(value).__name__} is no array")
    held = np.ascontiguousarray(value, np.float32)
    if held.size and (held == held.flat[0]).all():
        number = found.add("number", data=float(np.asarray(value).flat[0]))
        return Symbol(found, found.add("fill", (number,), held.shape), held.shape, _kind(value))
    if not np.array_equal(held, value) and value.dtype.kind in "iu":
        raise Untraceable("integers that float32 has not")
    found.constants.append(held)
    window = Window(-len(found.constants), ghost(held.shape, held.strides, 4), 0)
    window = Window(window.number, window.view, place(window.view))
    return Symbol(found, window.step(found, window.view), held.shape, _kind(value), window)


def _kind(value: Array) -> "np.dtype[Any]":
    return FLOAT if value.dtype.kind == "f" else value.dtype


class Symbol(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is not there yet.

    `step` computes it in the trace's index space; `shape` is what the reference sees, which a
    reshape of a computed value makes another than the step's; `dtype` is that of integers and
    truths, and float32 of all that is computed.
    """

    def __init__(
        self, found: Trace, step: int, shape: Shape, dtype: "np.dtype[Any]" = FLOAT,
        window: Window | None = None, is_copy: bool = False,
    ) -> None:  # fmt: skip
        self.trace, self.step, self.shape, self.dtype = found, step, tuple(shape), dtype
        self.window, self.is_copy = window, is_copy

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether they are integers that are only known at run time."""
        return self.dtype.kind in "iu" and self.trace.steps[self.step].op != "number"

    def _as(self, shape: Shape) -> "Symbol":
        """The same, shown in another shape."""
        return Symbol(self.trace, self.step, shape, self.dtype)

    def __bool__(self) -> bool:
        raise Untraceable("a value decides what is computed")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        name = WORDS.get(ufunc, ufunc.__name__)
        if name == "matmul" and method == "__call__":
            return _matmul(*args)
        if method != "__call__" or kwargs or name not in ARITY:
            raise Untraceable(f"np.{ufunc.__name__}.{method}")
        return call(self.trace, name, *args)

    def __array_function__(self, f: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if f not in FUNCTIONS:
            raise Untraceable(f"np.{f.__name__}")
        return FUNCTIONS[f](*args, **kwargs)

    def astype(self, dtype: Any, copy: bool = True) -> "Symbol":
        """The same values: kernels compute in float32, and storing converts, but for sums. What
        would change them otherwise, as cutting to integers does, is refused."""
        wanted = np.dtype(dtype)
        if wanted != self.dtype and wanted not in (np.float32, np.float64):
            raise Untraceable(f"{self.dtype} as {wanted}")
        if wanted == np.float32 and self.trace.is_sum(self.step):
            return call(self.trace, "rounded", self)._as(self.shape)
        same = self.copy()
        same.dtype = _kind(np.empty(0, wanted))
        return same

    def copy(self) -> "Symbol":
        """The same values, into which nothing is written: symbols never change."""
        return Symbol(self.trace, self.step, self.shape, self.dtype, self.window, True)

    def _looked_at(self, view: Callable[[Array], Array]) -> "Symbol":
        if self.window is None:
            raise Untraceable("a view of what is computed")
        shown = view(self.window.view)
        window = Window(self.window.number, shown, self.window.base)
        step = window.step(self.trace, shown)
        return Symbol(self.trace, step, shown.shape, self.dtype, window, self.is_copy)

    def __getitem__(self, key: Any) -> "Symbol":
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys):
            raise Untraceable("an index that is an array")
        return self._looked_at(lambda a: a[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        """What an op writes into the value that it overwrites: a box of it."""
        keys = key if isinstance(key, tuple) else (key,)
        keys = (slice(None),) * self.ndim if keys == (Ellipsis,) else keys
        if len(keys) != self.ndim or not all(isinstance(k, slice) for k in keys):
            raise Untraceable("a place that is found at run time")
        spans = [range(*k.indices(n)) for k, n in zip(keys, self.shape, strict=True)]
        part, sizes = symbol(self.trace, value), tuple(map(len, spans))
        if not self._is_target(sizes) or part.shape != sizes or any(s.step != 1 for s in spans):
            raise Untraceable("a value that changes")
        self.trace.written.append((tuple(s.start for s in spans), part))

    def _is_target(self, sizes: Shape) -> bool:
        """Whether a box is one of what the op overwrites: no copy's; in another shape all of it."""
        target = self.trace.target
        if target is None or self.window is None or self.is_copy:
            return False
        same = self.window.number == target.window.number and self.size == target.size
        whole = self.shape == target.shape or math.prod(sizes) == self.size
        return same and whole and self.window.view.flags.c_contiguous

    def transpose(self, *axes: Any) -> "Symbol":
        """As NumPy's, of what is fed."""
        return self._looked_at(lambda a: a.transpose(*axes))

    @property
    def T(self) -> "Symbol":
        """As NumPy's, of what is fed."""
        return self.transpose()

    def swapaxes(self, a: int, b: int) -> "Symbol":
        """As NumPy's, of what is fed."""
        return self._looked_at(lambda x: x.swapaxes(a, b))

    def reshape(self, *shape: Any) -> "Symbol":
        """As NumPy's: of what is fed as a view; of what is computed only at the end."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if self.window is not None:
            try:
                return self._looked_at(lambda a: np.reshape(a, tuple(sizes), copy=False))
            except ValueError:
                pass  # not without a copy: then only as the result
        whole = np.lib.stride_tricks.as_strided(np.empty(1), self.shape, (0,) * self.ndim)
        return self._as(whole.reshape(tuple(sizes)).shape)

    def _reduced(self, op: str, axis: Any, keepdims: bool, dtype: Any = None) -> "Symbol":
        if self.is_whole or (dtype is not None and np.dtype(dtype) not in (np.float32, np.float64)):
            raise Untraceable(f"{op} of integers")
        axes = range(self.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        wanted = tuple(sorted(a % self.ndim for a in axes))
        if self.trace.steps[self.step].shape != self.shape:
            raise Untraceable("a reduction of what was reshaped")
        kept = tuple(1 if i in wanted else n for i, n in enumerate(self.shape))
        step = self.trace.add(op, (self.step,), kept, wanted)
        shape = kept if keepdims else tuple(n for i, n in enumerate(kept) if i not in wanted)
        return Symbol(self.trace, step, shape, self.dtype if op in ("max", "min") else FLOAT)

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> "Symbol":
        """As NumPy's."""
        return self._reduced("sum", axis, keepdims, dtype)

    def max(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> "Symbol":
        """As NumPy's; `initial` must be -inf, with which every maximum begins."""
        if initial not in (None, -math.inf):
            raise Untraceable(f"max with initial={initial}")
        return self._reduced("max", axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> "Symbol":
        """As NumPy's."""
        return self._reduced("min", axis, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> "Symbol":
        """As NumPy's."""
        return self._reduced("mean", axis, keepdims, dtype)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Results that are laid side by side: where each begins, and what it is; later ones win."""

    shape: Shape
    parts: list[tuple[Shape, Symbol]]

    def __array_function__(self, f: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if f not in FUNCTIONS:
            raise Untraceable(f"np.{f.__name__}")
        given = [a.settled() if isinstance(a, Boxes) else a for a in args]
        return FUNCTIONS[f](*given, **kwargs)

    def settled(self) -> Symbol:
        """One array again: it is made in a room, of float32, before what reads it."""
        if any(s.dtype != FLOAT for _, s in self.parts):
            raise Untraceable("what is laid side by side is not of floats")
        found = self.parts[0][1].trace
        boxes = tuple(box_of(self.shape, starts, s) for starts, s in self.parts)
        found.rooms.append((self.shape, boxes))
        view = ghost(self.shape, _row_major(self.shape), 4)
        window = Window(ROOM + len(found.rooms) - 1, view, place(view))
        return Symbol(found, window.step(found, view), self.shape, FLOAT, window)

    def astype(self, dtype: Any, copy: bool = True) -> "Boxes":
        """Each part so."""
        return Boxes(self.shape, [(starts, s.astype(dtype)) for starts, s in self.parts])


def _row_major(shape: Shape) -> Shape:
    """Byte strides of float32 without gaps."""
    return tuple(4 * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def call(found: Trace, op: str, *args: Any) -> Symbol:
    """One function of elements, broadcast as in NumPy."""
    given = [symbol(found, a) for a in args]
    _check(op, given)
    if op == "power":
        return _power(found, given[0], given[1])
    given = _alike(given)
    several = [s for s in given if s.shape]
    aligned = all(found.steps[s.step].shape == s.shape for s in several)
    if not aligned and len({(s.shape, found.steps[s.step].shape) for s in several}) > 1:
        raise Untraceable("arithmetic on what was reshaped")
    shape = np.broadcast_shapes(*(found.steps[s.step].shape for s in given))
    step = found.add(op, [s.step for s in given], shape)
    kind = TRUTH if op in TRUTHS else FLOAT
    return Symbol(found, step, shape if aligned else several[0].shape, kind)


def _check(op: str, given: Sequence[Symbol]) -> None:
    """Kernels compute in float32: integers and truths are numbers there beside floats alone, and
    integers do not compare."""
    if op in TRUTHS:
        good = not any(s.is_whole for s in given)
    else:
        good = any(s.dtype == FLOAT for s in (given[1:] if op == "where" else given))
    if not good:
        raise Untraceable(f"{op} of {', '.join(str(s.dtype) for s in given)}")


def _alike(given: list[Symbol]) -> list[Symbol]:
    """Where one has lost axes of its index space, as `sum` loses them, what is fed beside it in
    the same shape gets them too."""
    odd = next((s for s in given if s.shape and s.shape != s.trace.steps[s.step].shape), None)
    if odd is None:
        return given
    space = odd.trace.steps[odd.step].shape
    return [s.reshape(space)._as(odd.shape) if s.window and s.shape == odd.shape else s
            for s in given]  # fmt: skip


def _power(found: Trace, base: Symbol, exponent: Symbol) -> Symbol:
    """Small whole powers as products, the half as a root."""
    step = found.steps[exponent.step]
    if step.op == "number" and step.data == 0.5:
        return call(found, "sqrt", base)
    if step.op == "number" and step.data in (1.0, 2.0, 3.0, 4.0):
        total = base
        for _ in range(int(step.data) - 1):
            total = call(found, "multiply", total, base)
        return total
    made = found.add("power", (base.step, exponent.step),
                     np.broadcast_shapes(base.shape, exponent.shape))  # fmt: skip
    return Symbol(found, made, found.steps[made].shape)


def _matmul(a: Symbol, b: Symbol) -> Symbol:
    """A sum over products of elements, "dot", in float32: [.., m, k] @ [.., k, n]."""
    if not (isinstance(a, Symbol) and isinstance(b, Symbol)) or a.ndim < 2 or b.ndim < 2:
        raise Untraceable("a product of other things than matrices")
    return (a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :])._reduced("dot", -1, False)  # type: ignore[no-any-return]


WORDS: dict[np.ufunc, str] = {}  # ufuncs of our own, such as erf, by what kernels call them
ARITY: Mapping[str, int] = {
    "add": 2, "subtract": 2, "multiply": 2, "divide": 2, "power": 2, "maximum": 2, "minimum": 2,
    "greater": 2, "greater_equal": 2, "less": 2, "less_equal": 2, "equal": 2, "not_equal": 2,
    "negative": 1, "absolute": 1, "sign": 1, "square": 1, "sqrt": 1, "exp": 1, "expm1": 1,
    "log": 1, "log1p": 1, "sin": 1, "cos": 1, "tanh": 1, "erf": 1, "floor": 1, "ceil": 1,
    "trunc": 1, "rint": 1, "isnan": 1, "rounded": 1,
}  # fmt: skip
TRUTHS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "isnan")
FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # of NumPy's, see `functions.py`


def box_of(whole: Shape, starts: Shape, s: Symbol) -> Box:
    """Where a symbol goes in a result of the shape `whole`."""
    shape = s.trace.steps[s.step].shape
    if s.size == math.prod(whole):  # all of it, in whatever shape it was written
        return Box((0,) * len(whole), whole, s.step, shape)
    return Box(starts, s.shape, s.step, shape)
