"""What tensors do in expressions, in NumPy's manner: operators, indices, reductions.

A mixin of `Tensor`; every method is a composition of ops. Numbers may stand on either side, and
shapes broadcast in both directions: the result has the left operand's dtype.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ggraph.dtype import F32, F64, DType
from ggraph.errors import GraphError, ShapeError, shown
from ggraph.numerals import has_reciprocal, is_number, is_plus_0, real

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ggraph.tensor import Array, Tensor

    Operand: TypeAlias = Tensor | float
    Index: TypeAlias = int | slice | EllipsisType | None

_SCOPE: ContextVar[str] = ContextVar("scope", default="")


@contextmanager
def scope(name: str) -> "Iterator[None]":
    """Names given inside get `name.` in front: with scope("blk.3"): weight("w", ..) is blk.3.w.

    Scopes nest; those of threads and tasks are their own.
    """
    if not isinstance(name, str) or not name:
        raise GraphError(f"scope: expected a name, got {shown(name)}")
    token = _SCOPE.set(f"{_SCOPE.get()}{name}.")
    try:
        yield
    finally:
        _SCOPE.reset(token)


@contextmanager
def unscoped() -> "Iterator[None]":
    """Names given inside are whole: for passes, which name what they make after what was there."""
    token = _SCOPE.set("")
    try:
        yield
    finally:
        _SCOPE.reset(token)


def scoped(name: str) -> str:
    """A given name in the present scope; no name stays none."""
    return f"{_SCOPE.get()}{name}" if name else name


class Face:
    """Operators and methods of a tensor."""

    shape: tuple[int, ...]
    dtype: DType
    __array_ufunc__ = None  # NumPy leaves arithmetic with tensors to them

    def _op(self, op: str, *sources: "Any", **attrs: "Any") -> "Tensor":
        raise TypeError(f"{op}: no tensor")

    def _with(self, op: str, left: Any, right: Any, name: str = "") -> "Tensor":
        """A binary op of tensors or numbers, one of them this tensor, broadcast both ways; beside a
        number the result has this tensor's type."""
        a, b = (self._tensor(v) for v in (left, right))
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise ShapeError(
                f"{op}: cannot broadcast {list(a.shape)} of {a.label} and {list(b.shape)} of "
                f"{b.label}"
            ) from None
        if a.shape != shape:
            a = self._op("repeat", a, shape=shape)
        if isinstance(left, Face) or a.dtype is self.dtype:
            return self._op(op, a, b, name=name)
        return self._op("cast", self._op(op, a, b), dtype=self.dtype.name, name=name)

    def _tensor(self, value: "Operand") -> "Tensor":
        """A number as a tensor of one element, of this dtype or, beside narrower floats, float32.
        ShapeError for anything else."""
        if isinstance(value, Face):
            return value
        if not is_number(value):
            raise ShapeError(
                f"expected a tensor or a number, got {shown(value)}: feed an array as an input, or "
                "keep it as a weight"
            )
        narrow = self.dtype.is_float and not self.dtype.is_block and self.dtype is not F64
        kept = F32 if narrow else self.dtype
        return self._op("fill", shape=(), value=real(value), dtype=kept.name)

    def _scaled(self, factor: float, bias: float) -> "Tensor":
        """A bias of 0 is none, so that zeros keep their sign."""
        return self._op("scale", self, scale=real(factor), bias=real(bias))

    def __add__(self, other: "Operand") -> "Tensor":
        if is_number(other) and not is_plus_0(other):  # which makes -0 into 0
            return self._scaled(1.0, other)
        return self._with("add", self, other)

    def __radd__(self, other: float) -> "Tensor":
        return self + other

    def __sub__(self, other: "Operand") -> "Tensor":
        return self + -real(other) if is_number(other) else self._with("sub", self, other)

    def __rsub__(self, other: float) -> "Tensor":
        if is_number(other) and not is_plus_0(other):
            return self._scaled(-1.0, other)
        return self._with("sub", other, self)

    def __mul__(self, other: "Operand") -> "Tensor":
        return self._scaled(other, 0.0) if is_number(other) else self._with("mul", self, other)

    def __rmul__(self, other: float) -> "Tensor":
        return self * other

    def __truediv__(self, other: "Operand") -> "Tensor":
        """By a number whose reciprocal is exact, a power of two, a product."""
        if is_number(other) and has_reciprocal(real(other)):
            return self._scaled(1.0 / real(other), 0.0)
        return self._with("div", self, other)

    def __rtruediv__(self, other: float) -> "Tensor":
        return self._with("div", other, self)

    def __neg__(self) -> "Tensor":
        return self._op("neg", self)

    def __abs__(self) -> "Tensor":
        return self._op("abs", self)

    def __pow__(self, exponent: "Operand") -> "Tensor":
        """Small powers as products and roots, others as `pow`."""
        if is_number(exponent) and exponent in (0.5, 1, 2, 3):
            if exponent == 0.5:
                return self._op("sqrt", self)
            square = self._op("sqr", self) if exponent > 1 else self._scaled(1.0, 0.0)
            return square * self if exponent == 3 else square  # type: ignore[operator]
        return self._with("pow", self, exponent)

    def __rpow__(self, base: float) -> "Tensor":
        return self._with("pow", base, self)

    def __gt__(self, other: "Operand") -> "Tensor":
        """1 where this is greater, else 0."""
        return self._stepped(other, lambda above: above)

    def __lt__(self, other: "Operand") -> "Tensor":
        """1 where this is less, else 0."""
        return self._stepped(other, lambda above: -above)

    def __ge__(self, other: "Operand") -> "Tensor":
        """1 where this is not less, else 0."""
        return self._unless(self < other, other)

    def __le__(self, other: "Operand") -> "Tensor":
        """1 where this is not greater, else 0."""
        return self._unless(self > other, other)

    def __eq__(self, other: object) -> bool:
        """Whether this is the very same tensor. ShapeError beside a number: see `ops.equal`."""
        if is_number(other) or isinstance(other, np.ndarray):
            raise ShapeError(f"{self!r} == {shown(other)}: asks for the same tensor; see ops.equal")
        return self is other

    __hash__ = object.__hash__

    def _stepped(self, other: "Operand", way: "Callable[[Tensor], Tensor]") -> "Tensor":
        """1 where the difference, taken in the wider of the two types, is above 0 in this way."""
        types = {t.dtype for t in (self, other) if isinstance(t, Face)}
        wide = F64 if F64 in types else F32
        plain = self.dtype.is_float and not self.dtype.is_block
        if not plain or self.dtype is wide:
            return self._op("step", way(self - other))
        found = self._op("step", way(self._op("cast", self, dtype=wide.name) - other))
        return self._op("cast", found, dtype=self.dtype.name)

    def _unless(self, holds: "Tensor", other: "Operand") -> "Tensor":
        """1 where a comparison does not hold, and 0 where a number is none: sgn keeps NaN."""
        known = 0.5 - holds
        for t in (self, other):
            if isinstance(t, Face) or t != t:
                known = known + (t._op("sgn", t) * 0.0 if isinstance(t, Face) else t)
        return self._op("step", known)

    def __matmul__(self, other: "Tensor") -> "Tensor":
        """NumPy's product [.., m, k] @ [.., k, n], in float32; `ops.mul_mat(w, x)` is ggml's."""
        if not isinstance(other, Face):
            raise ShapeError(f"{self!r} @ {shown(other)}: expected a tensor, such as a weight")
        a, b = self[...], other
        said = _check_product(a, b)
        x, w = _as_row(a) if len(a.shape) == 1 else a, _as_row(b) if len(b.shape) == 1 else b.T
        try:
            lead = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        except ValueError:
            raise ShapeError(
                f"{said}: cannot broadcast the leading axes {list(x.shape[:-2])} and "
                f"{list(w.shape[:-2])}"
            ) from None
        if x.shape[:-2] != lead:
            x = self._op("repeat", x, shape=(*lead, *x.shape[-2:]))
        y = self._op("mul_mat", w, x)
        shape = (*lead, *a.shape[-2:-1], *(b.shape[-1:] if len(b.shape) > 1 else ()))
        return y if y.shape == shape else self._op("reshape", y, shape=shape)

    def __rmatmul__(self, other: object) -> "Tensor":
        raise ShapeError(f"{shown(other)} @ {self!r}: expected a tensor, such as a weight")

    def __getitem__(self, key: "Index | tuple[Index, ...]") -> "Tensor":
        """A view, as NumPy's: whole numbers, slices with any step from 1, None and an ellipsis."""
        keys = list(key) if isinstance(key, tuple) else [key]
        shown, n = sum(k is not None for k in keys), len(self.shape)
        if any(k is Ellipsis for k in keys):
            i = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[i : i + 1] = [slice(None)] * (n - shown + 1)
        else:
            keys += [slice(None)] * (n - shown)
        axes = [k for k in keys if k is not None]
        if len(axes) != n:
            raise ShapeError(f"{self!r}: {len(axes)} indices for {n} axes")
        spans = [_span(k, size, self) for k, size in zip(axes, self.shape, strict=True)]
        starts, sizes, steps = (tuple(s[i] for s in spans) for i in range(3))
        box = self._box(starts, sizes, steps)
        kept = iter(zip(axes, sizes, strict=True))
        shape = []
        for k in keys:
            axis, size = (None, 1) if k is None else next(kept)
            if axis is None or isinstance(axis, slice):
                shape.append(size)
        return box if tuple(shape) == box.shape else self._op("reshape", box, shape=tuple(shape))

    def __len__(self) -> int:
        """The size of the first axis."""
        if not self.shape:
            raise ShapeError(f"{self!r}: a scalar has no axis to go along")
        return self.shape[0]

    def __iter__(self) -> "Iterator[Tensor]":
        """Along the first axis."""
        return (self[i] for i in range(len(self)))

    def _box(
        self, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]
    ) -> "Tensor":
        if sizes == self.shape:
            return self  # type: ignore[return-value]  # all faces are tensors
        return self._op("slice", self, starts=starts, sizes=sizes, steps=steps)

    def _reduced(self, kind: str, axis: "int | Sequence[int] | None", keepdims: bool) -> "Tensor":
        if not isinstance(keepdims, bool | np.bool_):
            raise ShapeError(f"{self!r}: keepdims={shown(keepdims)}: expected True or False")
        n = len(self.shape)
        given = range(n) if axis is None else _wholes((axis,), "axis", self)
        axes = tuple(sorted([a + n if a < 0 else a for a in given]))
        found = self._op("reduce", self, kind=kind, axes=axes)
        shape = tuple(1 if i in axes else s for i, s in enumerate(self.shape))
        if keepdims or not axes:
            return found
        kept = tuple(s for i, s in enumerate(shape) if i not in axes)
        return self._op("reshape", found, shape=kept)

    def sum(self, axis: "int | Sequence[int] | None" = None, *, keepdims: bool = False) -> "Tensor":
        """Sums over the axes (all by default), float32."""
        return self._reduced("sum", axis, keepdims)

    def mean(
        self, axis: "int | Sequence[int] | None" = None, *, keepdims: bool = False
    ) -> "Tensor":
        """Means over the axes (all by default), float32."""
        return self._reduced("mean", axis, keepdims)

    def max(self, axis: "int | Sequence[int] | None" = None, *, keepdims: bool = False) -> "Tensor":
        """Greatest elements over the axes (all by default), float32; NaN where one is."""
        return self._reduced("max", axis, keepdims)

    def min(self, axis: "int | Sequence[int] | None" = None, *, keepdims: bool = False) -> "Tensor":
        """Least elements over the axes (all by default), float32; NaN where one is."""
        return self._reduced("min", axis, keepdims)

    def cumsum(self, axis: int = -1) -> "Tensor":
        """Running sums along an axis."""
        n, axis = len(self.shape), _axis(axis, self)
        if axis == n - 1:
            return self._op("cumsum", self)
        order = tuple(n - 1 if i == axis else axis if i == n - 1 else i for i in range(n))
        turned = self._op("permute", self, axes=order)
        return self._op("permute", self._op("cumsum", turned), axes=order)

    @property
    def T(self) -> "Tensor":
        """View with the last two axes exchanged."""
        return self._op("transpose", self)

    def reshape(self, *shape: "int | Sequence[int]") -> "Tensor":
        """View of another shape; one size may be -1. ShapeError where that would take a copy."""
        return self._op("reshape", self, shape=_wholes(shape, "size", self))

    def permute(self, *axes: "int | Sequence[int]") -> "Tensor":
        """View with the axes in the given order, as in NumPy's transpose."""
        return self._op("permute", self, axes=_wholes(axes, "axis", self))

    def __bool__(self) -> bool:
        """ShapeError: what decides must be computed first, or chosen by `ops.where`."""
        raise ShapeError(f"{self!r} has no truth before it is computed; see ops.where")

    def __array_function__(self, f: Any, types: object, args: object, kwargs: object) -> object:
        """ShapeError that names what to write instead."""
        if f is np.shape:
            return self.shape
        name = {"transpose": "permute", "swapaxes": "permute"}.get(f.__name__, f.__name__)
        instead = f"write x.{name}(..)" if hasattr(Face, name) else "see ggraph.ops"
        raise ShapeError(f"np.{f.__name__} of {self!r}: it has no values yet; {instead}")

    def __float__(self) -> float:
        """As `__array__`."""
        return float(self.__array__())

    def __int__(self) -> int:
        """As `__array__`."""
        return int(self.__array__())

    def __array__(self, *given: object, **how: object) -> "Array":
        """ShapeError: no NumPy array is there before a session has run."""
        raise ShapeError(f"{self!r} has no values before it is computed: run it, or evaluate it")


def _as_row(t: "Tensor") -> "Tensor":
    """A vector as a matrix of one row."""
    return t._op("reshape", t, shape=(1, *t.shape))


def _check_product(a: "Tensor", b: "Tensor") -> str:
    """A product in words. ShapeError where NumPy has none either, or mul_mat none of the types."""
    said = " @ ".join(f"{t.label} {t.dtype}{list(t.shape)}" for t in (a, b))
    if not a.shape or not b.shape:
        raise ShapeError(f"{said}: a scalar has no rows; see *")
    for t in (a, b):
        if not t.dtype.is_float or t.dtype.is_block:
            raise ShapeError(f"{said}: {t.dtype} is no plain float type; see ops.mul_mat")
    inner = a.shape[-1], b.shape[-2:][0]
    if inner[0] != inner[1]:
        raise ShapeError(f"{said}: inner sizes {inner[0]} and {inner[1]} differ")
    return said


def _wholes(given: Sequence[object], what: str, t: Face) -> tuple[int, ...]:
    """Whole numbers, one by one or as one sequence. ShapeError for anything else."""
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = given[0]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ShapeError(f"{t!r}: {what} {shown(value)}: expected a whole number")
    return tuple(int(v) for v in given)  # type: ignore[call-overload]  # they are


def _axis(axis: object, t: Face) -> int:
    """An axis of `t`, counted from the front. ShapeError for none of its own."""
    found, n = _wholes((axis,), "axis", t), len(t.shape)
    if len(found) != 1:
        raise ShapeError(f"{t!r}: {shown(axis)}: expected one axis")
    (at,) = found
    if not -n <= at < n:
        raise ShapeError(f"{t!r}: {at} is none of its {n} axes")
    return at % n


def _span(key: object, size: int, t: Face) -> tuple[int, int, int]:
    """First place, count and step of one axis's index. ShapeError for what is none."""
    if isinstance(key, slice):
        try:
            start, stop, step = key.indices(size)
        except TypeError:
            raise ShapeError(f"{t!r}: index {shown(key)}: expected whole numbers") from None
        except ValueError:
            raise ShapeError(f"{t!r}: a step of 0; views run forwards") from None
        if step < 1:
            raise ShapeError(f"{t!r}: a step of {step}; views run forwards")
        return start, max(0, -(-(stop - start) // step)), step
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise ShapeError(
            f"{t!r}: index {shown(key)}: expected a number or a slice; see ops.get_rows"
        )
    at = int(key) + size if key < 0 else int(key)
    if not 0 <= at < size:
        raise ShapeError(f"{t!r}: index {key} is outside an axis of {size}")
    return at, 1, 1
