"""Element-wise, norm, rope and row kernels against float64 meanings."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpu_calls import call, call_with, variants
from hypothesis import given
from hypothesis import strategies as st

from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.kernels.elementwise import UNITS
from ggraph.backends.cpu.kernels.tiles import X_BLOCK
from ggraph.dtype import Q8_0
from ggraph.formats.quants import dequantize, quantize

SIZES = st.sampled_from([1, 7, 8, 31, 32, 65, 576, 1100])
ROWS = st.integers(0, 5)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(got: np.ndarray, want: np.ndarray, bound: float = 2e-6) -> bool:
    if want.size == 0:
        return got.shape == want.shape
    return bool((np.abs(got - want) <= bound * (np.abs(want).max() + 1e-30)).all())


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def gelu(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)))


@pytest.mark.parametrize(
    ("unit", "opened"), [("swiglu", lambda x: x * sigmoid(x)), ("geglu", gelu)]
)
@given(m=ROWS, n=SIZES)
def test_gated_units(unit: str, opened: Callable[[np.ndarray], np.ndarray], m: int, n: int) -> None:
    a, b, y = normal(1, m, n), normal(2, m, n), np.zeros((m, n + 1), np.float32)
    steps = {"as": a.strides[0], "bs": b.strides[0], "ys": y.strides[0]}
    call(unit, a=a, b=b, y=y, m=m, n=n, **steps)
    assert close(y[:, :n], opened(a) * b)
    assert (y[:, n] == 0).all(), "wrote beyond the row"


def test_units_of_any_gate() -> None:
    """Far from 0, where exponentials are 0 or infinite, at 0 and of what is no number."""
    a = np.array([[-np.inf, -3e38, -200, -0.0, 0.0, 1e-30, 100, 3e38, np.inf, np.nan]], np.float32)
    b, y, n = np.ones_like(a), np.zeros_like(a), a.size
    for unit in UNITS:
        call(unit, a=a, b=b, y=y, m=1, n=n, **{"as": 4 * n, "bs": 4 * n, "ys": 4 * n})
        assert np.array_equal(y[0, 1:7], np.float32([-0.0, -0.0, -0.0, 0.0, 5e-31, 100])), unit
        assert np.isnan(y[0, 9]), unit


@given(m=ROWS, n=SIZES, weighted=st.booleans())
def test_rms_norm(m: int, n: int, weighted: bool) -> None:
    x, w, y = normal(1, m, n), normal(2, n), np.zeros((m, n), np.float32)
    weight: np.ndarray | int = w if weighted else 0
    call("rms_norm", x=x, w=weight, y=y, m=m, n=n, xs=x.strides[0], ys=y.strides[0], eps=1e-5)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (w if weighted else 1)
    assert close(y, want)


@given(m=st.integers(0, 6), blocks=st.integers(1, 20))
def test_fused_quantisation_equals_its_parts(m: int, blocks: int) -> None:
    n = 32 * blocks
    x, w, y = normal(1, m, n), normal(2, n), np.zeros((m, n), np.float32)
    fused, parts = np.zeros((2, m, blocks * X_BLOCK), np.uint8)
    steps = {"xs": x.strides[0], "os": blocks * X_BLOCK}
    call("rms_norm_quantise", x=x, w=w, out=fused, m=m, n=n, eps=1e-6, **steps)
    call("rms_norm", x=x, w=w, y=y, m=m, n=n, xs=x.strides[0], ys=y.strides[0], eps=1e-6)
    call("quantise", x=y, out=parts, m=m, k=n, xs=y.strides[0], os=blocks * X_BLOCK)
    assert np.array_equal(fused, parts)
    two = {"as": x.strides[0], "bs": 0}
    for unit in UNITS:
        call(f"{unit}_quantise", a=x, b=w, out=fused, m=m, n=n, os=blocks * X_BLOCK, **two)
        call(unit, a=x, b=w, y=y, m=m, n=n, ys=y.strides[0], **two)
        call("quantise", x=y, out=parts, m=m, k=n, xs=y.strides[0], os=blocks * X_BLOCK)
        assert np.array_equal(fused, parts)


@pytest.mark.parametrize("variant", variants())
def test_every_variant_quantises_to_the_same_bits(variant: str, tmp_path: Path) -> None:
    jit, n = Jit(variants()[variant], tmp_path), 576
    x, w = normal(1, 5, n) * 4, normal(2, 5, n)
    x[3] = 0
    x[4, 40] = 1e30
    steps = {"xs": x.strides[0], "os": n // 32 * X_BLOCK}
    calls = {
        "quantise": {"x": x, "k": n, **steps},
        "rms_norm_quantise": {"x": x, "w": w, "n": n, "eps": 1e-6, **steps},
        "swiglu_quantise": {
            "a": x, "b": w, "n": n, "as": x.strides[0], "bs": w.strides[0], "os": steps["os"],
        },
    }  # fmt: skip
    for name, values in calls.items():
        mine, theirs = np.zeros((2, 5, n // 32 * X_BLOCK), np.uint8)
        call(name, out=mine, m=5, **values)
        call_with(jit, name, out=theirs, m=5, **values)
        assert mine.any() and np.array_equal(mine, theirs), name


@pytest.mark.parametrize("count", range(1, 10))
def test_blocks_have_their_bits_whatever_stands_beside_them(count: int) -> None:
    """Four blocks are quantised at once; what is no number spoils its own block alone."""
    x = normal(count, count, 32)
    for i, odd in enumerate((np.nan, np.inf, -np.inf, 1e38, 0.0)):
        x[i % count, (7 * i) % 32] = odd
    x[count // 2] = 0
    beside, alone = np.zeros((2, count, X_BLOCK), np.uint8)
    n = 32 * count
    call("quantise", x=x, out=beside, m=1, k=n, xs=4 * n, os=beside.nbytes)
    call("quantise", x=x, out=alone, m=count, k=32, xs=32 * 4, os=X_BLOCK)
    assert np.array_equal(beside, alone)
    scales = alone[:, 32:36].copy().view(np.float32)[:, 0]
    assert np.array_equal(np.isnan(scales), np.isnan(x).any(-1))
    whole = np.isfinite(x).all(-1)
    assert np.array_equal(scales[whole], np.abs(x[whole]).max(-1) * np.float32(1 / 127))
    codes = alone[:, :32].view(np.int8)
    assert (np.abs(codes[whole] * scales[whole, None] - x[whole]) <= scales[whole, None]).all()


@given(n=SIZES, seed=st.integers(0, 50))
def test_soft_max(n: int, seed: int) -> None:
    x, y = normal(seed, 4, n) * 5, np.zeros((4, n), np.float32)
    mask = np.where(np.random.default_rng(seed).random((4, n)) < 0.4, -np.inf, 0).astype(np.float32)
    mask[:3, 0], mask[3] = 0, -np.inf
    steps = {"xs": x.strides[0], "ms": mask.strides[0], "ys": y.strides[0]}
    call("soft_max", x=x, mask=mask, y=y, m=4, n=n, scale=0.5, **steps)
    logits = x[:3].astype(np.float64) * 0.5 + mask[:3]
    want = np.exp(logits - logits.max(-1, keepdims=True))
    assert close(y[:3], want / want.sum(-1, keepdims=True))
    assert (y[3] == 0).all(), "a row that shows nothing is zeros"
    x[1, n // 2] = np.nan
    call("soft_max", x=x, mask=0, y=y, m=4, n=n, scale=0.5, **steps)
    assert np.isnan(y[1]).all() and not np.isnan(y[[0, 2, 3]]).any()


@given(n=SIZES, seed=st.integers(0, 50), levels=st.sampled_from([2, 5, 1000]))
def test_argmax_takes_the_first_of_equals(n: int, seed: int, levels: int) -> None:
    x = np.random.default_rng(seed).integers(0, levels, (3, n)).astype(np.float32)
    y = np.full(3, -1, np.int32)
    call("argmax", x=x, y=y, m=3, n=n, xs=x.strides[0])
    assert np.array_equal(y, x.argmax(-1))


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("nr", [64, 40, 2])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_rope_into_cache_rows(kind: str, nr: int, halves: int) -> None:
    m, heads, hd = 4, 3, 64
    x = normal(5, m, heads, hd)
    pos = np.array([0, 5, 8191, 131071], np.int32)
    index = np.array([6, 0, 3, 2], np.int64)
    freqs, factors = np.zeros(hd), np.linspace(1, 8, hd).astype(np.float32)
    freqs[: nr // 2] = 1e5 ** (-np.arange(0, nr, 2) / nr)
    y = np.zeros((7, heads, hd), np.float32 if kind == "f32" else np.float16)
    call(
        "rope_" + kind, 3, x=x, y=y, pos=pos, index=index, freqs=freqs, factors=factors, m=m,
        heads=heads, hd=hd, nr=nr, halves=halves, xs=x.strides[0], xh=x.strides[1],
        ys=y.strides[0], yh=y.strides[1], limit=7, ib=8, mscale=1.5,
    )  # fmt: skip
    angle = (pos[:, None] * (freqs / factors)[: nr // 2])[:, None]
    cosine, sine = np.cos(angle) * 1.5, np.sin(angle) * 1.5
    want = x.astype(np.float64)
    first = slice(0, nr // 2) if halves else slice(0, nr, 2)
    second = slice(nr // 2, nr) if halves else slice(1, nr, 2)
    a, b = want[..., first].copy(), want[..., second].copy()
    want[..., first], want[..., second] = a * cosine - b * sine, a * sine + b * cosine
    assert close(y[index], want, 1e-6 if kind == "f32" else 1e-3)
    assert (y[[1, 4, 5]] == 0).all(), "rows that the index does not name stay"


@given(m=ROWS, n=SIZES, kind=st.sampled_from(["f32", "f16"]))
def test_set_rows(m: int, n: int, kind: str) -> None:
    x = normal(3, m, n)
    y = np.zeros((9, n), np.float32 if kind == "f32" else np.float16)
    index = np.random.default_rng(n).permutation(9)[:m].astype(np.int64)
    values = {"m": m, "n": n, "xs": 4 * n, "ys": y.strides[0], "limit": 9, "ib": 8}
    call("set_rows_" + kind, x=x, y=y, index=index, **values)
    want = np.zeros_like(y)
    want[index] = x.astype(y.dtype)
    assert np.array_equal(y, want)
    outside = np.where(index % 2, index + 9, -1 - index)
    call("set_rows_" + kind, x=-x, y=y, index=outside, **values)
    assert np.array_equal(y, want), "an index beyond the target writes nowhere"


@given(m=ROWS, blocks=st.integers(1, 9), seed=st.integers(0, 99))
def test_set_rows_in_blocks(m: int, blocks: int, seed: int) -> None:
    """Bit for bit what the file format's own quantisation gives; zeros and halves included, and
    what is infinite or no number."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(m, blocks * 32)) * 10.0 ** rng.integers(-6, 6, (m, 1))).astype("f4")
    x[rng.random(x.shape) < 0.1] = 0
    x[:1, :32] = 0 if seed % 2 else np.arange(32) * 4.0
    x[-1:, seed % 32] = (1, np.nan, np.inf)[seed % 3]
    y = np.zeros((9, blocks * 34), np.uint8)
    index = rng.permutation(9)[:m].astype(np.int64)
    call(
        "set_rows_q8_0", 3, x=x, y=y, index=index, m=m, n=blocks * 32, xs=x.strides[0],
        ys=y.strides[0], limit=9, ib=8,
    )  # fmt: skip
    want = np.zeros_like(y)
    with np.errstate(invalid="ignore"):
        want[index] = quantize(x, Q8_0)
    assert np.array_equal(y, want)


@pytest.mark.parametrize("kind", ("f32", "f16", "q8_0"))
@given(m=ROWS, n=SIZES)
def test_gather(kind: str, m: int, n: int) -> None:
    n = -(-n // 32) * 32 if kind == "q8_0" else n
    x, y = normal(3, 9, n), np.zeros((m, n), np.float32)
    held = quantize(x, Q8_0) if kind == "q8_0" else x.astype("f2" if kind == "f16" else "f4")
    ids = np.random.default_rng(n).integers(-2, 11, m).astype(np.int32)
    sizes = {"xs": held.strides[0], "ys": 4 * n, "limit": 9, "ib": 4}
    call("gather_" + kind, x=held, ids=ids, y=y, m=m, n=n, **sizes)
    known = (ids >= 0) & (ids < 9)
    meant = dequantize(held, Q8_0) if kind == "q8_0" else held.astype(np.float32)
    assert np.array_equal(y[known], meant[ids[known]])
    assert np.isnan(y[~known]).all()


@given(m=ROWS, n=SIZES)
def test_gather_integers(m: int, n: int) -> None:
    x, y = np.random.default_rng(n).integers(-99, 99, (9, n)), np.zeros((m, n), np.int32)
    held, ids = x.astype(np.int32), np.random.default_rng(m).integers(-2, 11, m).astype(np.int32)
    call("gather_i32", x=held, ids=ids, y=y, m=m, n=n, xs=4 * n, ys=4 * n, limit=9, ib=4)
    known = (ids >= 0) & (ids < 9)
    assert np.array_equal(y[known], held[ids[known]])
    assert (y[~known] == np.iinfo(np.int32).min).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 15, 16, 17, 33])
def test_every_element_is_made_however_rows_or_columns_are_shared(m: int, threads: int) -> None:
    """With few rows threads share columns, with many rows; a row has the bits that it has alone."""
    n, heads, hd = 96, 3, 32
    x, w, up = normal(1, m, n), normal(2, n), normal(3, m, n)
    pos, freqs = np.arange(m, dtype=np.int32), 1e4 ** (-np.arange(0, hd, 2) / hd)
    turned = {
        "pos": pos, "freqs": freqs, "index": 0, "factors": 0, "heads": heads, "hd": hd, "nr": hd,
        "halves": 0, "xs": n * 4, "xh": hd * 4, "ys": n * 4, "yh": hd * 4, "mscale": 1.0, "ib": 8,
    }  # fmt: skip
    blocks = {"n": n, "os": 3 * X_BLOCK}

    def made(first: int, count: int, threads: int) -> list[np.ndarray]:
        rows = slice(first, first + count)
        out = [np.full((count, 3 * X_BLOCK), 0xEE, np.uint8) for _ in range(3)]
        y = [np.full((count, n), np.nan, np.float32) for _ in range(2)]
        call("quantise", threads, x=x[rows], out=out[0], m=count, k=n, xs=n * 4, os=3 * X_BLOCK)
        call("rms_norm_quantise", threads, x=x[rows], w=w, out=out[1], m=count, xs=n * 4,
             eps=1e-6, **blocks)  # fmt: skip
        call("swiglu_quantise", threads, a=x[rows], b=up[rows], out=out[2], m=count,
             bs=n * 4, **{"as": n * 4}, **blocks)  # fmt: skip
        call("set_rows_f32", threads, x=x[rows], y=y[0], index=0, m=count, n=n, xs=n * 4,
             ys=n * 4, limit=count, ib=8)  # fmt: skip
        call("rope_f32", threads, x=x[rows], y=y[1], m=count, limit=count,
             **{**turned, "pos": pos[rows]})  # fmt: skip
        return [*out, *y]

    alone = [made(r, 1, 1) for r in range(m)]
    for i, together in enumerate(made(0, m, threads)):
        want = np.concatenate([a[i] for a in alone])
        assert np.array_equal(together, want), f"result {i} of {m} rows on {threads} threads"


@given(
    m=st.integers(1, 90), kind=st.sampled_from(["f32", "f16", "q8_0"]), seed=st.integers(0, 99),
    threads=st.integers(1, 4),
)  # fmt: skip
def test_of_two_rows_for_one_place_the_last_stays(
    m: int, kind: str, seed: int, threads: int
) -> None:
    """However many threads share the rows out, and whether or not the rows rotate on their way."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, 64)).astype(np.float32)
    index = rng.integers(0, rng.integers(1, 12), m)
    stored = quantize(x, Q8_0) if kind == "q8_0" else x.astype({"f32": "f4", "f16": "f2"}[kind])
    y = np.zeros((12, 68) if kind == "q8_0" else (12, 64), stored.dtype)
    shape = {"m": m, "n": 64, "xs": x.strides[0], "ys": y.strides[0], "limit": 12, "ib": 8}
    call("set_rows_" + kind, threads, x=x, y=y, index=index, **shape)
    want = np.zeros_like(y)
    for row, place in zip(stored, index, strict=True):
        want[place] = row
    assert np.array_equal(y, want)
    if kind == "q8_0":
        return
    turned, still = np.zeros_like(y), np.zeros(m, np.int32)
    call(
        "rope_" + kind, threads, x=x, y=turned, pos=still, index=index, freqs=np.ones(32),
        factors=0, m=m, heads=2, hd=32, nr=32, halves=1, xs=x.strides[0], xh=128, ys=y.strides[0],
        yh=y.strides[0] // 2, limit=12, ib=8, mscale=1.0,
    )  # fmt: skip
    assert np.array_equal(turned, want), "positions of 0 turn nothing"
