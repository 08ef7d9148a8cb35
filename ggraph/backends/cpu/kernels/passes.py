"""What products share: how rows go by passes, where their sums wait, how they are written.

Legend: a part is what one vector holds of a tile's outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, Kernel, Num, Val, Var, vec
from ggraph.backends.cpu.kernels.tiles import HALF

# Rows of x per pass, by lanes: vectors of 512 bits have twice the registers. Of many rows they meet
# two tiles abreast, half as many at a time: what is loaded of x then serves twice as many products.
ROWS = {8: 5, 16: 8}
ABREAST, ABREAST_ROWS = 2, 6
FROM_ONE = 4  # rows whose addresses are one register and what x86 adds to it: 0, 1, 2 or 3 steps


@dataclass(frozen=True)
class Rows:
    """The rows of x that a pass meets: `count` of them at `starts`, each followed by those that lie
    `steps` behind it. Registers for addresses are few: a pass of 12 rows that lie anywhere loads 73
    of them again for each block."""

    k: Kernel
    count: int
    starts: Sequence[Val]
    steps: Sequence[Val] = ()

    @staticmethod
    def anywhere(k: Kernel, rows: Sequence[Val]) -> "Rows":
        """Rows at these addresses."""
        return Rows(k, len(rows), [k.opaque(row) for row in rows])

    @staticmethod
    def evenly(k: Kernel, first: Val, step: Val, count: int) -> "Rows":
        """Rows from an address on, each so many bytes behind the one before."""
        starts = [k.opaque(first + step * r) for r in range(0, count, FROM_ONE)]
        one = k.opaque(step)
        return Rows(k, count, starts, [one, one * 2, k.opaque(one * 3)])

    def at(self, place: Val) -> list[Val]:
        """The addresses of what lies at this place of each row."""
        if not self.steps:
            return [start + place for start in self.starts]
        found = []
        for start in self.starts:
            here = self.k.opaque(start + place)
            found += [here, *(here + step for step in self.steps)]
        return found[: self.count]


def rows_from(k: Kernel, x: Val) -> Callable[[Val], Val]:
    """The addresses of the rows that follow the one at x, by number."""
    return lambda i: x + k.arg("xs") * i


def floats(k: Kernel) -> ir.VectorType:
    """A vector of this processor."""
    return vec(F32, k.isa.lanes)


def in_passes(k: Kernel, most: int, end: Val, begin: Num = 0) -> Iterator[tuple[Val, Val]]:
    """Rows `begin` to before `end` by passes, the first row and the count of each: as many as a
    pass takes, but the last two passes share alike."""
    first = k.var(begin)
    with k.while_(lambda: first.value < end):
        at = first.value
        left = end - at
        alike = k.select(left <= 2 * most - 2, (left + 1) // 2, most)
        count = k.select(left <= most, left, alike)
        yield at, count
        first.value = at + count


def of_height(k: Kernel, count: Val, most: int, least: int = 1) -> Iterator[int]:
    """Code for each count of rows from `least` to `most`, of which the one runs that `count` is."""
    for height in range(least, most + 1):
        with k.when(count.eq(height)):
            yield height


@dataclass(eq=False)
class Held:
    """A sum that waits in memory: a vector of float32."""

    k: Kernel
    at: Val

    @property
    def value(self) -> Val:
        """As it is now."""
        return self.k.load(self.at, floats(self.k))

    @value.setter
    def value(self, new: Num) -> None:
        self.k.store(self.at, new if isinstance(new, Val) else self.k.const(new, floats(self.k)))


@contextmanager
def near(k: Kernel, held: Sequence[Held]) -> Iterator[list[Held | Var]]:
    """Sums as something adds to them: in registers where vectors have 512 bits, and so twice as
    many, from where they go back; else where they wait, since registers hold codes."""
    sums = [h if k.isa.lanes == HALF else k.var(h.value) for h in held]
    yield sums
    for h, own in zip(held, sums, strict=True):
        if own is not h:
            h.value = own.value


def homes(k: Kernel, home: Val, tile: int, count: int) -> list[Held]:
    """The sums of each (part, row), which wait there; a row's outputs are contiguous."""
    parts, rows = range(0, tile, k.isa.lanes), range(count)
    return [Held(k, home + (r * tile + p) * 4) for p in parts for r in rows]


def write_row(k: Kernel, tile: int, home: Val, y: Val, add: Val, left: Val) -> None:
    """Store a row's outputs of a tile at `y`, adding the residual at `add` unless that is 0."""
    for h in range(tile // HALF):
        value = k.var(k.load(home + h * HALF * 4, F32X8))
        at = h * HALF * 4
        rest = left - h * HALF
        with k.when(add.ne(0)):
            value.value = value.value + words.load_tail(k, add + at, rest)
        with k.if_else(rest >= HALF) as (whole, part):
            with whole:
                k.store(y + at, value.value)
            with part:
                words.store_tail(k, y + at, value.value, rest)
