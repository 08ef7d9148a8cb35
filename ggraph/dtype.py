"""Data types: names, sizes and GGUF numbers.

A type stores its elements in blocks along the last axis: plain types have blocks of one element,
quantised types blocks of 32 to 256. The meaning of a block's bytes is in `ggraph.formats.quants`.
Sizes and numbers are those of the GGUF specification (ggml `type_traits`).
"""

from dataclasses import dataclass

import numpy as np

from ggraph.door import fit
from ggraph.errors import ShapeError, shown


@dataclass(frozen=True)
class DType:
    """One element type.

    `block` elements take `block_bytes` bytes; `numpy` is the matching NumPy type of a plain type
    (None for block types; BF16 is held as uint16 bit patterns); `gguf` is its number in GGUF files.
    """

    name: str
    gguf: int
    block: int
    block_bytes: int
    numpy: str | None

    def __post_init__(self) -> None:
        """Asked once here: every tensor carries one, and tensors are asked at every door."""
        fit(self, ShapeError)

    @property
    def is_block(self) -> bool:
        """Whether elements are packed in blocks that only whole blocks can address."""
        return self.block > 1

    @property
    def is_float(self) -> bool:
        """Whether the type stands for real numbers (quantised types do)."""
        return not self.name.startswith("i") or self.name.startswith("iq")

    def row_bytes(self, n: int) -> int:
        """Bytes of `n` consecutive elements of one row; `n` must be whole blocks."""
        if n % self.block:
            raise ShapeError(
                f"{self.name}: row of {n} elements is not whole blocks of {self.block}"
            )
        return n // self.block * self.block_bytes

    @property
    def np(self) -> np.dtype:
        """NumPy type that carries the raw storage (uint8 for block types)."""
        return np.dtype(self.numpy or "uint8")

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", 0, 1, 4, "<f4")
F16 = DType("f16", 1, 1, 2, "<f2")
BF16 = DType("bf16", 30, 1, 2, "<u2")
F64 = DType("f64", 28, 1, 8, "<f8")
I8 = DType("i8", 24, 1, 1, "<i1")
I16 = DType("i16", 25, 1, 2, "<i2")
I32 = DType("i32", 26, 1, 4, "<i4")
I64 = DType("i64", 27, 1, 8, "<i8")
Q4_0 = DType("q4_0", 2, 32, 18, None)
Q4_1 = DType("q4_1", 3, 32, 20, None)
Q5_0 = DType("q5_0", 6, 32, 22, None)
Q5_1 = DType("q5_1", 7, 32, 24, None)
Q8_0 = DType("q8_0", 8, 32, 34, None)
Q2_K = DType("q2_k", 10, 256, 84, None)
Q3_K = DType("q3_k", 11, 256, 110, None)
Q4_K = DType("q4_k", 12, 256, 144, None)
Q5_K = DType("q5_k", 13, 256, 176, None)
Q6_K = DType("q6_k", 14, 256, 210, None)
IQ4_NL = DType("iq4_nl", 20, 32, 18, None)
IQ4_XS = DType("iq4_xs", 23, 256, 136, None)
MXFP4 = DType("mxfp4", 39, 32, 17, None)
TQ1_0 = DType("tq1_0", 34, 256, 54, None)
TQ2_0 = DType("tq2_0", 35, 256, 66, None)
IQ1_S = DType("iq1_s", 19, 256, 50, None)
IQ1_M = DType("iq1_m", 29, 256, 56, None)
IQ2_XXS = DType("iq2_xxs", 16, 256, 66, None)
IQ2_XS = DType("iq2_xs", 17, 256, 74, None)
IQ2_S = DType("iq2_s", 22, 256, 82, None)
IQ3_XXS = DType("iq3_xxs", 18, 256, 98, None)
IQ3_S = DType("iq3_s", 21, 256, 110, None)
NVFP4 = DType("nvfp4", 40, 64, 36, None)
Q1_0 = DType("q1_0", 41, 128, 18, None)

A8 = DType("a8", -1, 32, 48, None)
"""Activations on their way into a product: 32 codes of 8 bits, their scale and scale * sum of codes
in float32, and four sums of codes in 16 bits. The type lives between two ops of one plan and in no
file."""

E4M3 = DType("f8_e4m3", -1, 1, 1, "<u1")
E5M2 = DType("f8_e5m2", -1, 1, 1, "<u1")
E8M0 = DType("f8_e8m0", -1, 1, 1, "<u1")
FP8 = (E4M3, E5M2)
"""Numbers of 8 bits as folders store weights, and E8M0 scales, held as bit patterns. The names tell
how many bits are an exponent's and a fraction's; E4M3 has no infinities, E8M0 no sign and no zero.
No graph computes with them: see `formats.coded`. Source: the OCP's 8-bit Floating Point
Specification 1.0 and Microscaling Formats 1.0."""

ALL: tuple[DType, ...] = (
    F32, F16, BF16, F64, I8, I16, I32, I64,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
    TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, NVFP4, Q1_0,
)  # fmt: skip
BY_NAME: dict[str, DType] = {t.name: t for t in (*ALL, A8)}
BY_GGUF: dict[int, DType] = {t.gguf: t for t in ALL}


BY_NUMPY: dict[str, DType] = {t.numpy: t for t in ALL if t.numpy is not None and t is not BF16}


def dtype(name: str) -> DType:
    """The type called `name` (any case). Raises ShapeError for an unknown name."""
    found = BY_NAME.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ShapeError(f"unknown dtype {shown(name)}; known: {', '.join(BY_NAME)}")
    return found


def as_dtype(given: object) -> DType:
    """A type by itself, by its name ("f16", "q8_0"), or by NumPy's (np.float16, "float16").

    Raises ShapeError for anything else.
    """
    if isinstance(given, DType):
        return given
    if isinstance(given, str) and given.lower() in BY_NAME:
        return BY_NAME[given.lower()]
    try:
        found = BY_NUMPY.get(np.dtype(given).str) if given is not None else None  # type: ignore[call-overload]
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise ShapeError(f"unknown dtype {shown(given)}; known: {', '.join(BY_NAME)}")
    return found
