"""A launch without a kernel: NumPy computes its meaning, on bytes that the plan has for that.

What NumPy needs is found by doing it once, at planning, on values like those of the op's examples.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ggraph.backends.cpu.lowering.needs import is_weight
from ggraph.backends.cpu.runtime.arrays import Room, arrays_in, vast
from ggraph.backends.protocol import Launch, Memory, Ref
from ggraph.device import Need
from ggraph.errors import BackendError, GgraphError, GraphError
from ggraph.ops import examples
from ggraph.ops.evaluate import encode, raw_view, read, reference, write
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.tensor import Arg, Array, Example, Tensor, line

NAME = "arrays"  # of the need
TRIES = 3
SPARE = 2  # times what was seen, where integers say how much: trees of rows keep more than chains
REFUSALS = (GgraphError, ArithmeticError, LookupError, TypeError, ValueError)
Fixed = Sequence[Array | None]


def numpy_step(launch: Launch, fixed: Fixed) -> Callable[[], None]:
    """The launch as a function. `fixed` gives sources that are decoded already.

    It raises what the meaning raises, and BackendError where NumPy wants more than the plan has.
    """
    t, room = launch.result.tensor, Room(0, 0, None)
    if NAME in launch.scratch:
        held = launch.scratch[NAME]
        bytes_of = held.memory.handle
        room = Room(bytes_of.ctypes.data + held.offset, held.nbytes, bytes_of)

    def step() -> None:
        try:
            with arrays_in(room):
                _compute(launch, fixed)
        except (MemoryError, SystemError):  # NumPy does not always say which
            more = f"NumPy takes more than the {room.nbytes} bytes that the plan has for it"
            raise BackendError(f"{line(t)}: {more}") from None
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold arrays
            raise
        finally:
            is_empty = room.close()
        if not is_empty:
            raise BackendError(f"{line(t)}: its meaning keeps arrays, whose bytes are the plan's")

    return step


def numpy_need(t: Tensor) -> tuple[Need, ...]:
    """What NumPy takes while it computes `t`: the most that its arrays have at a time, with
    integers that are the first and the last place, or the whole length, of any axis.

    GraphError where the meaning refuses values like those of its examples.
    """
    found, refused, integers = list[int](), list[Exception](), _integers(t)
    for index in integers:
        try:
            found.append(_rehearsed(*_made_up(t, index)))
        except REFUSALS as error:
            traceback.clear_frames(error.__traceback__)
            refused.append(error)
    if not found:
        why = f"it has no kernel, and what NumPy needs is not known: {refused[0]}"
        raise GraphError(f"{line(t)}: {why}") from None
    most = max(found) * (SPARE if len(integers) > 1 else 1)
    return (Need(NAME, most),) if most else ()


def _integers(t: Tensor) -> Sequence[int]:
    """Values for sources of integers: a place is at most an axis less one, a length the axis."""
    if all(s.dtype.is_float for s in t.sources):
        return (0,)
    lengths = {d for s in t.sources for d in s.shape}
    return sorted({0, 1, *lengths, *(max(d - 1, 0) for d in lengths)})


def _rehearsed(launch: Launch, fixed: Fixed) -> int:
    """Bytes that computing it took. What is imported on the way may keep arrays, once."""
    for _ in range(TRIES):
        room = vast()
        try:
            with arrays_in(room):
                _compute(launch, fixed)
        finally:
            most, is_empty = room.top, room.close()
        if is_empty:
            return most
    raise GraphError("it keeps arrays of its own")


def _compute(launch: Launch, fixed: Fixed) -> None:
    """Read the sources, apply the meaning, store the result; one that overwrites a plain type
    writes into the bytes themselves."""
    t, memory = launch.result.tensor, launch.result.memory.handle
    at = launch.result.offset - t.offset
    given = [logical(r) if f is None else f for f, r in zip(fixed, launch.sources, strict=True)]
    slot = t.spec.overwrites if t.spec is not None else None
    if slot is None:
        write(t, memory, at, reference(t, given))
    elif t.dtype.is_block or t.dtype.name == "bf16":
        given[slot] = given[slot].copy()
        write(t, memory, at, reference(t, given))
    else:
        given[slot] = raw_view(t, memory, at).view()
        reference(t, given)


def is_fixed(t: Tensor) -> bool:
    """Whether a source never changes, and NumPy reads it otherwise than it lies: decoded once, and
    kept."""
    return is_weight(t) and t.dtype.name != "f32"


def logical(ref: Ref) -> Array:
    """The values of a source."""
    return read(ref.tensor, ref.memory.handle, ref.offset - ref.tensor.offset)


def _made_up(t: Tensor, index: int) -> tuple[Launch, Fixed]:
    """A launch of `t` on memory of its own, with values like those of the op's examples; places in
    other sources are all `index`, a row's parents are none or the row before, the last of `index`
    rows is the one before."""
    rng = np.random.default_rng(0)
    args = next((e.args for e in _examples(t) if len(e.args) == len(t.sources)), ())
    sources = []
    for i, s in enumerate(t.sources):
        ref = Ref(s, _memory(s.offset + s.nbytes), s.offset)
        sources.append(ref)
        if not s.size or s.dtype.is_block:  # blocks stay zeros: some types nothing writes
            continue
        arg = replace(args[i], shape=s.shape) if i < len(args) else Arg(s.shape, s.dtype)
        if arg.fill.startswith("parents"):
            values = index * np.arange(s.size).reshape(s.shape) - 1
        elif s.dtype.is_float and not arg.fill.startswith("ids"):
            values = examples.values(arg, rng)
        else:
            values = np.full(s.shape, index - arg.fill.startswith("last"))
        raw = raw_view(s, ref.memory.handle)
        raw[...] = encode(values, s.dtype).reshape(raw.shape)
    slot = t.spec.overwrites if t.spec is not None else None
    own = sources[slot].memory if slot is not None else _memory(t.nbytes)
    command = Command(Do.LAUNCH, Actor("cpu"), t.name, t.name)
    launch = Launch(command, Ref(t, own, t.offset), tuple(sources))
    return launch, [logical(r) if is_fixed(r.tensor) else None for r in sources]


def _examples(t: Tensor) -> Sequence[Example]:
    return t.spec.examples if t.spec is not None else ()


def _memory(nbytes: int) -> Memory:
    return Memory(Buffer("", "cpu", nbytes, 1), np.zeros(nbytes, np.uint8))
