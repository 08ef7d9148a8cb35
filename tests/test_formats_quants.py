"""Dequantisation is bit-exact to the `gguf` package, for any bytes."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.dtype import (
    ALL,
    BF16,
    F16,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q1_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    DType,
)  # fmt: skip
from ggraph.errors import FormatError
from ggraph.formats.quantise import WRITABLE
from ggraph.formats.quants import dequantize, quantize

BLOCKS = [t for t in ALL if t.is_block and t is not Q1_0]  # which the package does not read


@pytest.mark.parametrize("dtype", [*BLOCKS, F16, BF16], ids=repr)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 5), width=st.integers(1, 4))
def test_equal_to_gguf_for_random_bytes(dtype: DType, seed: int, rows: int, width: int) -> None:
    count = width * dtype.block_bytes if dtype.is_block else 2 * width
    raw = np.random.default_rng(seed).integers(0, 256, (rows, count), np.uint8)
    kind = gguf.GGMLQuantizationType(dtype.gguf)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind) if rows else np.zeros((0, 0))
    got = dequantize(raw, dtype)
    assert got.dtype == np.float32
    if rows:
        assert np.array_equal(got, expected, equal_nan=True)
        same = np.isnan(got) | (got.view(np.uint32) == expected.astype(np.float32).view(np.uint32))
        assert same.all()


def test_a_bit_is_a_sign() -> None:
    """Written out by hand: two blocks of 128, bits of each byte from the lowest on."""
    raw = np.zeros((1, 36), np.uint8)
    raw[0, :2], raw[0, 18:20] = (np.array([v], "<f2").view(np.uint8) for v in (0.5, -2.0))
    raw[0, 2], raw[0, 17], raw[0, 21] = 0b00000101, 0b10000000, 0b00000010
    expected = np.repeat(np.array([-0.5, 2.0], np.float32), 128)
    expected[[0, 2, 127]] = 0.5
    expected[128 + 9] = -2.0
    assert np.array_equal(dequantize(raw, Q1_0)[0], expected)


@pytest.mark.parametrize(
    "dtype", [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, TQ1_0, TQ2_0, BF16], ids=repr
)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 1e-6, 1.0, 300.0]))
def test_quantising_equals_gguf_bit_for_bit(dtype: DType, seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((3, 256)) * scale).astype(np.float32)
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType(dtype.gguf))
    assert np.array_equal(quantize(x, dtype), expected)


@pytest.mark.parametrize("dtype", [IQ4_NL, IQ4_XS, Q4_K, Q5_K, Q6_K], ids=repr)
@given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([0.0, 0.5, -2.0]))
def test_our_own_types_beat_a_plain_rule_of_the_same_width(
    dtype: DType, seed: int, shift: float
) -> None:
    x = np.random.default_rng(seed).standard_normal((8, 512)).astype(np.float32) + shift
    plain = {IQ4_NL: Q4_0, IQ4_XS: Q4_0, Q4_K: Q4_1, Q5_K: Q5_1, Q6_K: Q5_0}[dtype]
    error = np.square(dequantize(quantize(x, dtype), dtype) - x).mean()
    rival = np.square(dequantize(quantize(x, plain), plain) - x).mean()
    assert error < rival * 1.06  # six-bit scales may cost a little against float16 ones


@pytest.mark.parametrize(("dtype", "bits"), [(Q2_K, 2), (Q3_K, 3)], ids=repr)
@given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([0.0, 0.5]))
def test_few_bits_beat_even_steps_over_what_16_values_reach(
    dtype: DType, bits: int, shift: float, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((8, 512)).astype(np.float32) + shift
    parts = x.reshape(-1, 16)
    if dtype is Q2_K:
        least = np.minimum(parts.min(axis=1, keepdims=True), 0)
        step = (parts.max(axis=1, keepdims=True) - least) / (2**bits - 1)
        plain = np.rint((parts - least) / step) * step + least
    else:
        step = np.abs(parts).max(axis=1, keepdims=True) / 2 ** (bits - 1)
        plain = np.rint(parts / step).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step
    error = np.square(dequantize(quantize(x, dtype), dtype) - x).mean()
    assert error < np.square(plain - parts).mean()


@pytest.mark.parametrize("dtype", WRITABLE, ids=repr)
def test_zeros_and_constants_survive(dtype: DType) -> None:
    for value in (0.0, 1.0, -3.0):
        x = np.full((2, 256), value, np.float32)
        back = dequantize(quantize(x, dtype), dtype)
        assert np.abs(back - x).max() <= 0.02 * abs(value)


def test_types_that_cannot_be_written_are_named() -> None:
    unwritable = next(t for t in ALL if t.is_block and t not in WRITABLE)
    with pytest.raises(FormatError, match="cannot be written"):
        quantize(np.zeros((1, 256), np.float32), unwritable)
    with pytest.raises(FormatError, match="not blocks"):
        quantize(np.zeros((1, 33), np.float32), Q8_0)
