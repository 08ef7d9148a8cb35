"""How weights lie in memory once packed. Sizes and offsets only.

A packed matrix W [n, k] is a list of tiles of 16 rows; a tile is a list of blocks of 32 columns;
a block holds the scales of its 16 rows, their minimums, then the codes. Codes lie in vectors of 32
bytes: four consecutive columns of each of 8 rows (lane = row). Vectors come as group 0 of rows 0-7,
group 0 of rows 8-15, group 1 of rows 0-7 ... Byte codes have eight groups (columns 4g .. 4g+3),
nibble codes four: low nibbles are columns 4g .. 4g+3, high ones 16+4g .. 16+4g+3. Codes of five
bits are nibbles, and one group more: bit g of its bytes is the fifth bit of column 4g + (byte % 4).

A weight is scale * code + minimum; "zero" layouts have minimum = -zero * scale. Float layouts are
plain: tiles of 32 rows, and for each column the rows' numbers.

Legend: n output rows, k columns (inputs), subs = scales per block (2: one per 16 columns).
"""

from dataclasses import dataclass
from typing import ClassVar

from ggraph import dtype as dt
from ggraph.dtype import DType
from ggraph.errors import BackendError

TILE = 16  # rows of a quantised tile
HALF = 8  # rows of one vector
BLOCK = 32  # columns of a block
GROUP = 4  # columns of one vector
X_BLOCK = 40  # bytes of a quantised activation block: 32 codes, scale, scale * sum of codes
X_SCALE, X_SUM = 32, 36
Q8_BLOCK, Q8_BYTES, Q8_CODES = 32, 34, 2  # ggml's Q8_0: numbers, bytes, where its codes begin


@dataclass(frozen=True)
class Layout:
    """One packed family. `bits`: |code| <= 2**bits; `scale_bytes` 2 (float16) or 4 (float32);
    `fifth`: nibbles with a group of fifth bits behind them."""

    name: str
    nibbles: bool
    bits: int
    signed: bool = False
    scale_bytes: int = 2
    subs: int = 1
    stored_minimum: bool = False
    zero: int = 0
    fifth: bool = False
    tile: ClassVar[int] = TILE

    @property
    def groups(self) -> int:
        """Groups of codes in a block; one of fifth bits may lie behind them."""
        return BLOCK // GROUP // (2 if self.nibbles else 1)

    @property
    def has_minimum(self) -> bool:
        """Whether a weight is more than scale * code."""
        return self.stored_minimum or self.zero != 0

    @property
    def minimum_at(self) -> int:
        """Offset of the minimums in a block."""
        return TILE * self.scale_bytes * self.subs

    @property
    def codes_at(self) -> int:
        """Offset of the codes in a block."""
        return self.minimum_at + TILE * self.scale_bytes * self.stored_minimum

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows and 32 columns."""
        return self.codes_at + (self.groups + self.fifth) * TILE * GROUP


@dataclass(frozen=True)
class FloatLayout:
    """Plain numbers: `element` is "f32", "f16" or "bf16"."""

    name: str
    element: str
    element_bytes: int
    tile: ClassVar[int] = 32  # more sums in flight hide the latency of fma


Packed = Layout | FloatLayout

LAYOUTS: dict[DType, Packed] = {
    dt.Q4_0: Layout("n4z", True, 4, zero=8),
    dt.Q4_1: Layout("n4m", True, 4, stored_minimum=True),
    dt.Q5_0: Layout("n5z", True, 5, zero=16, fifth=True),
    dt.Q5_1: Layout("n5m", True, 5, stored_minimum=True, fifth=True),
    dt.Q8_0: Layout("b8", False, 8, signed=True),
    dt.Q4_K: Layout("n4mk", True, 4, scale_bytes=4, stored_minimum=True),
    dt.Q5_K: Layout("n5mk", True, 5, scale_bytes=4, stored_minimum=True, fifth=True),
    dt.Q3_K: Layout("b3k", False, 3, signed=True, scale_bytes=4, subs=2),
    dt.Q6_K: Layout("b6k", False, 6, signed=True, scale_bytes=4, subs=2),
    dt.F32: FloatLayout("f32", "f32", 4),
    dt.F16: FloatLayout("f16", "f16", 2),
    dt.BF16: FloatLayout("bf16", "bf16", 2),
}


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
    return -(-n // TILE) * (k // BLOCK) * layout.block_bytes


def activation_bytes(k: int) -> int:
    """Bytes of one quantised activation row of k columns (whole blocks)."""
    if k % BLOCK:
        raise BackendError(f"activation rows of {k} columns are not whole blocks of {BLOCK}")
    return k // BLOCK * X_BLOCK
