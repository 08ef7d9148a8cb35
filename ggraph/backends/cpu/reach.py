"""What the CPU has kernels for, asked before there is any memory.

A launch is lowered for nothing: every decision falls as it will, but addresses are zeros and
instructions are dropped. So there is no second table that could say something else.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph.backends.cpu.loops import Signature, signature
from ggraph.backends.cpu.lower import lower
from ggraph.backends.cpu.lowering import Packed
from ggraph.backends.cpu.needs import is_weight, kept_as
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.plan import HOST_ACTOR, Buffer, Command, Do
from ggraph.tensor import Array, Tensor

_NOWHERE = Memory(Buffer("nowhere", "cpu", 0, 1), np.zeros(0, np.uint8))


class _Rooms(dict[str, Scratch]):
    """Whatever a launch may need beside its operands."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Scratch:
        return Scratch(name, _NOWHERE, 0, 0)


@dataclass
class _Nothing:
    """An assembler's lists."""

    rows: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


@dataclass
class _Dry:
    """A lowering that leaves nothing behind."""

    exact: bool
    asm: _Nothing = field(default_factory=_Nothing)

    def begin(self, launch: Launch) -> None:
        """Nothing."""

    def add(self, name: str, **values: Any) -> None:
        """Nothing."""

    def at(self, ref: Ref | Scratch) -> int:
        """No address."""
        return 0

    def constant(self, values: Array) -> Array:
        """The numbers."""
        return values

    def weight(self, ref: Ref) -> Packed:
        """No packed form."""
        return Packed(kept_as(ref.tensor.dtype, self.exact), np.zeros(0, np.uint8))

    def rows(self, launch: Launch, m: int, k: int) -> Scratch:
        """No bytes."""
        return launch.room("rows")

    def shown(self, launch: Launch) -> Scratch:
        """No bytes."""
        return launch.room("slots")


_SEEN: dict[tuple[Signature, tuple[bool, ...], bool], bool] = {}
MANY = 4096  # answers that are remembered


def compiled(t: Tensor, exact: bool) -> bool:
    """Whether a kernel computes `t`, or there is nothing to compute."""
    if t.is_leaf or t.is_view or not t.size:
        return True
    key = (signature(t), tuple(map(is_weight, t.sources)), exact)
    if key not in _SEEN:
        if len(_SEEN) >= MANY:
            _SEEN.clear()
        _SEEN[key] = _lowers(t, exact)
    return _SEEN[key]


def _lowers(t: Tensor, exact: bool) -> bool:
    refs = tuple(Ref(s, _NOWHERE, 0) for s in t.sources)
    command = Command(Do.LAUNCH, HOST_ACTOR, t.name)
    launch = Launch(command, Ref(t, _NOWHERE, 0), refs, _Rooms())
    return lower(_Dry(exact), launch)  # type: ignore[arg-type]  # all that lowering asks of one
