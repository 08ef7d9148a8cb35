"""Packing: the same bytes by every variant of the kernels and any number of threads."""

from pathlib import Path

import numpy as np
import pytest
from cpu_calls import call, call_with, packed_weight, variants
from stored_weights import raw_weight

from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, FloatLayout, packed_bytes
from ggraph.dtype import DType

QUANTISED = [d for d, layout in LAYOUTS.items() if not isinstance(layout, FloatLayout)]
FLOATS = [d for d in LAYOUTS if d not in QUANTISED]
ROWS = (1, 16, 37)  # of one tile, a whole one, and the beginning of a third


def columns(dtype: DType) -> int:
    """Two runs of a quantised row; numbers that end amid what is turned at once."""
    return 2 * dtype.block if dtype.is_block else 43


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_every_variant_packs_the_same_bytes(dtype: DType, variant: str, tmp_path: Path) -> None:
    jit = Jit(variants()[variant], tmp_path)
    for n in ROWS:
        k = columns(dtype)
        raw = raw_weight(dtype, n, k, seed=n)
        found = np.full(packed_bytes(dtype, n, k), 0xAA, np.uint8)
        words = {"raw": raw, "out": found, "n": n, "k": k, "row_bytes": raw.shape[1]}
        call_with(jit, f"pack_{dtype.name}", **words)
        assert (found == packed_weight(dtype, raw, n, k)[: len(found)]).all(), n


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_threads_pack_what_one_does(dtype: DType) -> None:
    n, k = 5 * 32 + 3, columns(dtype)
    raw = raw_weight(dtype, n, k)
    one, four = (np.full(packed_bytes(dtype, n, k), 0xAA, np.uint8) for _ in range(2))
    for threads, out in ((1, one), (4, four)):
        call(f"pack_{dtype.name}", threads, raw=raw, out=out, n=n, k=k, row_bytes=raw.shape[1])
    assert (one == four).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [1, 7, 8, 43, 64])
def test_plain_numbers_are_turned_within_tiles(dtype: DType, k: int) -> None:
    for n in (1, 32, 77):
        raw, layout = raw_weight(dtype, n, k, seed=k), LAYOUTS[dtype]
        padded = np.zeros((-(-n // layout.tile) * layout.tile, raw.shape[1]), np.uint8)
        padded[:n] = raw
        numbers = padded.view(f"u{raw.shape[1] // k}").reshape(-1, layout.tile, k)
        expected = np.ascontiguousarray(numbers.transpose(0, 2, 1)).view(np.uint8).reshape(-1)
        assert (packed_weight(dtype, raw, n, k)[:-256] == expected).all(), n
