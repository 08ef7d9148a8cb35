"""From an op's traced meaning to loop nests: axes dropped, merged and put in order.

`plan_nests(t)` decides from the tensor alone, without a byte of memory, so that planning can ask
what has a kernel. One nest per box of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ggraph.backends.cpu.codegen.memo import Memo
from ggraph.backends.cpu.codegen.simd import HEADER_WORDS
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, MOVED
from ggraph.backends.cpu.kernels.nest import FIRST, LANES
from ggraph.backends.cpu.kernels.nest_form import Nest, Operand
from ggraph.backends.cpu.runtime.interpreter import WORDS
from ggraph.device import Need
from ggraph.dtype import F32, DType
from ggraph.ops.evaluate import encode
from ggraph.ops.passes import held
from ggraph.ops.rules import identity
from ggraph.ops.steps import ROOM, Box, Shape, Step, Trace, Untraceable
from ggraph.ops.trace import trace
from ggraph.strides import contiguous
from ggraph.tensor import Array, Tensor, frozen

MOST_KEPT, MOST_REDUCED, MOST_SOURCES = 6, 3, 12


@dataclass(frozen=True)
class Axis:
    """An axis of the loops: its extent, whether it is reduced, and each operand's stride."""

    extent: int
    reduced: bool
    strides: tuple[int, ...]  # bytes; y first


@dataclass(frozen=True, eq=False)
class Planned:
    """A nest and its words: axes in loop order, each operand's source (-1 - i: a constant; None:
    y) with a byte offset there, and the expression's numbers."""

    nest: Nest
    axes: tuple[Axis, ...]
    places: tuple[tuple[int | None, int], ...]
    numbers: tuple[float, ...]
    constants: tuple[Array, ...]


@dataclass(frozen=True, eq=False)
class Nests:
    """All nests of an op: for each room its bytes and what fills it, then what makes the result."""

    rooms: tuple[tuple[int, tuple[Planned, ...]], ...]
    result: tuple[Planned, ...]


Layout = tuple[Shape, Shape, str]  # shape, strides and type of a source or result
Signature = tuple[str, object, tuple[tuple[str, object], ...], tuple[Layout, ...], Layout]


def signature(t: Tensor) -> Signature:
    """All that decides the nests of `t`, its meaning among it: another op may have its name."""
    layouts = tuple((s.shape, s.strides, s.dtype.name) for s in t.sources)
    meaning = None if t.spec is None else t.spec.reference
    return t.op, meaning, frozen(t.attrs), layouts, (t.shape, t.strides, t.dtype.name)


_NESTS = Memo[Nests | None]()


def plan_nests(t: Tensor) -> Nests | None:
    """The nests that compute `t`; None where its meaning is not one of elements."""
    return _NESTS.find(signature(t), lambda: _traceable(_as_bytes(t)))


def _traceable(t: Tensor) -> Nests | None:
    try:
        return _planned(t)
    except Untraceable:
        return None


def _planned(t: Tensor) -> Nests:
    found = trace(t)
    rooms = []
    for shape, boxes in found.rooms:
        room = replace(t, shape=shape, strides=contiguous(shape, F32), dtype=F32)
        rooms.append((prod(shape) * 4, _nests(room, found, boxes)))
    return Nests(tuple(rooms), _nests(t, found, found.boxes))


def _nests(t: Tensor, found: Trace, boxes: Sequence[Box]) -> tuple[Planned, ...]:
    return tuple(_nest(t, found, box) for box in boxes if prod(box.sizes))


def rooms(t: Tensor) -> tuple[Need, ...]:
    """What the nests of `t` need beside its operands."""
    planned = plan_nests(t)
    sizes = [nbytes for nbytes, _ in planned.rooms] if planned else []
    return tuple(Need(f"room{i}", nbytes) for i, nbytes in enumerate(sizes))


def _as_bytes(t: Tensor) -> Tensor:
    """An op that moves blocks as one that moves their bytes."""
    if t.spec is None or t.spec.reference is not identity or not t.dtype.is_block:
        return t
    return replace(_unpacked(t), sources=tuple(map(_unpacked, t.sources[:1])), attrs={})


_BYTE = DType("i8", 24, 1, 1, "<i1")


def _unpacked(t: Tensor) -> Tensor:
    if not t.dtype.is_block:
        return t
    shape = (*t.shape[:-1], t.shape[-1] // t.dtype.block, t.dtype.block_bytes)
    return replace(t, shape=shape, strides=(*t.strides, 1), dtype=_BYTE)


def _nest(t: Tensor, found: Trace, box: Box) -> Planned:
    if found.steps[box.step].op == "fill":
        found, box = _filling(t, found, box)
    reached = [found.steps[i] for i in found.reached(box.step)]
    reduced = {s.data for s in reached if s.op in FIRST}
    spaces = {found.steps[s.args[0]].shape for s in reached if s.op in FIRST}
    if len(reduced) > 1 or len(spaces) > 1:
        raise Untraceable(f"{t.op}: reductions over several spaces")
    space = np.broadcast_shapes(box.shape, *spaces)
    gone = set(next(iter(reduced), ()))
    loads = [i for i in found.reached(box.step) if found.steps[i].op == "source"]
    if len(loads) > MOST_SOURCES:
        raise Untraceable(f"{t.op}: {len(loads)} sources")
    windows = [found.steps[i] for i in loads]
    strides = [_result_strides(t, box, space), *(_aligned(s, space) for s in windows)]
    axes = _axes(space, gone, strides)
    kinds = _kinds(t, found, box, windows)
    along = _direction(axes, kinds, found.steps[box.step].shape == space)
    nest, numbers = _steps(found, box, loads, axes, kinds, along)
    places = [(None, _offset(t, box)), *((s.data[0], s.data[1]) for s in windows)]
    if HEADER_WORDS + len(nest.args) > WORDS:
        raise Untraceable(f"{t.op}: {len(nest.args)} words")
    return Planned(nest, axes, tuple(places), numbers, tuple(found.constants))


def _filling(t: Tensor, found: Trace, box: Box) -> tuple[Trace, Box]:
    """The same box as a window on one number in the result's own type."""
    number = found.steps[found.steps[box.step].args[0]].data
    held = encode(np.full(1, number, np.float32 if t.dtype.is_float else np.int64), t.dtype)
    one = Trace(constants=[held])
    step = one.add("source", shape=box.shape, data=(-1, 0, (0,) * len(box.shape)))
    return one, replace(box, step=step)


def _offset(t: Tensor, box: Box) -> int:
    return sum(a * s for a, s in zip(box.starts, t.strides, strict=True))


def _result_strides(t: Tensor, box: Box, space: Shape) -> Shape:
    """y's strides over the space that fills the box; 0 along what is reduced away."""
    if box.shape == box.sizes and len(box.sizes) == len(t.strides):
        strides = t.strides
    elif (box.sizes == t.shape and t.is_contiguous) or prod(box.shape) == t.size:
        steps, size = [], t.dtype.block_bytes
        for n in reversed(box.shape):
            steps.append(size)
            size *= n
        strides = tuple(reversed(steps))
    else:
        raise Untraceable(f"{t.op}: a box of another shape")
    pairs = zip(box.shape, strides, space, strict=True)
    return tuple(0 if n == 1 and whole != 1 else s for n, s, whole in pairs)


def _aligned(window: Step, space: Shape) -> Shape:
    """A window's strides over the whole space: 0 where it repeats."""
    lead = len(space) - len(window.shape)
    if lead < 0:
        raise Untraceable("a source with more axes than the result")
    own = [0 if n == 1 else s for n, s in zip(window.shape, window.data[2], strict=True)]
    return (*(0,) * lead, *own)


def _axes(space: Shape, gone: set[int], strides: Sequence[Shape]) -> tuple[Axis, ...]:
    """Kept axes, then reduced ones; axes of one place dropped, neighbours merged where each operand
    lies as if they were one."""
    every = [
        Axis(n, i in gone, tuple(s[i] for s in strides)) for i, n in enumerate(space) if n != 1
    ]
    merged: list[Axis] = []
    for axis in [a for a in every if not a.reduced] + [a for a in every if a.reduced]:
        if merged and _one(merged[-1], axis):
            merged[-1] = replace(axis, extent=merged[-1].extent * axis.extent)
        else:
            merged.append(axis)
    kept = [a for a in merged if not a.reduced]
    rest = [a for a in merged if a.reduced]
    if gone and not rest:
        rest = [Axis(1, True, (0,) * len(strides))]
    if not kept and not gone:
        kept = [Axis(1, False, (0,) * len(strides))]
    if len(kept) > MOST_KEPT or len(rest) > MOST_REDUCED:
        raise Untraceable(f"{len(kept)} + {len(rest)} axes")
    return (*kept, *rest)


def _one(outer: Axis, inner: Axis) -> bool:
    if outer.reduced != inner.reduced:
        return False
    pairs = zip(outer.strides, inner.strides, strict=True)
    return all(a == b * inner.extent for a, b in pairs)


def _kinds(t: Tensor, found: Trace, box: Box, windows: Sequence[Step]) -> tuple[str, ...]:
    """Element names, y first; what is only moved is its bytes."""
    types = [_type(t, found, s.data[0]) for s in windows]
    if found.steps[box.step].op == "source" and types == [t.dtype]:
        size = t.dtype.block_bytes
        return ("f32" if size == 4 else f"b{size}",) * 2
    found_kinds = (t.dtype.name, *(d.name for d in types))
    if not set(found_kinds) <= set(ELEMENT_BYTES):
        raise Untraceable(f"{t.op}: elements {found_kinds}")
    return found_kinds


def _type(t: Tensor, found: Trace, source: int) -> DType:
    """The type of a source; a constant is float32, or of the result's type where it fills it."""
    if source >= ROOM:
        return F32
    if source >= 0:
        return t.sources[source].dtype
    held = found.constants[-1 - source]
    return F32 if held.dtype == np.float32 else t.dtype


def _direction(axes: Sequence[Axis], kinds: Sequence[str], whole: bool) -> str:
    """Along which innermost axis vectors lie: where more operands lie side by side."""
    kept = [a for a in axes if not a.reduced]
    reduced = [a for a in axes if a.reduced]
    if not reduced:
        return "kept"
    if not kept or kept[-1].extent < LANES:  # whatever the ISA, as it decides the order of sums
        return "reduced"

    both = [i for i in range(0 if whole else 1, len(kinds))
            if kept[-1].strides[i] and reduced[-1].strides[i]]  # fmt: skip
    counted = both or range(0 if whole else 1, len(kinds))  # what is read once for many counts less

    def beside(axis: Axis) -> int:
        return sum(axis.strides[i] == ELEMENT_BYTES[kinds[i]] for i in counted)

    return "kept" if beside(kept[-1]) > beside(reduced[-1]) else "reduced"


def _steps(
    found: Trace, box: Box, loads: Sequence[int], axes: Sequence[Axis], kinds: Sequence[str],
    along: str,
) -> tuple[Nest, tuple[float, ...]]:  # fmt: skip
    reached = found.reached(box.step)
    place = {step: i for i, step in enumerate(reached)}
    steps: list[tuple[str, tuple[int, ...]]] = []
    numbers: list[float] = []
    for i in reached:
        s = found.steps[i]
        if s.op == "source":
            steps.append(("load", (1 + loads.index(i),)))
        elif s.op == "number":
            steps.append(("number", (len(numbers),)))
            numbers.append(s.data)
        else:
            steps.append((s.op, tuple(place[a] for a in s.args)))
    inner = axes[-1] if along == "reduced" else [a for a in axes if not a.reduced][-1]
    lying = [_lies(s, ELEMENT_BYTES[k]) for s, k in zip(inner.strides, kinds, strict=True)]
    operands = tuple(Operand(k, lies) for k, lies in zip(kinds, lying, strict=True))
    reduced = sum(a.reduced for a in axes)
    whole = bool(reduced) and found.steps[box.step].op not in FIRST and _spans(found, box)
    kept = held(found, box.step) if whole and kinds[0] == "f32" else None
    computes = _computes(kinds, found.steps[box.step].op)
    nest = Nest(
        len(axes) - reduced, reduced, along, operands, tuple(steps), computes, whole,
        None if kept is None else place[kept],
    )  # fmt: skip
    return nest, tuple(numbers)


def _spans(found: Trace, box: Box) -> bool:
    """Whether the result has the reduced axes too."""
    axes = next(s.data for s in found.steps if s.op in FIRST)
    space = next(found.steps[s.args[0]].shape for s in found.steps if s.op in FIRST)
    shape = found.steps[box.step].shape
    return any(shape[a] != 1 for a in axes) or all(space[a] == 1 for a in axes)


def _lies(stride: int, size: int) -> str:
    return "v" if stride == size else "s" if stride == 0 else "g"


def _computes(kinds: Sequence[str], op: str) -> str:
    if len(kinds) == 2 and kinds[0] == kinds[1]:
        return kinds[0] if kinds[0] in MOVED else "f32"
    return "i64" if op == "source" and all(k.startswith("i") for k in kinds) else "f32"
