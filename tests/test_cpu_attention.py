"""Attention over a cache: float64 oracle, and bits that depend on the row alone."""

from typing import Any

import numpy as np
import pytest
from cpu_calls import call
from hypothesis import given
from hypothesis import strategies as st

from ggraph.backends.cpu import attention
from ggraph.dtype import Q8_0
from ggraph.formats.quants import dequantize, quantize

TYPES = {"f32": np.float32, "f16": np.float16, "q8_0": np.float32}


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """A cache [n, heads, hd] as it lies in memory."""
    return quantize(x.astype(np.float32), Q8_0) if kind == "q8_0" else x.astype(TYPES[kind])


def numbers(cache: np.ndarray) -> np.ndarray:
    """What a stored cache stands for, float64."""
    plain = dequantize(cache, Q8_0) if cache.dtype == np.uint8 else cache
    return plain.astype(np.float64)


def arguments(kind: str, m: int, heads: int, kv: int, hd: int, n: int, seed: int) -> dict[str, Any]:
    """Random queries, cache and causal mask with a hole; outputs are zeros."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(m, heads, hd)).astype(np.float32)
    k, v = (stored(kind, rng.normal(size=(n, kv, hd))) for _ in range(2))
    shown = np.sort(rng.integers(1, n + 1, m))
    mask = np.where(np.arange(n) < shown[:, None], 0, -np.inf).astype(np.float32)
    if m > 1:
        mask[-1, : shown[-1] // 2] = -np.inf
    return {
        "q": q, "k": k, "v": v, "mask": mask, "y": np.zeros_like(q), "m": m, "heads": heads,
        "kv_heads": kv, "hd": hd, "n": n, "qs": q.strides[0], "ks": k.strides[0],
        "kh": k.strides[1], "vs": v.strides[0], "vh": v.strides[1], "ms": mask.strides[0],
        "ys": q.strides[0], "scale": hd**-0.5,
        "part": np.full(attention.scratch_bytes(m, heads, hd, n), 0xFF, np.uint8),
    }  # fmt: skip


def oracle(a: dict[str, Any]) -> np.ndarray:
    m, heads, kv, hd = a["m"], a["heads"], a["kv_heads"], a["hd"]
    q = a["q"].astype(np.float64).reshape(m, kv, heads // kv, hd)
    scores = np.einsum("mkgd,nkd->mkgn", q, numbers(a["k"])) * a["scale"]
    scores += a["mask"][:, None, None]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("mkgn,nkd->mkgd", p, numbers(a["v"])).reshape(m, heads, hd)


SHAPES = [(9, 3, 64), (4, 4, 80), (7, 1, 128), (2, 1, 8), (10, 2, 40), (6, 1, 256), (2, 1, 96)]


@pytest.mark.parametrize("kind", TYPES)
@given(
    shape=st.sampled_from(SHAPES),
    n=st.sampled_from([1, 2, 7, 64, 127, 128, 129, 300, 640]),
    m=st.integers(1, 7),
    seed=st.integers(0, 9),
)
def test_against_float64(kind: str, shape: tuple[int, int, int], n: int, m: int, seed: int) -> None:
    heads, kv, hd = shape
    a = arguments(kind, m, heads, kv, -(-hd // 32) * 32 if kind == "q8_0" else hd, n, seed)
    call("attention_" + kind, 3, **a)
    assert np.abs(a["y"] - oracle(a)).max() < 5e-6
    chunked = dict(a, y=np.zeros_like(a["y"]))
    call("attend_chunks_" + kind, 2, **chunked)
    call("merge_chunks", 4, **chunked)
    assert np.array_equal(chunked["y"], a["y"]), "single chunks merge to the same bits"


@pytest.mark.parametrize("kind", TYPES)
def test_bits_depend_on_neither_batch_nor_bucket(kind: str) -> None:
    a = arguments(kind, 12, 9, 3, 64, 300, 4)
    call("attention_" + kind, 1, **a)
    for row in range(12):
        alone = dict(a, q=a["q"][row:], mask=a["mask"][row:], m=1, y=np.zeros((1, 9, 64), "f4"))
        call("attention_" + kind, 2, **alone)
        assert np.array_equal(alone["y"][0], a["y"][row])
    wide = np.full((12, 512), -np.inf, np.float32)
    wide[:, :300] = a["mask"]
    cache = {x: np.concatenate([a[x], a[x][:212]]) for x in "kv"}
    part = np.zeros(attention.scratch_bytes(12, 9, 64, 512), np.uint8)
    bucket = dict(a, **cache, mask=wide, ms=wide.strides[0], n=512, part=part, y=a["y"] * 0)
    call("attention_" + kind, 2, **bucket)
    assert np.array_equal(bucket["y"], a["y"]), "a longer bucket changes nothing"


def test_rows_that_show_nothing_and_no_mask() -> None:
    a = arguments("f32", 2, 2, 1, 16, 40, 0)
    a["mask"][0] = -np.inf
    call("attention_f32", **a)
    assert (a["y"][0] == 0).all() and np.isfinite(a["y"][1]).all()
    free = dict(a, mask=0, y=np.zeros_like(a["y"]))
    call("attention_f32", **free)
    assert np.abs(free["y"] - oracle(dict(a, mask=np.zeros((2, 40))))).max() < 5e-6
