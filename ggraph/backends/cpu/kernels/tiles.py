"""How weights lie in memory once packed. Sizes and offsets only.

A packed matrix W [n, k] is a list of tiles of 16 rows; a tile is a list of runs of blocks, a block
being 32 columns. A run holds the super-scales of its 16 rows where its scales are integers (then it
has 8 blocks, else one), the scales of its blocks, their minimums, then their codes. Of integers of
6 bits a scale's byte has the upper two of the minimum above it, and eight bytes have the lower four
of the minimums of rows i and i + 8; of 4 bits it has all of the minimum above it.

A code's bits are cut into planes, low ones first. Of a plane of 8 bits a block has eight groups of
64 bytes: four consecutive columns (4g .. 4g + 3) of each of 16 rows. Of w bits it has w groups:
group g lies in group g % w, from bit g // w * w of each byte on.

A weight is scale * (code - zero) + minimum, or scale * (value of the code - zero), each scale an
integer times its super-scale times `unit` where it has one. Float layouts
are plain: tiles of 32 rows, and for each column the rows' numbers.

Legend: n output rows, k columns (inputs), subs = scales per block (2: one per 16 columns).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ggraph import dtype as dt
from ggraph.dtype import DType
from ggraph.errors import BackendError
from ggraph.formats import grids
from ggraph.formats.grids import Grid
from ggraph.formats.lazy_array import Array
from ggraph.formats.levels import FP4_VALUES, NL_VALUES

TILE = 16  # rows of a quantised tile
HALF = 8  # rows of one vector
BLOCK = 32  # columns of a block
GROUP = 4  # columns of one vector
GROUPS = BLOCK // GROUP
GROUP_BYTES = TILE * GROUP
SUPER = 8  # blocks that share a super-scale
X_BLOCK = dt.A8.block_bytes  # a block of activations: 32 codes, scale, scale * sum of codes, and of
X_SCALE, X_SUM, X_SUMS = 32, 36, 40  # each half of the codes two sums by pairs of columns, int16
X_HALF = 4  # bytes of a half's sums: of columns 4i and 4i + 1, then of 4i + 2 and 4i + 3
Q8_BLOCK, Q8_BYTES, Q8_CODES = 32, 34, 2  # ggml's Q8_0: numbers, bytes, where its codes begin


class Scale(Enum):
    """How a block's scales are stored; the value is bytes of one."""

    HALF = "f16", 2
    EXPONENT = "e8m0", 1  # 2 ** (e - 128)
    INTEGER = "i8", 1  # times a super-scale, f16
    SIX = "u6", 1  # with a minimum of as many bits; each times a super-scale, f16
    FOUR = "u4", 1  # the same

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return self.value[1]


@dataclass(frozen=True)
class Layout:
    """One packed family.

    `planes`: bits of each plane of a code; `zero` is subtracted from every code; `values`: what
    codes stand for, `zero` added, where not for themselves; `stored_minimum`: whether each scale
    has a minimum; `unit`: a power of two by which super-scales, which have few bits where they are
    small, are not multiplied before they are stored.
    """

    name: str
    planes: tuple[int, ...]
    scale: Scale = Scale.HALF
    subs: int = 1
    stored_minimum: bool = False
    zero: int = 0
    values: tuple[int, ...] = ()
    unit: float = 1.0
    tile: ClassVar[int] = TILE

    @property
    def bits(self) -> int:
        """Bits that hold every code, or its value."""
        return max(self.values).bit_length() if self.values else sum(self.planes)

    @property
    def scaled_twice(self) -> bool:
        """Whether scales are integers, and have super-scales."""
        return self.scale in (Scale.INTEGER, Scale.SIX, Scale.FOUR)

    @property
    def blocks(self) -> int:
        """Blocks of a run."""
        return SUPER if self.scaled_twice else 1

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a run, behind super-scales of scales and of minimums."""
        return 2 * TILE * (1 + self.stored_minimum) if self.scaled_twice else 0

    @property
    def scales_bytes(self) -> int:
        """Bytes of one block's scales."""
        return TILE * self.scale.nbytes * self.subs

    @property
    def minimums_at(self) -> int:
        """Offset of the minimums in a run."""
        return self.scales_at + self.blocks * self.scales_bytes

    @property
    def minimums_bytes(self) -> int:
        """Bytes of one block's minimums, but for bits that lie with the scales."""
        apart = {Scale.SIX: 1 / 2, Scale.FOUR: 0}.get(self.scale, 1)
        return int(self.scales_bytes * self.stored_minimum * apart)

    @property
    def codes_at(self) -> int:
        """Offset of the codes in a run."""
        return self.minimums_at + self.blocks * self.minimums_bytes

    @property
    def codes_bytes(self) -> int:
        """Bytes of one block's codes."""
        return sum(self.planes) * GROUP_BYTES

    @property
    def run_bytes(self) -> int:
        """Bytes of a run of 16 rows."""
        return self.codes_at + self.blocks * self.codes_bytes

    def tile_bytes(self, k: int) -> int:
        """Bytes of a tile of k columns (whole runs)."""
        return k // (BLOCK * self.blocks) * self.run_bytes


@dataclass(frozen=True)
class FloatLayout:
    """Plain numbers of the type that is called as the layout."""

    name: str
    element_bytes: int
    tile: ClassVar[int] = 32  # more sums in flight hide the latency of fma


Packed = Layout | FloatLayout


def _raised(values: Array | Sequence[int], zero: int) -> tuple[int, ...]:
    return tuple(int(v) + zero for v in values)


def _signed(grid: Grid, zero: int, part: int = 1) -> tuple[int, ...]:
    """What a grid's places mean, without and with a sign, which is the bit above them; in parts."""
    sizes = [size // part for size in grid.levels] + [0] * (-len(grid.levels) % 4)
    return _raised([*sizes, *(-size for size in sizes)], zero)


# Values whose sums of pairs fit into 16 bits have a zero of their own; others need a byte's.
TWOS, THREES = _signed(grids.IQ2_S, 128), _signed(grids.IQ3_S, 15)
HALVED = _signed(grids.IQ3_XXS, 128, 2)
MOVED = _raised([8 * trit + up for up in (1, -1) for trit in (-1, 0, 1, 0)], 9)
TRITS = Layout("n2t", (2,), Scale.INTEGER, zero=1)
TWICE = Layout("i2h", (2, 1), Scale.INTEGER, subs=2, zero=128, values=TWOS, unit=1 / 8)

LAYOUTS: dict[DType, Packed] = {
    dt.Q4_0: Layout("n4z", (4,), zero=8),
    dt.Q4_1: Layout("n4m", (4,), stored_minimum=True),
    dt.Q5_0: Layout("n5z", (4, 1), zero=16),
    dt.Q5_1: Layout("n5m", (4, 1), stored_minimum=True),
    dt.Q8_0: Layout("b8", (8,), zero=128),
    dt.Q3_K: Layout("n3k", (2, 1), Scale.INTEGER, subs=2, zero=4),
    dt.Q4_K: Layout("n4k", (4,), Scale.SIX, stored_minimum=True),
    dt.Q5_K: Layout("n5k", (4, 1), Scale.SIX, stored_minimum=True),
    dt.Q6_K: Layout("n6k", (4, 2), Scale.INTEGER, subs=2, zero=32),
    dt.IQ4_NL: Layout("n4t", (4,), zero=128, values=_raised(NL_VALUES, 128)),
    dt.IQ4_XS: Layout("n4tk", (4,), Scale.INTEGER, zero=128, values=_raised(NL_VALUES, 128)),
    dt.MXFP4: Layout("n4e", (4,), Scale.EXPONENT, zero=12, values=_raised(FP4_VALUES, 12)),
    dt.NVFP4: Layout("n4h", (4,), subs=2, zero=12, values=_raised(FP4_VALUES, 12)),
    dt.Q1_0: Layout("n1", (1,), zero=1, values=(0, 2)),
    dt.TQ1_0: TRITS,
    dt.TQ2_0: TRITS,
    dt.Q2_K: Layout("n2k", (2,), Scale.FOUR, subs=2, stored_minimum=True),
    dt.IQ1_S: Layout("i1", (2, 1), Scale.INTEGER, zero=9, values=MOVED, unit=1 / 8),
    dt.IQ1_M: Layout("i1h", (2, 1), Scale.INTEGER, 2, zero=9, values=MOVED, unit=1 / 8),
    dt.IQ2_XXS: Layout("i2", (2, 1), Scale.INTEGER, zero=128, values=TWOS, unit=1 / 8),
    dt.IQ2_XS: TWICE,
    dt.IQ2_S: TWICE,
    dt.IQ3_XXS: Layout("i3", (4,), Scale.INTEGER, zero=128, values=HALVED, unit=1 / 2),
    dt.IQ3_S: Layout("i3s", (4,), Scale.INTEGER, zero=15, values=THREES),
    **{t: FloatLayout(t.name, t.block_bytes) for t in (dt.F32, dt.F16, dt.BF16)},
}

ALL_LAYOUTS = tuple(dict.fromkeys(LAYOUTS.values()))  # each once: some types share theirs


def layout_of(dtype: DType) -> Packed:
    """The packed layout of a weight type. BackendError where there is none."""
    found = LAYOUTS.get(dtype)
    if found is None:
        raise BackendError(f"no packed layout for {dtype}; have {', '.join(map(str, LAYOUTS))}")
    return found


def packed_bytes(dtype: DType, n: int, k: int) -> int:
    """Bytes of W [n, k] once packed (rows padded to whole tiles)."""
    layout = layout_of(dtype)
    if isinstance(layout, FloatLayout):
        return -(-n // layout.tile) * layout.tile * k * layout.element_bytes
    if k % dtype.block:
        raise BackendError(f"{dtype} rows of {k} columns are not whole blocks of {dtype.block}")
    return -(-n // TILE) * layout.tile_bytes(k)


def activation_bytes(k: int) -> int:
    """Bytes of one quantised activation row of k columns (whole blocks)."""
    if k % BLOCK:
        raise BackendError(f"activation rows of {k} columns are not whole blocks of {BLOCK}")
    return k // BLOCK * X_BLOCK
