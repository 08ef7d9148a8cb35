"""What every lowering shares: calls with their arguments resolved, and constants.

A *step* is a function of a stream handle that enqueues one thing. All decisions fall while
lowering: a program is a list of steps, and submitting it is a loop. The tables of steps per op are
in `lower.py`; a rule never asks the device anything, so planning can ask `accepts` without one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from ggraph.backends.cuda.driver import Driver, Grid
from ggraph.backends.cuda.kernels import Unit, homes, packed
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.device import RESULT, Need
from ggraph.dtype import F32
from ggraph.tensor import Array, Tensor

Step = Callable[[int], None]
MAX_GRID_Y = 65535
GROUP, CODED_ROWS, CODED_QUADS = 32, 8, 72  # of src/parts.cuh: columns, rows, and what they take


class Keeper(Protocol):
    """Who knows where the plan's memory is, and keeps constants beside it."""

    driver: Driver

    def address(self, memory: Memory, offset: int) -> int:
        """Where kernels find a place in device memory, or in host memory, which is pinned."""
        ...

    def constant(self, values: Array) -> int:
        """Address of a copy of `values` that stays until the backend is closed."""
        ...


@dataclass(frozen=True)
class Rule:
    """How one op runs: `accepts` decides by the tensor alone, `emit` appends its steps, `needs`
    says what they touch beside the operands."""

    accepts: Callable[[Tensor], bool]
    emit: "Callable[[Lowering, Launch], None]"
    needs: Callable[[Tensor], tuple[Need, ...]] = lambda t: ()


@dataclass(eq=False)
class Lowering:
    """Collects the steps of the launches of one stream."""

    keeper: Keeper
    steps: list[Step] = field(default_factory=list)

    def at(self, ref: Ref | Scratch) -> int:
        """Address of a tensor's first element, or of bytes beside the operands."""
        return self.keeper.address(ref.memory, ref.offset)

    def call(self, kernel: str, grid: Grid, block: int, *, type: str = "", **args: Any) -> None:
        """Append a launch of a `kernel` of this package; `type` names the template's type where
        there is one. An argument whose name is Python's own is given with a trailing underscore.
        """
        given = {name.rstrip("_"): value for name, value in args.items()}
        self.launch(Unit(homes()[kernel], type), kernel, grid, block, given)

    def launch(
        self, unit: Unit, kernel: str, grid: Grid, block: int, given: Mapping[str, Any]
    ) -> None:
        """Append a launch of a kernel of any unit, its arguments `given` by their own names."""
        if 0 in grid:
            return
        driver, unit = self.keeper.driver, self.compiled(unit)
        function, arguments = driver.function(unit, kernel), packed(kernel, given, unit)
        self.steps.append(lambda s: driver.launch(function, grid, block, arguments, s))

    def compiled(self, unit: Unit) -> Unit:
        """What is compiled in the place of a unit."""
        return unit

    def per_element(self, kernel: str, count: int, **args: Any) -> None:
        """A launch with one thread per element."""
        self.call(kernel, (-(-count // 256), 1, 1), 256, count=count, **args)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Append a copy within the device; of a value onto itself: nothing."""
        if target != source:
            self.steps.append(partial(self.keeper.driver.copy, target, source, nbytes))

    def constant(self, values: Array) -> int:
        """Address of values that the host has computed."""
        return self.keeper.constant(np.ascontiguousarray(values))


def offered(t: Tensor, k: int = 0) -> tuple[Need, ...]:
    """ "parts" of a result for the products that take it in them (src/parts.cuh), and "codes", as
    rows of k (0: of the last axis), where that axis has whole groups."""
    whole = t.dtype is F32 and t.is_contiguous and t.nbytes and t.shape[-1] % 4 == 0
    if not whole:
        return ()
    parts = Need("parts", t.nbytes, (RESULT,), flat=True)
    return (parts, coded(t, RESULT, k)) if t.shape[-1] % GROUP == 0 else (parts,)


def coded(x: Tensor, of: int, k: int = 0) -> Need:
    """ "codes" of `x`, which is source `of` or the RESULT, as rows of k (0: of the last axis). They
    are shared by who takes it as rows of that length, since quads of eight rows lie together."""
    k = k or x.shape[-1]
    how = f"[{_rows(x, k)}x{k}]"
    return Need("codes", codes_bytes(x, k), (of,), flat=True, how=how)


def codes_bytes(x: Tensor, k: int = 0) -> int:
    """Bytes of these: room for eight rows each time."""
    k = k or x.shape[-1]
    return -(-_rows(x, k) // CODED_ROWS) * (k // GROUP) * CODED_QUADS * 16


def _rows(x: Tensor, k: int) -> int:
    return x.size // k if k else 0


def parts_of(low: Lowering, launch: Launch) -> int:
    """Address of the parts of the result; 0 where no product asks for them."""
    return _offer(low, launch, "parts")


def codes_of(low: Lowering, launch: Launch) -> int:
    """The same of its codes."""
    return _offer(low, launch, "codes")


def _offer(low: Lowering, launch: Launch, name: str) -> int:
    room = launch.scratch.get(Need(name, 0, (RESULT,)).key)
    return low.at(room) if room is not None else 0


def number(x: Launch, name: str) -> float:
    """A numeric attribute of the result."""
    value = x.result.tensor.attrs[name]
    assert isinstance(value, int | float), f"{name} = {value!r}"
    return float(value)


def threads(n: int) -> int:
    """Threads of a block that goes over a row of n: whole warps, 32 to 1024, by n alone."""
    return min(1024, max(32, 1 << max(0, (n - 1).bit_length() - 2)))
