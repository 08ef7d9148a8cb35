"""Random storage of every weight type, for tests and scripts. Needs no backend."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ggraph import dtype as dt
from ggraph.dtype import DType
from ggraph.formats.iquants import ue4m3_halves

Array = np.ndarray[Any, Any]
HALVES_AT = {
    **dict.fromkeys((dt.Q4_1, dt.Q5_1, dt.Q4_K, dt.Q5_K), (0, 2)),
    dt.Q2_K: (80, 82), dt.Q3_K: (108,), dt.Q6_K: (208,), dt.TQ1_0: (52,), dt.TQ2_0: (64,),
}  # fmt: skip
"""Where in their blocks types have scales, float16, if not at the beginning alone."""


def set_scales(blocks: Array, dtype: DType, scales: Array) -> None:
    """Give blocks, uint8 [N, block_bytes], these scales, float16 [N, 2]: of each block the steps',
    and what its minimums are multiples of. Types without float16 take the nearest that they have;
    integer scales beside them stay."""
    sizes = np.abs(scales[:, :1].astype(np.float32))
    if dtype is dt.MXFP4:
        blocks[:, :1] = np.rint(np.log2(np.maximum(sizes, 1e-8))) + 128
    elif dtype is dt.NVFP4:  # the least stands for 0
        known = ue4m3_halves()[1:127].astype(np.float32)
        blocks[:, :4] = np.abs(known - sizes).argmin(axis=1)[:, None] + 1
    elif dtype is dt.IQ1_M:  # four bits of it above those of other scales
        quarters = scales[:, :1].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
        words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
        blocks[:, 48:] = ((words & 0xFFF) | (quarters << np.uint16(12))).view(np.uint8)
    else:
        for i, at in enumerate(HALVES_AT.get(dtype, (0,))):
            blocks[:, at : at + 2] = scales[:, i : i + 1].view(np.uint8)


def raw_weight(
    dtype: DType, n: int, k: int, seed: int = 0, among: Sequence[int] = range(256)
) -> Array:
    """Random storage of W [n, k]: any codes, or bytes of them `among` these, finite scales of
    ordinary size."""
    rng = np.random.default_rng(seed)
    if not dtype.is_block:
        numbers = rng.normal(size=(n, k)).astype(np.float32)
        if dtype is dt.BF16:
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return numbers.astype(dtype.np).view(np.uint8)
    raw = rng.choice(np.array(among, np.uint8), (n, dtype.row_bytes(k)))
    blocks = raw.reshape(-1, dtype.block_bytes)
    set_scales(blocks, dtype, (rng.normal(size=(len(blocks), 2)) * 0.01).astype(np.float16))
    return raw
