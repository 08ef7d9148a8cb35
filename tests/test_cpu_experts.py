"""Products with chosen experts: the bits of each expert's own product."""

import numpy as np
import pytest
from cpu_calls import Array, activations, call, packed_weight, product
from hypothesis import given
from hypothesis import strategies as st
from stored_weights import raw_weight

from ggraph.backends.cpu.kernels import amx
from ggraph.backends.cpu.kernels.matmul_id import BUCKETS
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, TILE, layout_of, packed_bytes
from ggraph.dtype import Q4_K, DType

EXPERTS = 4


def one_behind_another(dtype: DType, each: list[Array], n: int, k: int) -> Array:
    """Experts' tiles as kernels find them, and what they may ask for ahead."""
    size = packed_bytes(dtype, n, k)
    return np.concatenate([*(t[:size] for t in each), np.zeros(1 << 14, np.uint8)])


def chosen(
    dtype: DType, each: list[Array], x: Array, ids: Array, n: int, k: int, threads: int,
    *, own: bool = False,
) -> Array:  # fmt: skip
    """The products [tokens, used, n] of the experts that ids [tokens, used] choose; `own`: every
    expert of a token has a row of x of its own; else they share one."""
    size, used, row = packed_bytes(dtype, n, k), ids.shape[1], x.strides[0]
    tiles = one_behind_another(dtype, each, n, k)
    y = np.full((*ids.shape, n), 7.0, np.float32)
    call(
        "matmul_id_" + layout_of(dtype).name, threads, w=tiles, x=x, y=y, ids=ids, n=n, k=k,
        m=ids.size, u=used, xs=row * (used if own else 1), xu=row if own else 0, ys=n * 4,
        es=size, experts=len(each),
    )  # fmt: skip
    return y


@pytest.mark.parametrize("dtype", list(LAYOUTS), ids=str)
@given(
    n=st.sampled_from([1, 16, 35]),
    tokens=st.sampled_from([0, 1, 2, 5, 40, 1370]),  # beyond what is put in order at once, too
    used=st.integers(1, 3),
    own=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_each_pair_gets_its_experts_product(
    dtype: DType, n: int, tokens: int, used: int, own: bool, threads: int, seed: int
) -> None:
    k = 2 * max(dtype.block, 32)
    rng = np.random.default_rng(seed)
    raws = [raw_weight(dtype, n, k, seed + e) for e in range(EXPERTS)]
    each = [packed_weight(dtype, raw, n, k) for raw in raws]
    per_token = used if own else 1
    x, _ = activations(dtype, rng.normal(size=(tokens * per_token, k)).astype(np.float32))
    ids = rng.integers(-1, EXPERTS + 1, (tokens, used)).astype(np.int32)
    y = chosen(dtype, each, x, ids, n, k, threads, own=own)
    token, slot = np.indices((tokens, used))
    rows = x[token * per_token + (slot if own else 0)]
    unknown = (ids < 0) | (ids >= EXPERTS)
    assert np.isnan(y[unknown]).all(), "an expert that does not exist must be visible"
    for expert in range(EXPERTS):
        mine = ids == expert
        want = product(dtype, each[expert], np.ascontiguousarray(rows[mine]), n, k, 1)
        assert np.array_equal(y[mine], want)


@pytest.mark.parametrize("threads", [1, 3])
def test_experts_are_more_than_are_counted_at_once(threads: int) -> None:
    """Pairs of each of them, of the first and last ones many, and of none."""
    dtype, n, k, experts = Q4_K, 70, 256, 2 * BUCKETS + 3
    rng = np.random.default_rng(threads)
    each = [packed_weight(dtype, raw_weight(dtype, n, k, e), n, k) for e in range(experts)]
    wanted = [*range(experts), *[0] * 30, *[BUCKETS] * 13, *[experts - 1] * 12, -1, experts, 2**30]
    ids = rng.permutation(wanted).astype(np.int32)
    x, _ = activations(dtype, rng.normal(size=(ids.size, k)).astype(np.float32))
    y = chosen(dtype, each, x, ids[:, None], n, k, threads)[:, 0]
    for expert in range(experts):
        mine = ids == expert
        rows = np.ascontiguousarray(x[mine])
        assert np.array_equal(y[mine], product(dtype, each[expert], rows, n, k, 1))
    assert np.isnan(y[(ids < 0) | (ids >= experts)]).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_experts_outputs_are_more_than_a_piece(threads: int) -> None:
    """With AMX a piece is many tiles: those of the next one begin behind them, for all pairs."""
    dtype, n, k, pairs = Q4_K, amx.TILES * TILE + 21, 256, 2 * amx.HEIGHT + 5
    rng = np.random.default_rng(threads)
    each = [packed_weight(dtype, raw_weight(dtype, n, k, e), n, k) for e in range(2)]
    x, _ = activations(dtype, rng.normal(size=(2 * pairs, k)).astype(np.float32))
    ids = rng.permutation([0, 1] * pairs).astype(np.int32)
    y = chosen(dtype, each, x, ids[:, None], n, k, threads)[:, 0]
    for expert in range(2):
        rows = np.ascontiguousarray(x[ids == expert])
        assert np.array_equal(y[ids == expert], product(dtype, each[expert], rows, n, k, 1))
