"""ExecuTorch's memory plans -> a plan: every tensor's place in its arenas, in the program's order.

A .pte file is a flatbuffer (ExecuTorch's schema/program.fbs). One stream runs its kernels in
order, so what can be wrong is a lifetime: a tensor whose bytes another has taken while a reader is
still to come, or a kernel whose result lies on its own source. A kernel's last argument is what it
returns, which is also its `out`. Of a delegate only the arguments are known: those that nothing has
made before are taken as its results. Dynamic shapes count with their upper bounds. Of a method that
branches one path at a time is judged; what a move hands on keeps the bytes of its source.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ggraph.errors import FormatError, PlanError
from ggraph.plan import Plan
from ggraph.plan_builder import Bytes, PlanBuilder, Space

MAGIC = b"ET"
# ScalarType of scalar_type.fbs -> bytes of one element
ELEMENT = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 12: 1, 13: 1, 14: 4, 15: 2}
ELEMENT |= {16: 1, 22: 1, 23: 1, 24: 1, 25: 1, 26: 1, 27: 2, 28: 4, 29: 8}
BOOL, TENSOR, TENSOR_LISTS = 3, 5, (10, 11)  # of the union KernelTypes
KERNEL, DELEGATE, MOVE, JUMP = 1, 2, 3, 4  # of the union InstructionArguments
STREAM = ("executorch", 0)


class _Table:
    """A flatbuffer's table: fields by number, absent ones at their defaults."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    def _field(self, number: int) -> int | None:
        slot = 4 + 2 * number
        if slot + 2 > self._size:
            return None
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._at + offset if offset else None

    def scalar(self, number: int, code: str = "i", default: int = 0) -> int:
        """A number; `code` as in struct."""
        at = self._field(number)
        found: int = default if at is None else struct.unpack_from(f"<{code}", self._data, at)[0]
        return found

    def _target(self, number: int) -> int | None:
        at = self._field(number)
        return None if at is None else at + struct.unpack_from("<I", self._data, at)[0]

    def table(self, number: int) -> "_Table | None":
        """Another table."""
        at = self._target(number)
        return None if at is None else _Table(self._data, at)

    def numbers(self, number: int, code: str = "i") -> tuple[int, ...]:
        """A list of numbers."""
        at = self._target(number)
        if at is None:
            return ()
        count = struct.unpack_from("<I", self._data, at)[0]
        if count > len(self._data):
            raise FormatError(f"executorch: a list of {count} numbers")
        return struct.unpack_from(f"<{count}{code}", self._data, at + 4)

    def tables(self, number: int) -> list["_Table"]:
        """A list of tables."""
        at = self._target(number)
        offsets = self.numbers(number, "I")
        return [_Table(self._data, (at or 0) + 4 + 4 * i + o) for i, o in enumerate(offsets)]

    def text(self, number: int) -> str:
        """A text."""
        return bytes(self.numbers(number, "B")).decode(errors="replace")


@dataclass(frozen=True)
class _Tensor:
    """Where a value lies; `arena` None: a constant, or memory that is not planned."""

    name: str
    arena: int | None
    offset: int
    nbytes: int


def plan_from_executorch(
    data: bytes, method: str | None = None, branches: Sequence[bool] = ()
) -> Plan:
    """The plan of a method of a .pte file, the first unless named. FormatError for what is none.

    `branches`: the values of the conditions, each once, in the order in which they are asked for.
    """
    if len(data) < 8 or data[4:6] != MAGIC:
        raise FormatError(f"executorch: no .pte file: it begins with {data[:8]!r}")
    try:
        program = _Table(data, struct.unpack_from("<I", data)[0])
        plans = program.tables(1)
        chosen = next((p for p in plans if method in (None, p.text(0))), None)
        if chosen is None:
            names = ", ".join(p.text(0) for p in plans) or "none"
            raise FormatError(f"executorch: no method {method!r}; there are {names}")
        return _Method(chosen, branches).plan()
    except (struct.error, IndexError, OverflowError, PlanError) as error:
        raise FormatError(f"executorch: damaged: {error}") from None


class _Method:
    def __init__(self, plan: _Table, branches: Sequence[bool]) -> None:
        self._plan = plan
        self._branches = list(branches)
        self._holds: dict[int, bool] = {}  # condition -> what it is on this path
        self._builder = PlanBuilder("executorch")
        self._builder.device(STREAM[0], host_visible=True)
        sizes = plan.numbers(8, "q")
        self._arenas: dict[int, Space] = {
            i: self._builder.buffer(f"arena {i}", STREAM[0], size)
            for i, size in enumerate(sizes)
            if size > 0
        }
        self._values = plan.tables(2)
        self._alias: dict[int, int] = {}  # values that a move has made another's
        self._made: dict[int, int] = {}  # value -> the command that wrote it last
        self._operators = [(o.text(0), o.text(1)) for o in plan.tables(6)]

    def plan(self) -> Plan:
        """Inputs are written by the host, chains run one after another, outputs are read."""
        for i in self._plan.numbers(3):
            self._host(self._builder.host_write, "input", i, makes=True)
        for chain in self._plan.tables(5):
            self._chain([(x.scalar(0, "B"), x.table(1)) for x in chain.tables(2)])
        self._builder.host_sync()
        for i in self._plan.numbers(4):
            self._host(self._builder.host_read, "output", i, makes=False)
        return self._builder.plan([f"method {self._plan.text(0)} of an ExecuTorch program"])

    def _host(self, act: Callable[..., int], what: str, value: int, *, makes: bool) -> None:
        for i in self._tensors(value):
            if (found := self._bytes(i)) is not None:
                command = act(f"{what} {found.name}", found)
                if makes:
                    self._made[i] = command

    def _chain(self, instructions: Sequence[tuple[int, _Table | None]]) -> None:
        at = 0
        while at < len(instructions):
            kind, call = instructions[at]
            if kind == JUMP and call is not None and not self._condition(call.scalar(0)):
                if call.scalar(1) <= at:
                    raise FormatError(f"executorch: instruction {at} loops: that cannot be judged")
                at = call.scalar(1)
                continue
            self._instruction(kind, call)
            at += 1

    def _condition(self, value: int) -> bool:
        """What a condition is: a constant's value, else what this path takes it to be."""
        value = self._root(value)
        entry = self._values[value]
        if entry.scalar(0, "B") == BOOL and (constant := entry.table(1)) is not None:
            return bool(constant.scalar(0, "B"))
        if value not in self._holds:
            if not self._branches:
                raise FormatError(
                    f"executorch: the method branches by value {value}: say whether that holds"
                )
            self._holds[value] = self._branches.pop(0)
        return self._holds[value]

    def _instruction(self, kind: int, call: _Table | None) -> None:
        if call is None or kind not in (KERNEL, DELEGATE, MOVE):
            return
        if kind == MOVE:
            if (source := self._root(call.scalar(0))) != call.scalar(1):
                self._alias[call.scalar(1)] = source
        elif kind == KERNEL:
            name, overload = self._operators[call.scalar(0)]
            arguments = call.numbers(1)
            self._call(f"{name}.{overload}", arguments[:-1], arguments[-1:])
        else:
            arguments = call.numbers(1)
            known = [a for a in arguments if all(map(self._known, self._tensors(a)))]
            results = [a for a in arguments if a not in known]
            self._call(f"delegate {call.scalar(0)}", known, results)

    def _known(self, value: int) -> bool:
        return value in self._made or self._tensor(value).arena is None

    def _call(self, name: str, arguments: Sequence[int], results: Sequence[int]) -> None:
        written = [i for value in results for i in self._tensors(value)]
        sources = [i for value in arguments for i in self._tensors(value) if i not in written]
        reads = [b for i in dict.fromkeys(sources) if (b := self._bytes(i)) is not None]
        targets = [b for i in written if (b := self._bytes(i, means=False)) is not None]
        command = self._builder.launch(STREAM, name, reads=reads, writes=targets)
        self._made.update((i, command) for i in written)

    def _root(self, value: int) -> int:
        while value in self._alias:
            value = self._alias[value]
        return value

    def _tensors(self, value: int) -> list[int]:
        """The tensors that a value is: one, those of a list, or none."""
        value = self._root(value)
        entry = self._values[value]
        kind, content = entry.scalar(0, "B"), entry.table(1)
        if kind == TENSOR:
            return [value]
        if kind in TENSOR_LISTS and content is not None:
            return [self._root(i) for i in content.numbers(0) if i >= 0]
        return []

    def _tensor(self, value: int) -> _Tensor:
        content = self._values[value].table(1)
        if content is None:
            raise FormatError(f"executorch: value {value} is empty")
        element = ELEMENT.get(kind := content.scalar(0, "b"))
        if element is None:
            raise FormatError(f"executorch: value {value} has the unknown scalar type {kind}")
        nbytes = element * prod(content.numbers(2))
        place = content.table(6)
        if place is None:
            return _Tensor(f"value {value}", None, 0, nbytes)
        offset = place.scalar(1, "I") | place.scalar(2, "I") << 32
        return _Tensor(f"value {value}", place.scalar(0, "I"), offset, nbytes)

    def _bytes(self, value: int, *, means: bool = True) -> Bytes | None:
        """The planned bytes of a tensor; of a read, those that its last writer made."""
        t = self._tensor(value)
        if t.arena is None:
            return None
        if t.arena not in self._arenas:
            raise FormatError(f"executorch: {t.name} lies in arena {t.arena}, which has no size")
        span = self._arenas[t.arena][t.offset : t.offset + t.nbytes]
        return span.called(t.name, self._made.get(value) if means else None)
