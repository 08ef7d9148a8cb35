"""A flat program under construction, and its frozen form. Floor 6.

`Assembler.add(kernel, **arguments)` appends an instruction; arguments are integers, floats, or
NumPy arrays (their addresses). The assembler keeps every array it was given alive.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

from ggraph.backends.cpu.interpreter import BARRIER, WORDS
from ggraph.backends.cpu.jit import Jit
from ggraph.backends.cpu.simd import KERNELS
from ggraph.errors import BackendError
from ggraph.tensor import Array

Argument = int | float | Array


def encode(name: str, values: dict[str, Argument]) -> list[int]:
    """The argument words of one call of kernel `name`. BackendError for wrong names."""
    spec = KERNELS[name]
    plain = [a.removesuffix(":f") for a in spec.args]
    if set(plain) != set(values):
        raise BackendError(f"{name}: expected arguments {plain}, got {sorted(values)}")
    return [_word(name, a, values[p]) for a, p in zip(spec.args, plain, strict=True)]


def _word(name: str, declared: str, value: Argument) -> int:
    if declared.endswith(":f"):
        if isinstance(value, np.ndarray):
            raise BackendError(f"{name}: {declared} is a number, got an array")
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, float):
        raise BackendError(f"{name}: {declared} is an integer, got {value}")
    return int(value)


@dataclass
class Assembler:
    """Builds a program for the kernels of `jit`."""

    jit: Jit
    rows: list[list[int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kept: list[Array] = field(default_factory=list)

    def add(self, name: str, *, barrier: bool = True, **values: Argument) -> None:
        """Append a call; `barrier=False` if the next instruction needs none of its results."""
        words = [self.jit.address(name), BARRIER if barrier else 0, *encode(name, values)]
        self.rows.append(words + [0] * (WORDS - len(words)))
        self.names.append(name)
        self.kept += [v for v in values.values() if isinstance(v, np.ndarray)]

    def freeze(self) -> "Flat":
        """The finished program; its last instruction needs no barrier."""
        code = np.array(self.rows, np.int64).reshape(len(self.rows), WORDS)
        if len(code):
            code[-1, 1] &= ~BARRIER
        return Flat(code, tuple(self.names), tuple(self.kept))


@dataclass(frozen=True, eq=False)
class Flat:
    """Instructions [count, WORDS] int64, their kernels' names, and the arrays they point into."""

    code: Array
    names: tuple[str, ...]
    kept: tuple[Array, ...]


__all__ = ["Assembler", "Flat", "encode"]
