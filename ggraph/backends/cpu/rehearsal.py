"""A launch lowered without a device: has it a kernel, and what would its program bring along?

Planning asks this. The lowerings themselves answer, with addresses that mean nothing, so that there
is no second list of what kernels take.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ggraph.backends.cpu.loops import Signature, signature
from ggraph.backends.cpu.lower import lower
from ggraph.backends.cpu.lowering import Lowering, Packed
from ggraph.backends.cpu.needs import bounded, is_weight, kept_as, needs
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.tensor import Array, Tensor

NOWHERE = Memory(Buffer("", "cpu", 0, 1), np.zeros(0, np.uint8))


class Rehearsal(Lowering):
    """A lowering that emits nothing and counts the bytes of its constants."""

    def __init__(self, exact: bool) -> None:
        self.exact, self.nbytes = exact, 0

    def begin(self, launch: Launch) -> None:
        """Nothing: no access is judged."""

    def add(
        self,
        name: str,
        *,
        uses: Sequence[Scratch] = (),
        makes: Sequence[Scratch] = (),
        result: bool = False,
        **values: Any,
    ) -> None:
        """Nothing."""

    def constant(self, values: Array) -> Array:
        """Count them."""
        self.nbytes += values.nbytes
        return values

    def at(self, ref: Ref | Scratch) -> int:
        """An address that is none."""
        return 0

    def weight(self, ref: Ref) -> Packed:
        """A packed form without bytes."""
        return Packed(kept_as(ref.tensor.dtype, self.exact), NOWHERE.handle)


_SEEN: dict[tuple[Signature, tuple[bool, ...], bool, bool], tuple[bool, int]] = {}
MANY = 4096  # answers that are remembered


def _rehearsed(t: Tensor, exact: bool) -> tuple[bool, int]:
    """Whether `t` has a kernel, and the bytes of constants that its instructions bring along."""
    if t.is_leaf or t.is_view or not t.size:
        return True, 0
    key = (signature(t), tuple(map(is_weight, t.sources)), bounded(t), exact)
    if key not in _SEEN:
        if len(_SEEN) >= MANY:
            _SEEN.clear()
        _SEEN[key] = _lowered(t, exact)
    return _SEEN[key]


def _lowered(t: Tensor, exact: bool) -> tuple[bool, int]:
    beside = {n.name: Scratch(n.name, NOWHERE, 0, n.nbytes) for n in needs(t, exact)}
    command = Command(Do.LAUNCH, Actor("cpu"), t.name, t.name)
    sources = tuple(Ref(s, NOWHERE, s.offset) for s in t.sources)
    low = Rehearsal(exact)
    return lower(low, Launch(command, Ref(t, NOWHERE, t.offset), sources, beside)), low.nbytes


def compiled(t: Tensor, *, exact: bool) -> bool:
    """Whether a kernel computes `t`, or there is nothing to compute."""
    return _rehearsed(t, exact)[0]


def constant_bytes(t: Tensor, *, exact: bool) -> int:
    """Bytes of tables that the program of `t` brings along: the frequencies of a rotation."""
    return _rehearsed(t, exact)[1]
