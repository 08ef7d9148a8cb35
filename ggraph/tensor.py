"""Tensor, the immutable value of the DSL, and OpSpec, the record that declares an op.

Shapes are in NumPy order (last axis contiguous); ggml's `ne` is the reverse. Strides and offsets
are in bytes; for block types the last stride is the size of one block. This file knows no
particular op: `ggraph.ops` registers its records here, so that operators on tensors can find them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.door import fit
from ggraph.dtype import F32, DType, as_dtype
from ggraph.errors import GraphError, ShapeError, shown
from ggraph.face import Face, scoped
from ggraph.strides import contiguous, runs
from ggraph.unchanging import Unchanging

Attr = int | float | str | bool | None | tuple[int, ...] | tuple[float, ...]
Attrs = Mapping[str, Attr]
Array = np.ndarray[Any, Any]
NO_ATTRS: Attrs = MappingProxyType({})
__all__ = ["Arg", "Array", "Cost", "Example", "Kind", "Meta", "OpSpec", "Tensor", "input", "state",
           "weight"]  # fmt: skip
DTypeLike = DType | str | type[np.generic]


def frozen(attrs: Attrs) -> tuple[tuple[str, object], ...]:
    """Attributes as a key: 0.0 and -0.0 are equal, and not the same."""
    return tuple([(k, _frozen(v)) for k, v in sorted(attrs.items())]) if attrs else ()


def _frozen(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value.hex() if isinstance(value, float) else value


class Kind(Enum):
    """Where a tensor's bytes come from."""

    INPUT = "input"  # written by the host before every run
    WEIGHT = "weight"  # written once, read for ever
    STATE = "state"  # survives from run to run, overwritten functionally (the KV cache)
    COMPUTED = "computed"  # the result of an op


@dataclass(frozen=True)
class Meta:
    """What an op's rule says of its result.

    `strides` (bytes) and `offset` (bytes, added to the source's) are given by view ops alone.
    """

    shape: tuple[int, ...]
    dtype: DType = F32
    strides: tuple[int, ...] | None = None
    offset: int = 0


@dataclass(frozen=True)
class Cost:
    """Work of one op: floating-point operations, and bytes that must cross memory."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Arg:
    """One source of an `Example`: shape, dtype, and how the test fills it.

    `fill`: "normal", "positive", "mask" (0 or -inf), "ids:N" (integers in [0, N)), or what else
    `ggraph.ops.examples` knows.
    """

    shape: tuple[int, ...]
    dtype: DType = F32
    fill: str = "normal"


@dataclass(frozen=True)
class Example:
    """A call of an op, used by tests on every backend, by benchmarks and by the documentation."""

    args: tuple[Arg, ...]
    attrs: Attrs = field(default_factory=dict)
    tolerance: float = 1e-5  # relative to the largest magnitude of the reference's result


Rule = Callable[[Sequence["Tensor"], Attrs], Meta]


def elementwise_cost(t: "Tensor") -> Cost:
    """One operation per element; every source read once, the result written once."""
    return Cost(t.size, t.nbytes + sum(s.nbytes for s in t.sources))


@dataclass(frozen=True)
class OpSpec:
    """Everything ggraph knows of one op.

    `infer` gives shape and dtype or raises ShapeError. `reference(*arrays, **attrs)` is its meaning
    in NumPy on logical arrays (f16, bf16 and block types arrive as float32 and are rounded when
    stored); the reference of an overwriting op writes into the array it is given for that source
    and returns it. The result `view_of` source i is a window on its bytes and costs nothing; one
    that `overwrites` source i leaves its result in that source's bytes, and `soon`, right behind
    the last other reader, if it reads all of them: caches hold them. `inplace_ok` lists the
    sources whose bytes the result may replace, provided that no other source shows a byte of them:
    a promise about every kernel, and tested. Where the op is `elementwise` (element i of the result
    needs element i of the sources alone, those that repeat apart) another source may show them if
    it is the very same view. `reduces(shape, attrs)`, where there is one, gives the axes of source
    0 along which alone an element of the result needs several. With `picks` (i, j) source i is
    read only at those slices along its first axis that source j, a tensor of indices, names.
    `rounds` says in words what the op gives up on purpose; where a rewrite makes such an op, the
    plan approximates the graph. `limits` gives for each source of indices the number below which
    all of them must be; one beyond is an InputError when the op runs.
    """

    name: str
    infer: Rule
    reference: Callable[..., Array]
    ggml: str | None = None  # name of the ggml peer, None where there is none
    cost: Callable[["Tensor"], Cost] = elementwise_cost
    view_of: int | None = None
    overwrites: int | None = None
    soon: bool = False
    inplace_ok: tuple[int, ...] = ()
    elementwise: bool = False
    reduces: Callable[[tuple[int, ...], Attrs], tuple[int, ...]] | None = None
    picks: tuple[int, int] | None = None
    rounds: str = ""
    limits: Callable[["Tensor"], Mapping[int, int]] | None = None
    native: Any = None  # a C function, see `ggraph.extend.register_op`
    cuda: str = ""  # CUDA source, see there
    examples: tuple[Example, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        """Asked once here: every tensor carries one, and tensors are asked at every door."""
        fit(self, GraphError)


OPS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    """Add an op to the registry; a second one of the same name is refused."""
    if spec.name in OPS:
        raise GraphError(f"op {spec.name!r} is registered twice")
    OPS[spec.name] = spec
    return spec


@dataclass(frozen=True, eq=False)
class Tensor(Unchanging, Face):
    """One immutable value: a leaf (input, weight, state) or the result of an op.

    Tensors compare by identity. `view_src` is the non-view tensor whose bytes a view shows,
    `offset` the distance in bytes from that tensor's first byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: Kind
    strides: tuple[int, ...]
    spec: OpSpec | None = None
    sources: tuple["Tensor", ...] = ()
    attrs: Attrs = field(default_factory=lambda: NO_ATTRS)
    view_src: "Tensor | None" = None
    offset: int = 0
    is_output: bool = False

    def __post_init__(self) -> None:
        """Asked once here, and not at the doors behind which it is used."""
        fit(self, GraphError)

    @property
    def op(self) -> str:
        """Name of the op, or of the kind for a leaf."""
        return self.spec.name if self.spec else self.kind.value

    @property
    def label(self) -> str:
        """How texts name it: by its name, or by its op where it has none yet."""
        return f"%{self.name or self.op}"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def root(self) -> "Tensor":
        """The tensor that owns the value: itself, or what a view looks at."""
        return self if self.view_src is None else self.view_src

    @cached_property
    def roots(self) -> tuple["Tensor", ...]:
        """The roots of the sources, one for each."""
        return tuple([s if s.view_src is None else s.view_src for s in self.sources])

    @cached_property
    def storage(self) -> "Tensor":
        """The tensor whose bytes hold this one: through views, and back along overwrites."""
        t = self.root
        while (over := t.overwritten) is not None:
            t = over.root
            if "storage" in vars(t):  # a state may be overwritten thousands of times
                return t.storage
        return t

    @property
    def is_view(self) -> bool:
        """Whether this is a window on another tensor's bytes and needs no work."""
        return self.view_src is not None

    @property
    def is_leaf(self) -> bool:
        """Whether no op computes this tensor."""
        return self.spec is None

    @property
    def overwritten(self) -> "Tensor | None":
        """The source whose bytes this result replaces, if its op overwrites one."""
        spec = self.spec
        if spec is None or spec.overwrites is None:
            return None
        return self.sources[spec.overwrites]

    @property
    def viewed(self) -> "Tensor | None":
        """The source that a view is a window on, which may be a view itself."""
        if self.spec is None or self.spec.view_of is None:
            return None
        return self.sources[self.spec.view_of]

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the elements lie without gaps in row-major order."""
        return self.size == 0 or self.strides == contiguous(self.shape, self.dtype)

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element (gaps of a view included)."""
        if self.size == 0:
            return 0
        dtype = self.dtype
        if len(self.shape) > 1 and self.is_contiguous:
            return self.shape[0] * self.strides[0]
        steps = [*self.shape[:-1], self.shape[-1] // dtype.block] if self.shape else []
        reach = sum([(n - 1) * s for n, s in zip(steps, self.strides, strict=True)])
        return reach + dtype.block_bytes

    def byte_ranges(self, limit: int = 64) -> tuple[tuple[int, int], ...]:
        """Half-open byte ranges within `root` that hold this tensor, merged and in order.

        Where a strided view has more than `limit` separate runs, one covering range is returned.
        """
        if not isinstance(limit, int):
            raise ShapeError(f"{self!r}: limit={shown(limit)}: expected a whole number")
        if self.size == 0:
            return ()
        found = None
        if not self.is_contiguous:
            found = runs(self.shape, self.strides, self.dtype, self.offset, limit)
        return ((self.offset, self.offset + self.nbytes),) if found is None else found

    def named(self, name: str) -> "Tensor":
        """The same tensor under another name; go on with the result, not with the original."""
        if not isinstance(name, str) or not name:
            raise GraphError(f"{self!r}: expected a name, got {shown(name)}")
        return altered(self, name=scoped(name))

    def _op(self, op: str, *sources: "Tensor", **attrs: Any) -> "Tensor":
        return apply(op, *sources, **attrs)

    def __repr__(self) -> str:
        return line(self)

    if not TYPE_CHECKING:  # to which every name would be one

        def __getattr__(self, name: str) -> object:
            known = f": ops.{name}(x)" if name in OPS else "; what computes stands in ggraph.ops"
            raise AttributeError(f"a tensor has no {name!r}{known}")


def altered(t: Tensor, **fields: Any) -> Tensor:
    """`t` under another name or of other sources; what is known of its bytes is kept."""
    made = object.__new__(Tensor)
    held = made.__dict__
    held.update(t.__dict__)
    held.update(fields)
    held.pop("storage", None)
    held.pop("roots", None)
    return made


def sound(*, attrs: Attrs = NO_ATTRS, **fields: object) -> Tensor:
    """A tensor of fields that need not be asked; those left out are as declared."""
    made = object.__new__(Tensor)
    made.__dict__.update(fields, attrs=attrs)
    return made


def line(t: Tensor) -> str:
    """The one text form of a tensor: `%name: dtype[shape] = op(sources) {attributes}`."""
    head = f"%{t.name or '?'}: {t.dtype}{list(t.shape)} = {t.op}"
    if t.is_leaf:
        return head
    attrs = " ".join(f"{k}={v}" for k, v in sorted(t.attrs.items()) if v is not None)
    args = ", ".join(s.label for s in t.sources)
    return f"{head}({args})" + (f" {{{attrs}}}" if attrs else "") + (" -> out" * t.is_output)


def leaf(kind: Kind, name: str, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
    """An input, weight or state. Raises GraphError for what is no name, ShapeError for an unknown
    dtype and for shapes that no buffer can hold."""
    if not isinstance(name, str) or not name:
        raise GraphError(f"{kind.value}: expected a name, got {shown(name)}")
    sizes, known = sizes_of(name, shape), as_dtype(dtype)
    strides = contiguous(sizes, known)
    return sound(
        name=scoped(name), shape=sizes, dtype=known, kind=kind, strides=strides,
        is_contiguous=True,
    )  # fmt: skip


def sizes_of(name: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple of whole numbers. ShapeError where it is none."""
    try:
        return tuple(index(n) for n in shape)  # type: ignore[attr-defined]  # that is the question
    except TypeError:
        raise ShapeError(f"%{name}: shape {shown(shape)}: expected several whole numbers") from None


def input(name: str, shape: Sequence[int], dtype: DTypeLike = F32) -> Tensor:
    """A tensor that the host writes before every run; dtype as in `ggraph.dtypes` or by name."""
    return leaf(Kind.INPUT, name, shape, dtype)


def weight(name: str, shape: Sequence[int], dtype: DTypeLike = F32) -> Tensor:
    """A constant that is loaded once."""
    return leaf(Kind.WEIGHT, name, shape, dtype)


def state(name: str, shape: Sequence[int], dtype: DTypeLike = F32) -> Tensor:
    """A tensor that keeps its value from run to run; it starts as zeros."""
    return leaf(Kind.STATE, name, shape, dtype)


def apply(op: str, *sources: Tensor, name: str = "", **attrs: Attr) -> Tensor:
    """The result of the registered op `op`. Raises ShapeError from the op's rule, GraphError for an
    unknown op and for one that reads at another position what it overwrites."""
    spec = OPS.get(op)
    if spec is None:
        raise GraphError(f"unknown op {op!r}; known: {', '.join(sorted(OPS))}")
    meta = spec.infer(sources, attrs)
    made = sound(
        name=scoped(name), shape=meta.shape, dtype=meta.dtype, kind=Kind.COMPUTED,
        strides=meta.strides or contiguous(meta.shape, meta.dtype), spec=spec, sources=sources,
        attrs=MappingProxyType(attrs),
    )  # fmt: skip
    if not meta.strides:
        vars(made)["is_contiguous"] = True
    if spec.view_of is not None:
        viewed = sources[spec.view_of]
        vars(made).update(view_src=viewed.root, offset=viewed.offset + meta.offset)
    if spec.overwrites is not None:
        check_overwrite(made)
    return made


def check_overwrite(t: Tensor) -> None:
    """What is overwritten may stand at no other position: kernels write while they read."""
    if t.spec is None or (at := t.spec.overwrites) is None:
        return
    old = t.sources[at]
    for i, s in enumerate(t.sources):
        if s.root is old.root and s.nbytes and i != at:
            raise GraphError(
                f"{line(t)}: source {i} ({s.label}) shows bytes of {old.root.label}, which "
                f"{t.op} overwrites; give it a copy: cont(..)"
            )
