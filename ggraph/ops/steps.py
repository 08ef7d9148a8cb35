"""The steps of a traced expression, as data. See `trace.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ggraph.tensor import Array

Shape = tuple[int, ...]
ROOM = 1000  # numbers of sources from here on are rooms
WIDE = ("sum", "mean")  # in float64
PLAIN = ("add", "subtract", "multiply", "divide")


class Untraceable(Exception):
    """The reference does something that no element-wise kernel can."""


@dataclass(frozen=True)
class Step:
    """One value of the index space: `op` over the steps `args`.

    "source": window `data` = (number of the source, byte offset, byte strides), where -1 - i is
    constant i and ROOM + i the room i; "number": `data` is its value; a reduction: its axes.
    """

    op: str
    args: tuple[int, ...] = ()
    shape: Shape = ()
    data: Any = None


@dataclass(frozen=True)
class Box:
    """A part of the result, from `starts` on, and the step that fills it in the shape `shape`."""

    starts: Shape
    sizes: Shape
    step: int
    shape: Shape  # of the index space that fills it: the box itself, reshaped


@dataclass
class Trace:
    """Steps in an order that runs; equal steps are one. A room is a float32 array that is filled
    first, box by box: what was laid side by side and is then looked at as one."""

    steps: list[Step] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    boxes: tuple[Box, ...] = ()
    rooms: list[tuple[Shape, tuple[Box, ...]]] = field(default_factory=list)
    written: list[tuple[Shape, Any]] = field(default_factory=list)  # into what is overwritten
    target: Any = None  # the symbol of what is overwritten
    _known: dict[tuple[Step, str], int] = field(default_factory=dict)

    def add(self, op: str, args: Sequence[int] = (), shape: Shape = (), data: Any = None) -> int:
        """The number of a step, which is made if it is new."""
        step = Step(op, tuple(args), shape, data)
        key = step, str(data) if op == "number" else ""  # -0 is not 0
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append(step)
        return self._known[key]

    def is_sum(self, i: int) -> bool:
        """Whether a step is a sum or a mean, or made of such and numbers by plain arithmetic: until
        it is "rounded" float64 has it."""
        step = self.steps[i]
        if step.op not in PLAIN:
            return step.op in WIDE
        known = [self.steps[a].op == "number" or self.is_sum(a) for a in step.args]
        return all(known) and any(map(self.is_sum, step.args))

    def reached(self, root: int) -> list[int]:
        """The steps that `root` needs, itself included, in order."""
        wanted = {root}
        for i in range(root, -1, -1):
            if i in wanted:
                wanted |= set(self.steps[i].args)
        return sorted(wanted)
