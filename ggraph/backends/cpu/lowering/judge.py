"""Is a flat program what the plan proved? Judged when it is lowered, from its words alone.

The program's threads are actors, its barriers the only orderings between them, and every thread may
be anywhere between two barriers. Nothing is taken from the assembler but the finished words: what
an instruction touches follows from its own arguments (`footprints`), and is held against

1. the plan: an instruction reads only its launch's sources and what the launch has beside them, and
   writes only the result and what the launch fills (`Ground`);
2. the other instructions between the same barriers: no byte that one writes is another's too, but
   for bytes that both share out among the threads alike;
3. the instruction's own parts: what it writes in place is read by the very part that writes it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ggraph.backends.cpu.codegen.simd import BARRIER, HEADER_WORDS, KERNELS
from ggraph.backends.cpu.lowering.footprints import footprint
from ggraph.backends.cpu.lowering.patches import Args, Patch
from ggraph.errors import PlanError
from ggraph.tensor import Array

Bytes = tuple[int, int]  # addresses: first, one past the last


@dataclass(frozen=True)
class Ground:
    """Where the instructions first .. stop - 1, those of one launch, may read and write."""

    title: str
    first: int
    stop: int
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]

    @cached_property
    def places(self) -> tuple[Bytes, ...]:
        """Where they may read: what they write, too."""
        return (*self.reads, *self.writes)


@dataclass(frozen=True)
class Line:
    """One instruction, decoded."""

    number: int
    kernel: str
    patches: tuple[Patch, ...]
    meets: bool  # all threads meet behind it

    def __str__(self) -> str:
        return f"instruction {self.number} ({self.kernel})"


def decoded(code: Array, names: Sequence[str]) -> Iterator[Line]:
    """The instructions of a program. PlanError for one of which nothing is known."""
    for i, (words, name) in enumerate(zip(code.tolist(), names, strict=True)):
        patches = footprint(name, _arguments(name, words))
        if patches is None:
            raise PlanError(f"instruction {i}: nothing is known of what {name} touches")
        yield Line(i, name, patches, bool(words[1] & BARRIER))


def _arguments(name: str, words: Sequence[int]) -> Args:
    """Integer arguments by name; numbers are left out."""
    pairs = zip(KERNELS[name].words.items(), words[HEADER_WORDS:], strict=False)
    return {argument: word for (argument, is_number), word in pairs if not is_number}


def judge(code: Array, names: Sequence[str], grounds: Iterable[Ground]) -> int:
    """How many pairs of accesses were held against each other. PlanError for the first fault."""
    lines = tuple(decoded(code, names))
    for ground in grounds:
        for line in lines[ground.first : ground.stop]:
            _within(line, ground)
    return sum(map(_apart, lines)) + _ordered(lines)


def _within(line: Line, ground: Ground) -> None:
    for p in line.patches:
        base, stop = p.base, p.stop
        for a, b in ground.writes if p.is_write else ground.places:
            if a <= base and stop <= b:
                break
        else:
            raise PlanError(
                f"{line} of {ground.title!r} {'writes' if p.is_write else 'reads'} "
                f"{p.argument} [{p.base:#x}, {p.stop:#x}), which the plan does not give it"
            )


def _apart(line: Line) -> int:
    """The parts of one instruction, which run at the same time."""
    pairs = 0
    for w in [p for p in line.patches if p.is_write]:
        for other in line.patches:
            if other is w:
                continue
            pairs += 1
            if not w.meets(other):
                continue
            own = w.whose == other.whose == "own" and w.same_place(other)
            if other.is_write or not own:
                raise PlanError(
                    f"{line} writes {w.argument} over {other.argument} while other threads use it"
                )
    return pairs


def _ordered(lines: Sequence[Line]) -> int:
    """Instructions that no barrier separates."""
    pairs, running = 0, list[tuple[Line, Patch, int]]()
    for line in lines:
        mine = [(p, p.stop) for p in line.patches]
        pairs += len(running) * len(mine)
        for other, old, end in running:
            for p, stop in mine:
                clash = (p.is_write or old.is_write) and p.base < end and old.base < stop
                if clash and not p.same_share(old):
                    raise PlanError(
                        f"nothing orders {other} and {line}: {old.argument} and {p.argument} "
                        f"share bytes at {max(p.base, old.base):#x}"
                    )
        running = [] if line.meets else [*running, *((line, p, stop) for p, stop in mine)]
    return pairs
