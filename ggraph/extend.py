"""Ops from outside: `register_op`, and what installed packages bring in the group `ggraph.ops`.

An op is its shape, its meaning in NumPy and examples; nothing else need be written. Where the
meaning is one of elements, reductions or views, the CPU's kernel is made from it. Where it is not,
`kernel` may be a C function; without either the op runs in NumPy, and the session says so.
"""

import ctypes
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.door import checked, fit
from ggraph.errors import GraphError, ShapeError, shown
from ggraph.lazy import lazy
from ggraph.ops.evaluate import read_only
from ggraph.ops.examples import build as build_example
from ggraph.ops.examples import feeds
from ggraph.ops.rules import WORDS, expect, rule
from ggraph.tensor import (
    OPS,
    Array,
    Attr,
    Attrs,
    Example,
    Meta,
    OpSpec,
    Rule,
    Tensor,
    apply,
    register,
)

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = lazy("importlib.metadata")

GROUP = "ggraph.ops"  # of entry points: each names a module or function that registers


@checked
def register_op(
    name: str,
    meaning: Callable[..., Array],
    *,
    examples: Sequence[Example],
    shape: Rule | None = None,
    doc: str = "",
    elementwise: bool = False,
    inplace: Sequence[int] = (),
    overwrites: int | None = None,
    kernel: Any = None,
    cuda: str = "",
) -> Callable[..., Tensor]:
    """A new op, as a function of tensors that builds its result: `op(a, b, name="", **attrs)`.

    `meaning(*arrays, **attrs)` is its NumPy reference on float32 (or integer) arrays and hangs on
    nothing else: its kernel is made once. `shape` gives `Meta(shape, dtype)` from sources and
    attributes, or raises ShapeError (by default: source 0's).
    `elementwise` says that element i needs elements i alone; `inplace` lists sources whose bytes
    the result may replace; `overwrites` the source that the meaning writes into and returns.
    `kernel`: a C function `void f(const int64_t *operands, int64_t thread, int64_t threads)` as a
    ctypes function or a `numba.cfunc`; operands are pairs of address and bytes, the result first,
    without gaps; every thread calls it and takes its share. An op with attributes has none.
    `cuda`: CUDA C++ that declares `KERNEL name(float *y, const float *a, .., i64 count)`, NAME
    being the op's: pointers to the result and to each source, without gaps, and then by name what
    it asks for of `count` (elements of the result, one thread for each), shapes (`Axes a_shape`,
    four sizes `.v[i]`, absent ones 1 in front) and the op's attributes (`int`, `i64`, `float`).
    Pointers are to `float`, `u16` (f16 and bf16), `i8`, `short`, `int` or `i64`; for operands of
    other types, or with gaps, the op goes to another device.
    `ggraph.testing.check_op(name)` holds all of this to the truth. GraphError: the name is taken,
    or no identifier, there is no example, the meaning fails on one, writes into a source there,
    gives another shape or kind of number, or another result when asked again, `inplace` or
    `overwrites` names no source, `kernel` is no C function, the source declares no such kernel, or
    an op with a kernel of its own may work in place.
    """
    if not name.isidentifier():
        raise GraphError(f"op {name!r}: expected a name of letters, digits and underscores")
    if not examples:
        raise GraphError(f"op {name!r}: expected at least one example")
    if (kernel is not None or cuda) and (inplace or overwrites is not None):
        raise GraphError(f"op {name!r}: a kernel of its own may not work in place")
    if cuda and not re.search(rf"\bKERNEL\s+{re.escape(name)}\s*\(", cuda):
        raise GraphError(f"op {name!r}: its CUDA source declares no `KERNEL {name}(..)`")
    spec = OpSpec(
        name,
        infer=_held_to(name, shape or rule(name, "x+", _as_first)),
        reference=meaning,
        inplace_ok=tuple(inplace),
        elementwise=elementwise,
        overwrites=overwrites,
        examples=tuple(examples),
        doc=doc or f"{name}(..)",
        native=kernel,
        cuda=cuda,
    )
    _register(spec)
    return _function(spec)


def _function(spec: OpSpec) -> Callable[..., Tensor]:
    """What builds the op's result: it takes what the meaning takes, tensors in arrays' place."""
    try:
        taken = inspect.signature(spec.reference)
    except (TypeError, ValueError):  # some functions of C have none
        taken = inspect.signature(lambda *_, **__: None)

    def build(*sources: Tensor, name: str = "", **attrs: Attr) -> Tensor:
        try:
            taken.bind(*sources, **attrs)
        except TypeError as error:
            raise TypeError(f"{spec.name}({', '.join(taken.parameters)}): {error}") from None
        return apply(spec.name, *sources, name=name, **attrs)

    build.__name__ = build.__qualname__ = spec.name
    build.__doc__ = spec.doc
    return checked(build, ShapeError, WORDS)


def _register(spec: OpSpec) -> None:
    """Register what holds on its examples, and nothing else."""
    if spec.native is not None:
        address_of(spec.native)
    register(spec)
    try:
        _try(spec)
    except Exception:
        del OPS[spec.name]
        raise


def _as_first(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """The first source's shape and plain type: the rule of an op that brings none."""
    x = sources[0]
    expect(not x.dtype.is_block, f"{x.label}: expected a plain type, got {x.dtype} (cast it first)")
    return Meta(x.shape, x.dtype)


def _held_to(name: str, rule: Rule) -> Rule:
    """A rule from outside: what it gives is a Meta of the kinds that its fields name."""

    def infer(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
        try:
            found: object = rule(sources, attrs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            given = ", ".join(map(repr, sources))
            raise ShapeError(f"{name}: the rule for shapes fails on {given}: {error!r}") from error
        if not isinstance(found, Meta):
            raise ShapeError(f"{name}: the rule for shapes gives {shown(found)}, expected a Meta")
        fit(found, ShapeError)
        return replace(found, shape=tuple(map(int, found.shape)))  # NumPy's numbers print otherwise

    return infer


def _try(spec: OpSpec) -> None:
    """GraphError where the meaning fails on an example, as where it writes into what the op does
    not overwrite, or gives anything but an array of the shape and kind that the rule says, or
    another one when it is asked again; and where the record speaks of a source that is none."""
    for i, example in enumerate(spec.examples):
        overwritten = () if spec.overwrites is None else (spec.overwrites,)
        for what, slots in (("inplace", spec.inplace_ok), ("overwrites", overwritten)):
            if not all(0 <= slot < len(example.args) for slot in slots):
                raise GraphError(
                    f"op {spec.name!r}: {what}={', '.join(map(str, slots))}: there is no source of "
                    f"that number in example {i}, which has {len(example.args)}"
                )
        first, second = _meant(spec, i, example), _meant(spec, i, example)
        if not np.array_equal(first, second, equal_nan=True):  # a kernel would keep the first
            raise GraphError(
                f"op {spec.name!r}: the meaning gives another result on example {i} when it is "
                "asked again; it may hang on its sources and attributes alone"
            )


def _meant(spec: OpSpec, i: int, example: Example) -> Array:
    """What the meaning gives on example `i`. GraphError as `_try` says."""
    y, title = build_example(spec, example), f"op {spec.name!r}: the meaning"
    fed = [a.copy() for a in feeds(spec, example).values()]
    fed = [a if slot == spec.overwrites else read_only(a) for slot, a in enumerate(fed)]
    try:
        found: object = spec.reference(*fed, **example.attrs)
    except Exception as error:
        raise GraphError(f"{title} fails on example {i}: {shown(error, 200)}") from error
    if not isinstance(found, np.ndarray | np.generic):
        raise GraphError(
            f"{title} gives {shown(found)} on example {i}, expected an array {list(y.shape)}"
        )
    if found.shape != y.shape:
        raise GraphError(
            f"{title} gives {list(found.shape)} on example {i}, expected {list(y.shape)}; "
            "`shape=` says which shape follows from the sources"
        )
    if found.dtype.kind not in ("biuf" if y.dtype.is_float else "biu"):
        raise GraphError(
            f"{title} gives {found.dtype} on example {i}, expected {y.dtype}; `shape=` says which "
            "type follows from the sources"
        )
    return np.asarray(found)


def load_installed() -> tuple[str, ...]:
    """Names of the ops that installed packages brought, registered now. A package lists under the
    entry-point group `ggraph.ops` a module that registers when imported, or a function to call."""
    before = set(OPS)
    for point in metadata.entry_points(group=GROUP):
        found = point.load()
        if callable(found):
            found()
    return tuple(sorted(set(OPS) - before))


def address_of(kernel: object) -> int:
    """Address of a C function that ctypes or numba knows. GraphError for anything else."""
    address = getattr(kernel, "address", None)
    if isinstance(address, int) and not isinstance(address, bool):
        return address
    try:
        found = ctypes.cast(kernel, ctypes.c_void_p).value  # type: ignore[arg-type]  # or it fails
    except (ctypes.ArgumentError, TypeError):
        found = None
    if not found or isinstance(kernel, int | str | bytes):  # which ctypes takes for an address
        raise GraphError(f"expected a C function of ctypes or numba, got {shown(kernel)}")
    return found
