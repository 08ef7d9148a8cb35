"""Rectangles of bytes, in which rules say what an instruction touches (`footprints.py`).

A `Patch` is `rows` rows of `width` bytes that lie `step` apart. `whose` says which of the kernel's
parts touch it: "own", the part of a row (and column) alone that writes the same place of the
result; "any", any part any of it; "listed", rows that an index names, each once. Of a patch that
is `shared` a thread touches its share of the columns in every row: equal shares of blocks of 32.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

Args = Mapping[str, int]


class Patch(NamedTuple):
    """A rectangle of bytes that an instruction reads or writes."""

    argument: str
    is_write: bool
    base: int
    rows: int
    step: int
    width: int
    whose: str = "own"
    layout: tuple[int, ...] = ()  # of a nest: the strides along its axes
    shared: bool = False

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.base + (self.rows - 1) * self.step + self.width

    def meets(self, other: "Patch") -> bool:
        """Whether the two may share a byte (gaps between rows count)."""
        return self.base < other.stop and other.base < self.stop

    def same_place(self, other: "Patch") -> bool:
        """Whether row by row and byte by byte the two are one."""
        mine = (self.base, self.rows, self.step, self.width, self.layout)
        return mine == (other.base, other.rows, other.step, other.width, other.layout)

    def same_share(self, other: "Patch") -> bool:
        """Whether a thread touches the same bytes of the two."""
        return self.shared and other.shared and self.same_place(other)


Rule = Callable[[Args, str], Iterator[Patch]]


def reads(
    a: Args, name: str, rows: int, step: int, width: int, whose: str = "own", shared: bool = False
) -> Patch:
    """A patch that is read, from the address in the argument `name` on."""
    return Patch(name, False, a[name], rows, step, width, whose, (), shared)


def writes(
    a: Args, name: str, rows: int, step: int, width: int, whose: str = "own", shared: bool = False
) -> Patch:
    """The same, written."""
    return Patch(name, True, a[name], rows, step, width, whose, (), shared)
