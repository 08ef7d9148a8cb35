"""A flat program under construction, and its frozen form.

`Assembler.add(kernel, **arguments)` appends an instruction; arguments are integers, floats, or
NumPy arrays (their addresses). The assembler keeps every array it was given alive.
"""

import struct
import threading
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ggraph.backends.cpu.codegen.jit import ENTRY, Jit
from ggraph.backends.cpu.codegen.simd import BARRIER, HEADER_WORDS, KERNELS, STREAM
from ggraph.backends.cpu.runtime.interpreter import WORDS
from ggraph.backends.cpu.runtime.tempo import Tempo, Usual
from ggraph.errors import BackendError
from ggraph.tensor import Array

Argument = int | float | Array


def encode(name: str, values: dict[str, Argument]) -> list[int]:
    """The argument words of one call of kernel `name`. BackendError for wrong names."""
    words = KERNELS[name].words
    if words.keys() != values.keys():
        raise BackendError(f"{name}: expected arguments {[*words]}, got {sorted(values)}")
    return [
        v if type(v := values[a]) is int and not is_number else _word(name, a, is_number, v)
        for a, is_number in words.items()
    ]


def _word(name: str, argument: str, is_number: bool, value: Argument) -> int:
    if is_number:
        if isinstance(value, np.ndarray):
            raise BackendError(f"{name}: {argument} is a number, got an array")
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, float):
        raise BackendError(f"{name}: {argument} is an integer, got {value}")
    return int(value)


def one_call(
    jit: Jit, name: str, values: dict[str, Argument], *held: Array, thread: int = 0,
    threads: int = 1, title: str,
) -> threading.Thread:  # fmt: skip
    """A thread that is one call of a kernel, begun: Python's other threads run meanwhile. Arrays
    among its arguments, and what else is `held`, live as long as it does."""
    entry = ENTRY(jit.address(name))
    words = np.array([0] * HEADER_WORDS + encode(name, values), np.int64)
    arrays = [v for v in values.values() if isinstance(v, np.ndarray)]

    def live(*_: Array) -> None:
        entry(words.ctypes.data, thread, threads)

    begun = threading.Thread(target=live, args=(*arrays, *held), daemon=True, name=title)
    begun.start()
    return begun


Range = tuple[int, int]  # addresses of the first byte and one past the last


@dataclass(frozen=True)
class Touched:
    """The memory that an instruction reads and writes; weights, which never change, left out.
    `shared` are those of which each thread touches its share of the columns (`Kernel.part`)."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    shared: tuple[Range, ...] = ()

    def conflicts(self, later: "Touched") -> bool:
        """Whether the two must not run at the same time."""
        alike = {*self.shared}.intersection(later.shared)
        return (
            _meet(self.writes, later.writes, alike)
            or _meet(self.writes, later.reads, alike)
            or _meet(self.reads, later.writes, alike)
        )


def _meet(a: tuple[Range, ...], b: tuple[Range, ...], alike: set[Range]) -> bool:
    """Whether threads may meet in a byte: in none of what both share out alike."""
    for start, stop in a:
        for begin, end in b:
            overlap = start < end and begin < stop and start < stop and begin < end
            if overlap and ((start, stop) != (begin, end) or (start, stop) not in alike):
                return True
    return False


@dataclass
class Assembler:
    """Builds a program for the kernels of `jit`.

    Threads meet between two instructions only where it matters: where one of those since the last
    meeting conflicts with the next. An instruction that does not say what it accesses conflicts
    with all. With `stream`, weights pass the caches by, which then keep everything else.
    """

    jit: Jit
    stream: bool = False
    rows: list[list[int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kept: list[Array] = field(default_factory=list)
    _open: list[Touched] = field(default_factory=list)  # of the instructions since the last meeting

    def add(self, name: str, *, access: Touched | None = None, **values: Argument) -> None:
        """Append a call, which accesses the memory that it says, or any."""
        if access is None or any(a.conflicts(access) for a in self._open):
            self._meet()
        flags = (BARRIER if access is None else 0) | (STREAM if self.stream else 0)
        words = [self.jit.address(name), flags, *encode(name, values)]
        self.rows.append(words + [0] * (WORDS - len(words)))
        self.names.append(name)
        self.kept += [v for v in values.values() if isinstance(v, np.ndarray)]
        if access is not None:
            self._open.append(access)

    def _meet(self) -> None:
        """Let threads meet after the last instruction, if some are running ahead."""
        if self._open:
            self.rows[-1][1] |= BARRIER
            self._open = []

    def freeze(self) -> "Flat":
        """The finished program; its last instruction needs no barrier."""
        code = np.array(self.rows, np.int64).reshape(len(self.rows), WORDS)
        if len(code):
            code[-1, 1] &= ~BARRIER
        return Flat(code, tuple(self.names), tuple(self.kept))


@dataclass(frozen=True, eq=False)
class Flat:
    """Instructions [count, WORDS] int64, their kernels' names, and the arrays they point into; what
    runs of it take, and by how many threads as long as it is short."""

    code: Array
    names: tuple[str, ...]
    kept: tuple[Array, ...]
    usual: Usual = field(default_factory=Usual)
    tempo: Tempo = field(default_factory=Tempo)

    @cached_property
    def address(self) -> int:
        """Of the code, which NumPy takes a dozen calls to tell."""
        return int(self.code.ctypes.data)
