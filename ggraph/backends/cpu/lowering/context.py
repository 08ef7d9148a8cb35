"""A lowering in progress: addresses, packed weights, quantised activations, accesses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ggraph.backends.cpu.kernels.tiles import activation_bytes
from ggraph.backends.cpu.lowering.judge import Ground
from ggraph.backends.cpu.lowering.needs import is_weight, lists_slots, step_of
from ggraph.backends.cpu.lowering.packing import Packed, Packer, has_bytes
from ggraph.backends.cpu.runtime.program import Assembler, Range, Touched
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.dtype import A8, F32
from ggraph.tensor import Array


@dataclass(eq=False)
class Lowering:
    """Turns launches into instructions. `packer` is shared by all programs of a backend."""

    packer: Packer
    stream: bool = False  # weights pass the caches by
    asm: Assembler = field(init=False)
    constants: list[tuple[int, Array]] = field(default_factory=list)  # of which instruction
    _access: Touched = field(default=Touched((), ()))  # of the launch at hand

    def __post_init__(self) -> None:
        self.pool, self.exact = self.packer.pool, self.packer.exact
        self.asm = Assembler(self.pool.jit, self.stream)

    def begin(self, launch: Launch) -> None:
        """The next instructions are those of `launch`: they access its sources and its result."""
        read = [s for s in launch.sources if not is_weight(s.tensor)]
        self._access = Touched(tuple(map(_range, read)), (_range(launch.result),))

    def add(
        self,
        name: str,
        *,
        uses: Sequence[Scratch] = (),
        makes: Sequence[Scratch] = (),
        result: bool = False,
        shared: Sequence[Scratch] = (),
        **values: Any,
    ) -> None:
        """Append an instruction that reads what the launch does and what it uses beside, and writes
        what it makes; the result too where it makes nothing or `result` says so. Of what is
        `shared` each thread touches its share of the columns."""
        reads = (*self._access.reads, *map(_room, uses))
        own = self._access.writes if result or not makes else ()
        writes = (*map(_room, makes), *own)
        places: dict[str, Any] = {
            k: self.at(v) if isinstance(v, Scratch) else v for k, v in values.items()
        }
        self.asm.add(name, access=Touched(reads, writes, tuple(map(_room, shared))), **places)

    def constant(self, values: Array) -> Array:
        """Numbers that the program brings along: nothing writes them once it is made."""
        self.constants.append((len(self.asm.rows), values))
        self.asm.kept.append(values)
        return values

    def ground(self, launch: Launch, first: int, stop: int) -> Ground:
        """What the plan lets the instructions first .. stop - 1 of a launch touch."""
        fixed = [a for s in launch.sources if (a := self._image(s)) is not None]
        fixed += [a for i, a in self.constants if first <= i < stop]
        ready = [_room(s) for s in launch.scratch.values() if s.ready]
        made = [_room(s) for s in launch.scratch.values() if not s.ready]
        sources = [s for s in launch.sources if has_bytes(s.memory)]
        reads = (*map(_range, sources), *ready, *map(_bytes_of, fixed))
        return Ground(launch.command.label, first, stop, reads, (_range(launch.result), *made))

    def at(self, ref: Ref | Scratch) -> int:
        """Address of a tensor's first element; the memory is kept alive with the program."""
        self.asm.kept.append(ref.memory.handle)
        return _start(ref)

    def weight(self, ref: Ref) -> Packed:
        """The packed form of a weight, made on first use."""
        return self.packer.weight(ref)

    def _image(self, ref: Ref) -> Array | None:
        packed = self.packer.found(ref) if is_weight(ref.tensor) else None
        return None if packed is None else packed.data

    def target(self, launch: Launch) -> tuple[str, dict[str, Any]]:
        """Of a kernel that writes the result row by row: how its name ends, by whether rows become
        8 bits, and the words that say where they go."""
        t, at = launch.result.tensor, self.at(launch.result)
        if t.dtype is A8:
            return "_quantise", {"out": at, "os": activation_bytes(t.shape[-1])}
        return "", {"y": at, "ys": t.shape[-1] * F32.block_bytes}

    def rows(self, launch: Launch, m: int, k: int) -> Scratch:
        """The 8-bit activation blocks of m rows of source 1, made by the first launch on them."""
        room, step = launch.room("rows"), activation_bytes(k)
        if not room.ready:
            x, own = self.at(launch.sources[1]), step_of(launch.sources[1].tensor)
            self.add("quantise", makes=[room], x=x, out=room, m=m, k=k, xs=own, os=step)
        return room

    def shown(self, launch: Launch) -> Scratch:
        """The list of the slots that each row of a mask shows, made by the first launch on it."""
        room = launch.room("slots")
        attrs = launch.result.tensor.attrs
        has_mask, has_length = bool(attrs["has_mask"]), bool(attrs["has_length"])
        mask = launch.sources[3 : 3 + has_mask]
        length = launch.sources[3 + has_mask :][:has_length]
        context = launch.sources[1].tensor.shape[0]
        m, n = mask[0].tensor.shape if mask else (launch.sources[0].tensor.shape[0], context)
        if not room.ready and mask and lists_slots(mask[0].tensor):
            self.add(
                "listed_slots", makes=[room], given=self.at(mask[0]), list=room,
                length=self.at(length[0]) if length else 0, m=m, n=n, c=context,
            )  # fmt: skip
        elif not room.ready:
            self.add(
                "shown_slots", makes=[room], mask=self.at(mask[0]) if mask else 0, list=room,
                length=self.at(length[0]) if length else 0, m=m, n=n, ms=n * 4,
            )  # fmt: skip
        return room


def _start(ref: Ref | Scratch) -> int:
    return ref.memory.address + ref.offset


def _range(ref: Ref) -> Range:
    """Addresses that a tensor covers, gaps of a view included."""
    start = _start(ref)
    return start, start + ref.tensor.nbytes


def _bytes_of(a: Array) -> Range:
    start = int(a.ctypes.data)
    return start, start + a.nbytes


def _room(s: Scratch) -> Range:
    start = _start(s)
    return start, start + s.nbytes
