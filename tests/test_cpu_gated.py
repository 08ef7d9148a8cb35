"""The kernel of a gated unit of many rows: the bits of two products and a unit, one by one."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from cpu_calls import (
    Array,
    activations,
    call,
    call_with,
    makers,
    packed_weight,
    product,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_weights import raw_weight
from test_cpu_experts import EXPERTS, chosen, one_behind_another

from ggraph.backends.cpu.codegen.isa import host
from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.kernels import amx, gated, opened
from ggraph.backends.cpu.kernels.elementwise import UNITS
from ggraph.backends.cpu.kernels.tiles import (
    LAYOUTS,
    Layout,
    activation_bytes,
    layout_of,
    packed_bytes,
)
from ggraph.dtype import Q4_K, Q5_0, Q6_K, Q8_0, DType
from ggraph.ops.fused import FEW_ROWS

BLOCKS = [d for d, layout in LAYOUTS.items() if isinstance(layout, Layout)]
SPARE = 64  # bytes behind the result


class Case:
    """Two matrices and some rows of x; what the kernels of products and units make of them."""

    def __init__(self, dtype: DType, m: int, n: int, k: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.sizes = dtype, {"n": n, "k": k, "m": m}
        self.w, self.v = (
            packed_weight(dtype, raw_weight(dtype, n, k, seed + i), n, k) for i in (0, 1)
        )
        self.x, _ = activations(dtype, rng.normal(size=(m, k)).astype(np.float32))
        self.row = activation_bytes(n)

    def words(self) -> tuple[dict[str, object], Array]:
        """What the kernel is called with, and the bytes that it writes."""
        out = np.full(self.sizes["m"] * self.row + SPARE, 0xAA, np.uint8)
        steps = {"xs": self.x.strides[0], "os": self.row}
        return {"w": self.w, "v": self.v, "x": self.x, "out": out, **self.sizes, **steps}, out

    def expected(self, unit: str) -> Array:
        """One by one."""
        m, n, k = (self.sizes[s] for s in "mnk")
        a, b = (product(self.dtype, w, self.x, n, k, 1) for w in (self.w, self.v))
        out = np.full(m * self.row + SPARE, 0xAA, np.uint8)
        steps = {"as": n * 4, "bs": n * 4, "os": self.row}
        call(f"{unit}_quantise", 1, a=a, b=b, out=out, m=m, n=n, **steps)
        return out


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
@given(
    m=st.sampled_from([12, 65, opened.GROUP_ROWS + 3, amx.MOST + 17]),
    pairs=st.sampled_from([1, 3, 9, 30]),
    blocks=st.sampled_from([1, 3]),
    threads=st.integers(1, 3),
    unit=st.sampled_from(list(UNITS)),
    seed=st.integers(0, 9),
)
def test_bits_are_those_of_products_and_a_unit(
    dtype: DType, m: int, pairs: int, blocks: int, threads: int, unit: str, seed: int
) -> None:
    case = Case(dtype, m, 32 * pairs, blocks * max(dtype.block, 32), seed)
    words, out = case.words()
    call(gated.kernel_name("gated_", unit, layout_of(dtype)), threads, **words)
    assert np.array_equal(out, case.expected(unit))


@cache
def jit(variant: str) -> Jit:
    return Jit(makers()[variant], Path(mkdtemp()))


@pytest.mark.parametrize("dtype", [Q4_K, Q5_0, Q6_K, Q8_0], ids=str)
@pytest.mark.parametrize("variant", sorted(makers()))
@pytest.mark.parametrize("unit", UNITS)
def test_every_processor_has_these_bits(unit: str, variant: str, dtype: DType) -> None:
    case = Case(dtype, opened.GROUP_ROWS + 17, 160, 256, 4)
    words, out = case.words()
    call_with(jit(variant), gated.kernel_name("gated_", unit, layout_of(dtype)), **words)
    assert np.array_equal(out, case.expected(unit))


class Experts:
    """Experts' gates and ups, and rows that have some of them; what the kernels make of them."""

    def __init__(self, dtype: DType, ids: Array, n: int, k: int, seed: int, own: bool) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.ids, self.n, self.k, self.own = dtype, ids, n, k, own
        self.gates, self.ups = (
            [
                packed_weight(dtype, raw_weight(dtype, n, k, 2 * e + i + seed), n, k)
                for e in range(EXPERTS)
            ]
            for i in (0, 1)
        )
        rows = ids.size if own else len(ids)
        self.x, _ = activations(dtype, rng.normal(size=(rows, k)).astype(np.float32))

    def words(self) -> tuple[dict[str, object], Array]:
        used, row, n = self.ids.shape[1], self.x.strides[0], self.n
        out = np.full(self.ids.size * activation_bytes(n) + SPARE, 0xAA, np.uint8)
        w, v = (one_behind_another(self.dtype, e, n, self.k) for e in (self.gates, self.ups))
        steps = {"xs": row * (used if self.own else 1), "xu": row if self.own else 0}
        sizes = {"n": n, "k": self.k, "m": self.ids.size, "u": used, "experts": EXPERTS}
        bytes_ = {"es": packed_bytes(self.dtype, n, self.k), "os": activation_bytes(n)}
        return {"w": w, "v": v, "x": self.x, "out": out, "ids": self.ids, **sizes, **steps,
                **bytes_}, out  # fmt: skip

    def expected(self, unit: str) -> Array:
        """One by one."""
        m, n = self.ids.size, self.n
        a, b = (
            chosen(self.dtype, e, self.x, self.ids, n, self.k, 1, own=self.own)
            for e in (self.gates, self.ups)
        )
        out = np.full(m * activation_bytes(n) + SPARE, 0xAA, np.uint8)
        steps = {"as": n * 4, "bs": n * 4, "os": activation_bytes(n)}
        call(f"{unit}_quantise", 1, a=a, b=b, out=out, m=m, n=n, **steps)
        return out


def some_ids(tokens: int, used: int, seed: int) -> Array:
    """Experts of each token, as many pairs of one as of all others; some beyond those there are."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS + 1, (tokens, used))
    return np.where(rng.random(ids.shape) < 0.5, 1, ids).astype(np.int32)


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
@settings(max_examples=10)  # of each type, of which there are two dozen
@given(
    tokens=st.sampled_from([1, 5, 40, opened.GROUP_ROWS + 30, amx.MOST + 60]),
    used=st.integers(1, 3),
    pairs=st.sampled_from([1, 3, 13]),
    own=st.booleans(),
    threads=st.integers(1, 3),
    unit=st.sampled_from(list(UNITS)),
    seed=st.integers(0, 9),
)
def test_experts_units_have_the_bits_of_products_and_a_unit(
    dtype: DType, tokens: int, used: int, pairs: int, own: bool, threads: int, unit: str, seed: int
) -> None:
    k = 2 * max(dtype.block, 32)
    case = Experts(dtype, some_ids(tokens, used, seed), 32 * pairs, k, seed, own)
    words, out = case.words()
    call(gated.kernel_name("gated_id_", unit, layout_of(dtype)), threads, **words)
    assert np.array_equal(out, case.expected(unit))


@pytest.mark.parametrize("dtype", [Q4_K, Q8_0], ids=str)
@pytest.mark.parametrize("variant", sorted(makers()))
@pytest.mark.parametrize("unit", UNITS)
def test_every_processor_has_the_bits_of_experts_units(
    unit: str, variant: str, dtype: DType
) -> None:
    case = Experts(dtype, some_ids(70, 2, 3), 160, 256, 4, own=False)
    words, out = case.words()
    call_with(jit(variant), gated.kernel_name("gated_id_", unit, layout_of(dtype)), **words)
    assert np.array_equal(out, case.expected(unit))


def test_many_rows_are_gated_at_once_where_that_is_faster() -> None:
    """Matrices of two types are not, nor few rows, nor where rows meet tiles a few at a time."""
    a, b = layout_of(Q4_K), layout_of(Q6_K)
    isa = host()
    fast = amx.takes(isa, a) or opened.opens(isa, a)
    assert gated.at_once(isa, a, a, FEW_ROWS + 1) == fast
    assert not gated.at_once(isa, a, b, FEW_ROWS + 1) and not gated.at_once(isa, a, a, 5)
    wide = [v for v in makers().values() if v.lanes > 8 and not v.tiles]
    assert wide or isa.lanes == 8
    for v in wide:
        for rows, many in ((31, False), (32, True), (512, True)):
            assert gated.at_once(v, a, a, rows) == (many and not v.cpu.startswith("znver"))
