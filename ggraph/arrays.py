"""Arrays that users hand in, checked against the tensors that they are for. Floor 5.

*Storage* is what a device reads: an array of the dtype's NumPy type in the tensor's shape; bf16 is
its bit patterns (uint16), and block types are bytes (uint8) whose last axis is one row. Weights and
states are storage and never converted. Feeds are storage too, or plain numbers in the tensor's
shape, which are converted where none of them changes its meaning.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph.errors import InputError, ModelError, shown
from ggraph.formats.checkpoint import Checkpoint, RawTensor, storage_shape
from ggraph.formats.lazy_array import LazyArray, Storage
from ggraph.formats.quantise import WRITABLE
from ggraph.graph import Graph
from ggraph.nearest import nearest
from ggraph.ops.evaluate import array_of, feed_storage, is_storage, refusal, titled
from ggraph.tensor import Array, Kind, Tensor

FEW = 32  # numbers up to which Python finds the greatest sooner than NumPy: 1.2 and 1.4 us
_UNSIGNED: Mapping[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

WeightSource = Callable[[Tensor], Storage]
Weights = WeightSource | Checkpoint | Mapping[str, "Array | RawTensor"]


def weight_source(weights: Weights | None) -> Callable[[Tensor], object]:
    """A function from a weight to what is known under its name.

    `weights` is such a function, a mapping by name, or an opened checkpoint. Raises InputError for
    anything else; the function raises ModelError for a name that a mapping lacks.
    """
    held = weights.tensors if isinstance(weights, Checkpoint) else weights or {}
    if isinstance(held, Mapping):
        return lambda t: _found(t, held)
    if not callable(held):
        raise InputError(
            f"weights: expected a mapping by name, a checkpoint or a function, got {shown(held)}"
        )
    return held


def _found(t: Tensor, held: Mapping[str, object]) -> object:
    if t.name not in held:
        names = ", ".join(list(held)[:6]) + (", .." if len(held) > 6 else "")
        near = nearest(t.name, held)
        raise ModelError(f"no weight {t.name!r}; given are {names or 'none'}{near}")
    return held[t.name]


def weight_storage(t: Tensor, given: object) -> Storage:
    """The storage of weight `t`. ModelError for another type, shape or dtype."""
    if isinstance(given, RawTensor):
        if (given.dtype, given.shape) != (t.dtype, t.shape):
            had = f"{given.dtype}{list(given.shape)}"
            raise ModelError(f"weight {t.name!r}: expected {t.dtype}{list(t.shape)}, got {had}")
        given = given.storage
    array = given if isinstance(given, LazyArray) else array_of(t, given, ModelError)
    if not is_storage(t, array):
        raise ModelError(f"{refusal(t, array)}{_advice(t, array)}")
    return array


def state_storage(t: Tensor, given: object) -> Array:
    """The storage of state `t`, or its bytes as `Session.read_state` gives them. InputError."""
    array = array_of(t, given, InputError)
    is_bytes = array.dtype == np.uint8 and array.shape == (t.nbytes,)
    if not is_bytes and not is_storage(t, array):
        raise InputError(refusal(t, array, f", or uint8 [{t.nbytes}]"))
    return array


def _advice(t: Tensor, array: Storage) -> str:
    """What to do with an array of the right numbers in another form."""
    if array.dtype.kind != "f" or array.shape != t.shape or not t.dtype.is_float:
        return ""
    if t.dtype.np.kind == "f":
        return f"; array.astype({t.dtype.np.name!r}) makes it so"
    if t.dtype not in WRITABLE:
        return ""
    shown_as = "" if t.dtype.is_block else f".view({t.dtype.np.name!r})"  # of bytes
    made = f"ggraph.formats.quantize(array, ggraph.dtypes.{t.dtype.name.upper()}){shown_as}"
    return f"; {made} makes it so"


def is_key(key: object) -> bool:
    """Whether a dict takes it. A tuple says that it is Hashable even where what it holds is not."""
    try:
        return isinstance(hash(key), int)
    except TypeError:
        return False


def output_names(outputs: object) -> tuple[str, ...]:
    """Names of outputs, as a key. InputError for what is none, such as a single one."""
    given = outputs if isinstance(outputs, Sequence) and not isinstance(outputs, str) else (None,)
    if not all(isinstance(name, str) for name in given):
        raise InputError(f"outputs={shown(outputs)}: expected several names")
    return tuple(given)


def row_places(t: Tensor, rows: object) -> Array:
    """Rows of a state, counted from the front. InputError for what is none, or has none."""
    if not t.shape or t.shape[0] * t.strides[0] != t.nbytes:  # or blocks in one axis
        raise InputError(f"{titled(t)}: expected a state with rows along its first axis")
    several = isinstance(rows, Sequence | np.ndarray) and not isinstance(rows, str | bytes)
    found: list[Any] = list(rows) if several else [None]  # type: ignore[call-overload]  # it is several
    count = t.shape[0]
    for row in found:
        whole = isinstance(row, int | np.integer) and not isinstance(row, bool)
        if not whole or not -count <= row < count:
            raise InputError(
                f"{t.name}: rows={shown(rows)}: expected several numbers below {count}"
            )
    return np.array([row % count for row in found], np.intp)


def row_bytes(t: Tensor, count: int, data: object) -> Array:
    """What `count` rows of a state are to be, uint8 [n, bytes of a row]. InputError for anything
    else."""
    shape = count, t.strides[0]
    if not isinstance(data, np.ndarray):
        raise InputError(f"{t.name}: expected an array of bytes, got {shown(data)}")
    if data.shape != shape or data.dtype != np.uint8:
        raise InputError(
            f"{t.name}: expected uint8 {list(shape)} for {count} rows, "
            f"got {data.dtype} {list(data.shape)}"
        )
    return data


def step_feeds(key: Hashable, graph: Graph, feeds: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The feeds of each step. InputError unless some have a place for each, and as many."""
    if not isinstance(feeds, Mapping):
        raise InputError(f"{key!r}: expected arrays by input, got {shown(feeds)}")
    fed = graph.leaves(Kind.INPUT)
    arrays = {t.name: array_of(t, _fed(t, feeds), InputError) for t in fed}
    counts = {
        t.name: len(a)
        for t, a in zip(fed, arrays.values(), strict=True)
        if a.ndim == len(t.shape) + 1
    }
    if len(set(counts.values())) != 1 or not min(counts.values()):
        told = ", ".join(f"{n}: {count}" for n, count in counts.items()) or "none has the axis"
        raise InputError(f"{key!r}: expected feeds of one length, 1 or more, along steps; {told}")
    return [
        {n: arrays[n][i] if n in counts else a for n, a in feeds.items()}
        for i in range(next(iter(counts.values())))
    ]


def _fed(t: Tensor, feeds: Mapping[str, Array], strangers: Sequence[str] = ()) -> Array:
    """What an input is fed. InputError for nothing; one of the strangers may be its name."""
    if t.name not in feeds:
        fed = ", ".join(map(str, feeds)) or "nothing"
        near = nearest(t.name, strangers)
        raise InputError(f"input {t.name!r} was not fed; fed: {fed}{near}")
    return feeds[t.name]


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What an input must be: its tensor, and the limits of those of its values that are indices."""

    tensor: Tensor
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    indices: tuple[tuple[Tensor, int, str], ...]  # a view of the input, its limit, whose it is


@dataclass(frozen=True, eq=False)
class Feeds:
    """Feeds that were held against the inputs of one plan. A run of it takes what their arrays hold
    by then: what is written to them afterwards is not checked."""

    stored: dict[str, Array]  # by the names of inputs
    check: "FeedCheck"  # that held them

    def put(self, name: str, value: Array) -> None:
        """Another feed in place of one. InputError where it is unfit, or no such input is fed."""
        self.stored[name] = self.check.one(name, value)


class FeedCheck:
    """Holds the feeds of a graph against its inputs, before anything runs.

    A feed that is storage already costs a comparison; indices cost one look for the largest.
    `known` are all names that may be fed: the graph as its user built it may have more inputs.
    """

    def __init__(self, graph: Graph, known: frozenset[str]) -> None:
        found = _index_limits(graph)
        self._known, self._graph = known, graph
        self._inputs = {
            t.name: _Wanted(
                t, storage_shape(t.shape, t.dtype), t.dtype.np, tuple(found.get(t.name, ()))
            )
            for t in graph.leaves(Kind.INPUT)
        }

    def checked(self, feeds: Mapping[str, Array]) -> Feeds:
        """The storage of every input. InputError for a missing, unknown or unfit feed."""
        if not isinstance(feeds, Mapping):
            raise InputError(f"feeds: expected a mapping of names to arrays, got {shown(feeds)}")
        ready = {name: self._fit(fed, feeds) for name, fed in self._inputs.items()}
        if len(feeds) != len(ready):
            self._refuse_unknown(feeds)
        return Feeds(ready, self)

    def one(self, name: str, value: Array) -> Array:
        """The storage of one input. InputError where it is unfit, or there is no such input."""
        fed = self._inputs.get(name) if isinstance(name, str) else None
        if fed is None:
            raise self._unknown(name)
        return self._fit(fed, {name: value})

    def _fit(self, fed: _Wanted, feeds: Mapping[str, Array]) -> Array:
        given = feeds.get(fed.tensor.name)
        plain = type(given) is np.ndarray and given.dtype == fed.kind
        if given is None or not plain or given.shape != fed.shape:
            given = self._converted(fed.tensor, feeds)
        for view, limit, whose in fed.indices:
            _check_indices(view, given, limit, whose)
        return given

    def _converted(self, t: Tensor, feeds: Mapping[str, Array]) -> Array:
        strangers = () if t.name in feeds else [n for n in feeds if n not in self._known]
        return np.ascontiguousarray(feed_storage(t, _fed(t, feeds, strangers)))

    def _refuse_unknown(self, feeds: Mapping[str, Array]) -> None:
        extra = [n for n in feeds if n not in self._known]
        if extra:
            raise self._unknown(extra[0])

    def _unknown(self, name: object) -> InputError:
        names, t = ", ".join(sorted(self._known)) or "none", self._graph.get(str(name))
        what = "" if t is None or not t.is_leaf else f", which is a {t.kind.value}"
        told = f"no input is called {shown(name)}{what}; the graph's inputs: {names}"
        return InputError(told + ("" if what else nearest(name, self._known)))


def _index_limits(graph: Graph) -> dict[str, list[tuple[Tensor, int, str]]]:
    """By input: the views of it that ops take for indices, each with its limit and the op."""
    found: dict[str, list[tuple[Tensor, int, str]]] = {}
    for t in graph.nodes:
        limits = t.spec.limits(t) if t.spec is not None and t.spec.limits is not None else {}
        for slot, limit in limits.items():
            ids = t.sources[slot]
            while ids.op == "copy":  # to the device that wants them
                ids = ids.sources[0]
            if ids.root.kind is Kind.INPUT:
                seen = ids.root if ids.size == ids.root.size else ids  # all of it, as it lies
                found.setdefault(ids.root.name, []).append((seen, limit, t.name))
    return {name: _strictest(rows) for name, rows in found.items()}


def _strictest(rows: list[tuple[Tensor, int, str]]) -> list[tuple[Tensor, int, str]]:
    """One row per window on the input: that with the least limit."""
    least: dict[tuple[object, ...], tuple[Tensor, int, str]] = {}
    for view, limit, whose in rows:
        key = (view.offset, view.nbytes) if view.is_contiguous else (view.name,)
        if key not in least or limit < least[key][1]:
            least[key] = (view, limit, whose)
    return list(least.values())


def _greatest(numbers: Array) -> int:
    """The greatest of several numbers; for one token, 0.5 instead of 1.1 us."""
    few = numbers.size <= FEW
    return max(numbers.ravel().tolist()) if few else int(np.maximum.reduce(numbers, axis=None))


def _check_indices(view: Tensor, stored: Array, limit: int, whose: str) -> None:
    """InputError unless all that `view` shows of the stored input is in [0, limit)."""
    if view.view_src is not None:
        dense = np.ascontiguousarray(stored)
        stored = np.ndarray(view.shape, stored.dtype, dense, view.offset, view.strides)
    unsigned = stored.view(_UNSIGNED[stored.dtype.itemsize])  # so that what is negative is large
    if unsigned.size and _greatest(unsigned) >= limit:
        raise InputError(
            f"input {view.root.name!r}: indices {stored.min()} .. {stored.max()} leave "
            f"[0, {limit}) of %{whose}"
        )
