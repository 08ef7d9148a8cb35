"""Graphs in plain NumPy: the oracle of every backend, and the bridge from bytes to values.

A *logical* array holds a tensor's values in its shape: float32 for every float type (f64 apart),
the plain integer type otherwise. *Storage* is the bytes as they lie in memory. Nothing here is
fast, and nothing here decides: values live in one byte array each, views are read through their
strides, storing rounds to the dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.door import checked
from ggraph.dtype import A8, BF16, DType
from ggraph.errors import GgraphError, GraphError, InputError, shown
from ggraph.formats.activations import read_a8, write_a8
from ggraph.formats.checkpoint import storage_shape
from ggraph.formats.lazy_array import Storage
from ggraph.formats.quants import dequantize, quantize
from ggraph.graph import Graph
from ggraph.nearest import nearest
from ggraph.ops.rules import identity
from ggraph.tensor import Array, Kind, Tensor, line


@dataclass(frozen=True, eq=False)
class Bytes:
    """A tensor and its place: its root begins at byte `base` of `memory` (uint8)."""

    tensor: Tensor
    memory: Array
    base: int = 0


def raw_view(t: Tensor, memory: Array, base: int = 0) -> Array:
    """A window on the tensor's storage, without a copy.

    Plain types: [shape] of `t.dtype.np`; block types: uint8 [.., blocks per row, bytes per block].
    """
    start = base + t.offset
    if t.size == 0:
        return np.empty(_raw_shape(t), t.dtype.np)
    window = memory[start : start + t.nbytes]
    if window.nbytes != t.nbytes:
        raise GraphError(f"{line(t)}: bytes {start} + {t.nbytes} leave {memory.nbytes}")
    strides = (*t.strides, 1) if t.dtype.is_block else t.strides
    return np.ndarray(_raw_shape(t), t.dtype.np, window, 0, strides)


def _raw_shape(t: Tensor) -> tuple[int, ...]:
    if not t.dtype.is_block:
        return t.shape
    return (*t.shape[:-1], t.shape[-1] // t.dtype.block, t.dtype.block_bytes)


def decode(raw: Array, dtype: DType) -> Array:
    """Logical values of storage: f32, i*, f64 as they are, the rest as new float32 arrays.

    raw: [shape] of the plain type, or uint8 [.., bytes per row] of a block type.
    """
    if dtype is BF16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype is A8:
        return read_a8(raw)
    if dtype.is_block:
        return dequantize(raw, dtype)
    return raw.astype(np.float32) if raw.dtype == np.float16 else raw


def encode(values: Array, dtype: DType) -> Array:
    """Storage of logical values: rounded to nearest even, quantised, or cut to integers."""
    with np.errstate(all="ignore"):
        if dtype is BF16:
            bits = quantize(np.ascontiguousarray(values, np.float32).reshape(-1), BF16)
            return bits.view(np.uint16).reshape(values.shape)
        if dtype is A8:
            return write_a8(values)
        if dtype.is_block:
            return quantize(np.ascontiguousarray(values, np.float32), dtype)
        plain: Array = values.astype(dtype.np)
        return plain


def read(t: Tensor, memory: Array, base: int = 0) -> Array:
    """Logical values of `t`; `base` is where its root begins in `memory` (uint8).

    f32, f64 and integers come as a window without a copy, other types as new float32 arrays.
    """
    raw = raw_view(t, memory, base)
    if t.dtype.is_block:
        raw = np.ascontiguousarray(raw).reshape(*t.shape[:-1], -1 if t.size else 0)
        return decode(raw, t.dtype) if t.size else np.zeros(t.shape, np.float32)
    return decode(raw, t.dtype)


def write(t: Tensor, memory: Array, base: int, values: Array) -> None:
    """Store logical `values` as `t`; the rest of `memory` stays as it is."""
    if t.size:
        raw = raw_view(t, memory, base)
        raw[...] = encode(values, t.dtype).reshape(raw.shape)


def to_logical(raw: Array, t: Tensor) -> Array:
    """Logical values [t.shape] of contiguous storage, as fed by a user or kept by a checkpoint.

    raw: bytes in any shape, or the plain type's array. Raises InputError for another size.
    """
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    if flat.nbytes != _storage_bytes(t):
        raise InputError(f"{t.label}: expected {_storage_bytes(t)} bytes, got {flat.nbytes}")
    width = t.dtype.row_bytes(t.shape[-1]) if t.dtype.is_block else 0
    shape = (*t.shape[:-1], width) if t.dtype.is_block else t.shape
    return decode(flat.view(t.dtype.np).reshape(shape), t.dtype)


def to_storage(values: Array, t: Tensor) -> Array:
    """Contiguous storage of logical values: [shape] of the plain type, or uint8 [.., row bytes].

    Raises InputError for another shape.
    """
    if values.shape != t.shape:
        raise InputError(f"{t.label}: expected {list(t.shape)}, got {list(values.shape)}")
    if t.size == 0:
        width = t.dtype.row_bytes(t.shape[-1]) if t.dtype.is_block else 0
        return np.empty((*t.shape[:-1], width) if t.dtype.is_block else t.shape, t.dtype.np)
    return encode(values, t.dtype)


def feed_storage(t: Tensor, given: object) -> Array:
    """The storage of leaf `t`, of storage or of plain numbers, which are rounded as NumPy's astype
    does it. InputError for another shape, for what is no number, and for what NumPy would not cast
    as "same_kind" (1.7 for an i32) or could not keep: 2**32 + 3 for an i32, 1e9 for an f16.
    """
    array = array_of(t, given, InputError)
    if is_storage(t, array):
        return array
    if array.shape != t.shape and (array.dtype != t.dtype.np or not t.dtype.is_block):
        raise InputError(f"{titled(t)}: expected shape {list(t.shape)}, got {list(array.shape)}")
    if array.shape != t.shape or array.dtype.kind not in ("biuf" if t.dtype.is_float else "biu"):
        raise InputError(refusal(t, array))
    with np.errstate(all="ignore"):
        coded = t.dtype.is_float and t.dtype.np.kind == "u"  # of float32: bf16, block types
        wide = array.astype(np.float32) if coded else array  # an f16 is rounded once
        stored = to_storage(wide, t)
    _same_numbers(t, array, wide if coded else stored)
    return stored


def _same_numbers(t: Tensor, given: Array, stored: Array) -> None:
    """InputError where an integer changed, or a finite number became infinite."""
    lost = np.isfinite(given) & ~np.isfinite(stored) if t.dtype.is_float else given != stored
    if lost.any():
        first = given[lost].flat[0]
        raise InputError(f"{titled(t)}: {first!r} does not fit into {t.dtype}")


def array_of(t: Tensor, given: object, error: type[GgraphError]) -> Array:
    """`given` as an array; nothing but arrays and nested sequences of numbers is one."""
    if isinstance(given, np.ndarray) and hasattr(given, "mask"):  # np.ma is imported when asked for
        gaps = "a masked array; array.filled(..) says what is in its gaps"
        raise error(f"{titled(t)}: expected {_wanted(t)}, got {gaps}")
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise error(f"{titled(t)}: expected {_wanted(t)}, got {shown(given)}")
    return array


def is_storage(t: Tensor, array: Storage) -> bool:
    """Whether it has the type and the shape of what a device reads."""
    return bool(array.dtype == t.dtype.np) and array.shape == storage_shape(t.shape, t.dtype)


def refusal(t: Tensor, array: Storage, also: str = "") -> str:
    """What to say of an array that does not fit."""
    return f"{titled(t)}: expected {_wanted(t)}{also}, got {array.dtype} {list(array.shape)}"


def _wanted(t: Tensor) -> str:
    return f"{t.dtype.np} {list(storage_shape(t.shape, t.dtype))}"


def titled(t: Tensor) -> str:
    """A leaf as errors begin: kind, name, type and shape."""
    return f"{t.kind.value} {t.name!r} is {t.dtype}{list(t.shape)}"


def _storage_bytes(t: Tensor) -> int:
    return t.dtype.row_bytes(t.size) if t.shape else t.dtype.block_bytes


def reference(t: Tensor, sources: Sequence[Array]) -> Array:
    """The op's meaning on logical arrays, with NumPy's floating-point warnings off. It may write
    into the array that the op overwrites, and into no other: they may be windows on a plan's bytes.

    Raises GraphError for a leaf, or when the reference breaks the promise of its shape rule.
    """
    if t.spec is None:
        raise GraphError(f"{line(t)}: a leaf has no meaning to compute")
    given = [s if i == t.spec.overwrites else read_only(s) for i, s in enumerate(sources)]
    try:
        with np.errstate(all="ignore"):
            value = t.spec.reference(*given, **t.attrs)
    except Exception as error:
        error.add_note(f"computing {line(t)}")  # of many tensors in a graph
        raise
    check_shape(t, value.shape)
    return value


def check_shape(t: Tensor, made: tuple[int, ...]) -> None:
    """GraphError where the op's meaning makes another shape than the op's rule says."""
    if made != t.shape:
        raise GraphError(f"{line(t)}: its meaning gives {list(made)}")


def read_only(values: Array) -> Array:
    """The same array, which refuses to be written."""
    shown = np.asarray(values).view()  # of no axes some are scalars
    shown.flags.writeable = False
    return shown


def compute(result: Bytes, sources: Sequence[Bytes]) -> None:
    """Run one op on bytes: read the sources, apply the reference, store the result.

    Ops that only move bytes move them unchanged, also those of block types. An op that overwrites
    a source stores the rows whose values changed, so that all other rows keep their bits.
    """
    t = result.tensor
    if t.size == 0 or t.is_view:
        return
    if t.spec is not None and t.spec.reference is identity:
        target = raw_view(t, result.memory, result.base)
        target[...] = raw_view(sources[0].tensor, sources[0].memory, sources[0].base)
        return
    values = [read(s.tensor, s.memory, s.base) for s in sources]
    if t.spec is None or t.spec.overwrites is None:
        write(t, result.memory, result.base, reference(t, values))
        return
    before = values[t.spec.overwrites]
    values[t.spec.overwrites] = before.copy()
    _store_changes(result, before.reshape(t.shape), reference(t, values))


def _store_changes(result: Bytes, before: Array, after: Array) -> None:
    """Store the rows (last axis) of `after` that differ in any bit from `before`."""
    t = result.tensor
    width = t.shape[-1] if t.shape else 1
    old, new = before.reshape(-1, width), np.asarray(after, before.dtype).reshape(-1, width)
    changed = np.any(_bits(old) != _bits(new), axis=1)  # [rows]
    raw = raw_view(t, result.memory, result.base)
    if changed.any():
        rows = raw.reshape(old.shape[0], -1)  # a window: what is overwritten is contiguous
        rows[changed] = encode(new[changed], t.dtype)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)


@checked
def evaluate(graph: Graph, feeds: Mapping[str, Array], *, every: bool = False) -> dict[str, Array]:
    """Outputs by name, and the final value of each state under the state's name; all logical.

    `feeds` holds inputs and weights, and states that do not begin as zeros: logical arrays, or the
    storage of bf16 (uint16) and block types (uint8); what they may be is what a session takes.
    With `every` all tensors are returned, each as it was when computed. Raises InputError for a
    missing, unknown or unfit feed.
    """
    memory = _fed(graph, feeds)
    found: dict[str, Array] = {}
    for t in graph:
        if not t.is_view and not t.is_leaf:
            memory[t.name] = _node(t, memory)
        if every or t.is_output:
            found[t.name] = read(t, memory[t.root.name]).copy()
    for state, last in graph.updates.items():
        found[state] = read(last, memory[last.root.name]).copy()
    return found


def _fed(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The bytes of every leaf. InputError for a feed that no leaf takes: its name is mistyped, or
    of another graph."""
    leaves = {t.name: t for t in graph if t.is_leaf}
    strangers = [name for name in feeds if name not in leaves]
    memory = {t.name: _leaf(t, feeds, strangers) for t in leaves.values()}
    for name in strangers:
        t = graph.get(name)
        why = nearest(name, leaves) if t is None else f": {line(t)} is computed"
        raise InputError(f"no input, weight or state is called {shown(name)}{why}")
    return memory


def _leaf(t: Tensor, feeds: Mapping[str, Array], strangers: Sequence[str]) -> Array:
    """The bytes of an input, weight or state."""
    given = feeds.get(t.name)
    if given is None and t.kind is Kind.STATE:
        return np.zeros(t.nbytes, np.uint8)
    if given is None:
        fed = ", ".join(str(name) for name, array in feeds.items() if array is not None)
        near = nearest(t.name, strangers)
        raise InputError(f"{t.kind.value} {t.label} was not fed; fed: {fed or 'none'}{near}")
    return np.frombuffer(np.ascontiguousarray(feed_storage(t, given)).tobytes(), np.uint8)


def _node(t: Tensor, memory: Mapping[str, Array]) -> Array:
    """The bytes of a result; what it overwrites is copied first, so that nothing ever changes."""
    old = t.overwritten
    space = memory[old.root.name].copy() if old is not None else np.zeros(t.nbytes, np.uint8)
    places = [Bytes(s, memory[s.root.name]) for s in t.sources]
    compute(Bytes(t, space), places)
    return space
