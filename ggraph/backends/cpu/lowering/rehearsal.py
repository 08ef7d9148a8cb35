"""A launch lowered without a device: has it a kernel, what would its program bring along, and what
does it need?

Planning asks this. The lowerings themselves answer, with addresses that mean nothing, so that there
is no second list of what kernels take.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ggraph.backends.cpu.codegen.memo import Memo
from ggraph.backends.cpu.kernels.attention import NEXT
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.loops import signature
from ggraph.backends.cpu.lowering.lower import lower
from ggraph.backends.cpu.lowering.needs import bounded, is_weight, kept_as, multiplies
from ggraph.backends.cpu.lowering.needs import needs as kernel_needs
from ggraph.backends.cpu.lowering.numpy_step import numpy_need
from ggraph.backends.cpu.lowering.packing import Packed, packing
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.device import Need
from ggraph.formats.checkpoint import RawTensor
from ggraph.ops.matmul import mul_mat
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.tensor import Array, Tensor, input, weight

NOWHERE = Memory(Buffer("", "cpu", 0, 1), np.zeros(0, np.uint8))


class Rehearsal(Lowering):
    """A lowering that emits nothing, counts the bytes of its constants and notes its kernels."""

    def __init__(self, exact: bool) -> None:
        self.exact, self.nbytes, self.kernels = exact, 0, dict[str, None]()

    def begin(self, launch: Launch) -> None:
        """Nothing: no access is judged."""

    def add(self, name: str, **how: Any) -> None:
        """Note the kernel."""
        self.kernels[name] = None

    def constant(self, values: Array) -> Array:
        """Count them."""
        self.nbytes += values.nbytes
        return values

    def at(self, ref: Ref | Scratch) -> int:
        """An address that is none."""
        return 0

    def weight(self, ref: Ref) -> Packed:
        """A packed form without bytes, and the kernel that makes one."""
        dtype = kept_as(ref.tensor.dtype, self.exact)
        self.kernels |= {packing(dtype): None, "pack_piece": None}
        return Packed(dtype, NOWHERE.handle)


@dataclass(frozen=True)
class Rehearsed:
    """Whether a launch has a kernel, the bytes of constants that its instructions bring along, what
    it needs beside its operands, and the kernels of its program."""

    compiled: bool
    constants: int
    needs: tuple[Need, ...]
    kernels: tuple[str, ...] = ()


_ALIKE = Memo[Rehearsed]()  # of launches that lower to the same
# Of the tensors that there are: each is asked about at every pass, and its signature is long.
_OF: Mapping[bool, MutableMapping[Tensor, Rehearsed]] = {
    exact: WeakKeyDictionary() for exact in (False, True)
}


def _rehearsed(t: Tensor, exact: bool) -> Rehearsed:
    found = _OF[exact].get(t)
    if found is None:
        found = _OF[exact][t] = _alike(t, exact)
    return found


def _alike(t: Tensor, exact: bool) -> Rehearsed:
    """What is found for any launch that lowers to the same."""
    if t.spec is None or t.is_view or not t.size:
        return Rehearsed(True, 0, ())
    weights = tuple(map(is_weight, t.sources))
    return _ALIKE.find((signature(t), weights, bounded(t), exact), lambda: _lowered(t, exact))


def _lowered(t: Tensor, exact: bool) -> Rehearsed:
    found = kernel_needs(t, exact)
    beside = {n.key: Scratch(n.name, NOWHERE, 0, n.nbytes) for n in found}
    command = Command(Do.LAUNCH, Actor("cpu"), t.name, t.name)
    sources = tuple(Ref(s, NOWHERE, s.offset) for s in t.sources)
    low = Rehearsal(exact)
    done = lower(low, Launch(command, Ref(t, NOWHERE, t.offset), sources, beside))
    if not done:
        return Rehearsed(False, low.nbytes, numpy_need(t))
    return Rehearsed(True, low.nbytes, found, tuple(low.kernels))


def needs(t: Tensor, *, exact: bool) -> tuple[Need, ...]:
    """What a launch of `t` touches beside its operands: what its kernel does, or what NumPy takes
    where it has none."""
    return _rehearsed(t, exact).needs


def kernels(t: Tensor, *, exact: bool) -> tuple[str, ...]:
    """Names of the kernels that a program of `t` may call, those that pack its weights too, and of
    those that the program after it will."""
    own = _rehearsed(t, exact).kernels
    return (*own, *(later for name in own for later in NEXT.get(name, ())))


def products(weights: Iterable[RawTensor], *, exact: bool) -> tuple[str, ...]:
    """Kernels that rows will meet these matrices with, before a graph says so: each type's, which
    are the ones that take longest to compile."""
    of_types = {w.dtype: w for w in weights if len(w.shape) == 2}
    found = dict[str, None]()
    for w in of_types.values():
        t = mul_mat(weight(w.name, w.shape, w.dtype), input("rows", (1, w.shape[1])))
        if multiplies(t, exact):
            found |= dict.fromkeys(kernels(t, exact=exact))
    return tuple(found)


def compiled(t: Tensor, *, exact: bool) -> bool:
    """Whether a kernel computes `t`, or there is nothing to compute."""
    return _rehearsed(t, exact).compiled


def constant_bytes(t: Tensor, *, exact: bool) -> int:
    """Bytes of tables that the program of `t` brings along: the frequencies of a rotation."""
    return _rehearsed(t, exact).constants
