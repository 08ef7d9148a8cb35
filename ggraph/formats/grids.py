"""The grids of i-quants: which magnitudes their blocks' indices stand for.

A block of IQ1, IQ2 or IQ3 holds no weights but indices of rows of a grid: eight magnitudes (IQ3:
four), chosen by ggml's authors for what weights look like. Grids are part of the format and follow
no rule; they lie in `grids.bin`, one behind the other, each number as its place among the levels in
so many bits, low bits first. Source: ggml `ggml-common.h`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Grid:
    """`rows` rows of `width` numbers, each one of `levels`."""

    rows: int
    width: int
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of a number's place among the levels."""
        return (len(self.levels) - 1).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows * self.width * self.bits // 8

    def __repr__(self) -> str:
        return f"grid {self.rows}x{self.width}"


TWO, THREE = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
IQ2_XXS, IQ2_XS, IQ2_S = (Grid(rows, 8, TWO) for rows in (256, 512, 1024))
IQ3_XXS, IQ3_S = Grid(256, 4, THREE), Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15))
IQ1 = Grid(2048, 8, (-1, 0, 1))
FILE = (IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1)
OF = {
    "iq2_xxs": IQ2_XXS, "iq2_xs": IQ2_XS, "iq2_s": IQ2_S, "iq3_xxs": IQ3_XXS, "iq3_s": IQ3_S,
    "iq1_s": IQ1, "iq1_m": IQ1,
}  # fmt: skip
"""The grid of each type that has one."""


@cache
def places(grid: Grid) -> Array:
    """Each number's place among the levels, uint8 [rows, width]; not to be written to."""
    before = sum(g.nbytes for g in FILE[: FILE.index(grid)])
    raw = np.fromfile(Path(__file__).with_name("grids.bin"), np.uint8, grid.nbytes, offset=before)
    bits = np.unpackbits(raw, bitorder="little").reshape(grid.rows, grid.width, grid.bits)
    found: Array = (bits << np.arange(grid.bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    found.flags.writeable = False
    return found


@cache
def numbers(grid: Grid) -> Array:
    """The numbers themselves, int8 [rows, width]; not to be written to."""
    found: Array = np.array(grid.levels, np.int8)[places(grid)]
    found.flags.writeable = False
    return found
