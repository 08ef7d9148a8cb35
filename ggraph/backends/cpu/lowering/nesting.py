"""Lowerings of loop nests: the words of their instructions."""

from collections.abc import Sequence
from typing import Any

from ggraph.backends.cpu.kernels.nest import register
from ggraph.backends.cpu.kernels.nest_form import names
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.loops import Planned, plan_nests
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.ops.steps import ROOM


def nests(low: Lowering, x: Launch) -> bool:
    """The loop nests of an op of elements: first what fills rooms, then the result."""
    planned = plan_nests(x.result.tensor)
    if planned is None:
        return False
    made = [x.room(f"room{i}") for i in range(len(planned.rooms))]
    for room, (_, nests) in zip(made, planned.rooms, strict=True):
        for p in nests:
            low.add(register(p.nest).name, makes=[room], **_words(low, x, p, made, room))
    for p in planned.result:
        low.add(register(p.nest).name, uses=made, **_words(low, x, p, made))
    return True


def _words(
    low: Lowering, x: Launch, p: Planned, rooms: Sequence[Scratch], into: Scratch | None = None
) -> dict[str, Any]:
    """The words of a nest's instruction, but for its head."""
    labels = p.nest.axes
    values: dict[str, Any] = {a: d.extent for a, d in zip(labels, p.axes, strict=True)}
    for i, (operand, (source, offset)) in enumerate(
        zip(names(len(p.places)), p.places, strict=True)
    ):
        values[operand] = _operand(low, x, p, rooms, into or x.result, source) + offset
        values |= {operand + a: d.strides[i] for a, d in zip(labels, p.axes, strict=True)}
    return values | {f"c{i}": number for i, number in enumerate(p.numbers)}


def _operand(
    low: Lowering, x: Launch, p: Planned, rooms: Sequence[Scratch], result: Ref | Scratch,
    source: int | None,
) -> int:  # fmt: skip
    """Address of an operand: the result, a room, a source, or a constant of the expression."""
    if source is None:
        return low.at(result)
    if source >= ROOM:
        return low.at(rooms[source - ROOM])
    if source >= 0:
        return low.at(x.sources[source])
    return int(low.constant(p.constants[-1 - source]).ctypes.data)
