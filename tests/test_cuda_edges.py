"""What a mutation run over the CUDA kernels asked for: rows of several warps, lists of slots, many
experts, numbers at the edge (scripts/mutate_kernels.py)."""

import numpy as np
import pytest
from cuda_kit import assert_near, bytes_of, meaning, need_driver, run

from ggraph import ops
from ggraph.backends.cuda import attention
from ggraph.backends.cuda.lower import accepts
from ggraph.dtype import BF16, F16, F32, I32, Q8_0, DType
from ggraph.tensor import Array, Tensor, input, weight

pytestmark = need_driver
LONG = {
    "rms_norm": lambda x: ops.rms_norm(x, 1e-5),
    "norm": lambda x: ops.norm(x, 1e-5),
    "l2_norm": lambda x: ops.l2_norm(x, 1e-5),
    "sum_rows": ops.sum_rows,
    "cumsum": ops.cumsum,
    "soft_max": ops.soft_max,
    "top_k": lambda x: ops.top_k(x, 5),
}


@pytest.mark.parametrize("n", [128, 129, 1031, 4100, 8200])
@pytest.mark.parametrize("name", LONG)
def test_rows_of_many_warps(name: str, n: int) -> None:
    """Sums and greatest values go from warp to warp through shared memory. Of 128 the last thread,
    too, has an element: who comes to a barrier last goes on at once on the stand-in."""
    x = input("x", (3, n))
    values = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32) + 1
    stored = {"x": bytes_of(x, values)}
    y = LONG[name](x).named("y")
    assert accepts(y)
    assert_near(run(y, stored), meaning(y, stored), 1e-5, f"{name} of {n}")


def test_the_greatest_of_a_row_may_be_any_warps() -> None:
    """Taken off each number before exp, which else has no end."""
    values = np.zeros((3, 1031), np.float32)
    values[range(3), [40, 100, 700]] = 200
    x = input("x", values.shape)
    y = ops.soft_max(x, name="y")
    stored = {"x": bytes_of(x, values)}
    assert_near(run(y, stored), meaning(y, stored), 1e-5, "soft_max")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_row_ends_where_the_next_begins(dtype: DType) -> None:
    """What lies behind a row is multiplied by nothing, not by zero."""
    w, x = weight("w", (5, 12), dtype), input("x", (1, 12))
    values = np.ones((5, 12), np.float32)
    values[1:, 0] = np.inf
    stored = {"w": bytes_of(w, values), "x": bytes_of(x, np.ones((1, 12), np.float32))}
    found = run(ops.mul_mat(w, x, name="y"), stored)
    assert found.tolist() == [[12, *[np.inf] * 4]]


def test_parts_that_many_blocks_give() -> None:
    """`run` compares what a launch offers beside its value."""
    stored = {
        name: bytes_of(input(name, (3, 348)), rng.standard_normal((3, 348)).astype(np.float32))
        for name, rng in (("x", np.random.default_rng(1)), ("z", np.random.default_rng(2)))
    }
    y = ops.swiglu(input("x", (3, 348)), input("z", (3, 348)), name="y")
    assert_near(run(y, stored), meaning(y, stored), 1e-5, "swiglu")


def test_numbers_that_are_none_stay_so_in_bf16() -> None:
    """Also where all that says so is in the bits that bf16 has not."""
    x = input("x", (4,))
    bits = np.array([0x7F800001, 0xFF800001, 0x7F800000, 0x3F800001], np.uint32)
    got = run(ops.cast(x, BF16, name="y"), {"x": bits.view(np.uint8)})
    assert np.isnan(got[:2]).all() and np.isinf(got[2]) and got[3] == 1.0


def test_as_many_experts_as_there_may_be() -> None:
    experts, n, k = 1024, 3, 32
    rng = np.random.default_rng(0)
    w = rng.standard_normal((experts, n, k)).astype(np.float16)
    x = rng.standard_normal((3, 1, k)).astype(np.float32)
    ids = np.array([[1023, 255], [511, 0], [256, 1023]], np.int32)
    stored = {"w": w.reshape(-1).view(np.uint8), "x": x.reshape(-1).view(np.uint8),
              "i": ids.reshape(-1).view(np.uint8)}  # fmt: skip
    y = ops.mul_mat_id(weight("w", w.shape, F16), input("x", x.shape), input("i", ids.shape, I32),
                       name="y")  # fmt: skip
    wanted = np.einsum("tk,tunk->tun", x[:, 0], w[ids].astype(np.float32))
    assert_near(run(y, stored), wanted, 1e-4, "1024 experts")


def test_more_pairs_than_a_grid_has_blocks() -> None:
    """Where pairs are grouped a launch has a block per group; else one per pair."""
    pairs, k = 65536 + 3, 32
    x, ids = input("x", (pairs, 1, k)), input("i", (pairs, 1), I32)
    assert not accepts(ops.mul_mat_id(weight("w", (2, 3, k)), x, ids))
    rng = np.random.default_rng(3)
    chosen = rng.integers(0, 2, (pairs, 1), np.int32)
    w = rng.standard_normal((2, 1, k)).astype(np.float16)
    rows = rng.standard_normal((pairs, 1, k)).astype(np.float32)
    stored = {"w": w.reshape(-1).view(np.uint8), "x": rows.reshape(-1).view(np.uint8),
              "i": chosen.reshape(-1).view(np.uint8)}  # fmt: skip
    y = ops.mul_mat_id(weight("w", w.shape, F16), x, ids, name="y")
    wanted = np.einsum("tuk,tunk->tun", rows, w[chosen].astype(np.float32))
    assert_near(run(y, stored), wanted, 1e-5, "many pairs")


def test_many_outputs_of_experts_without_tensor_cores() -> None:
    """Columns that are no multiple of 32, and more outputs than one block has."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((2, 21, 40)).astype(np.float32)
    x = rng.standard_normal((2, 1, 40)).astype(np.float32)
    ids = np.array([[1], [0]], np.int32)
    stored = {"w": w.reshape(-1).view(np.uint8), "x": x.reshape(-1).view(np.uint8),
              "i": ids.reshape(-1).view(np.uint8)}  # fmt: skip
    y = ops.mul_mat_id(weight("w", w.shape), input("x", x.shape), input("i", ids.shape, I32),
                       name="y")  # fmt: skip
    wanted = np.einsum("tk,tunk->tun", x[:, 0], w[ids])
    assert_near(run(y, stored), wanted, 1e-5, "21 outputs")


def test_a_bias_of_an_expert_that_is_just_behind_the_end() -> None:
    """Its rows would lie behind the buffer's end."""
    experts, n = 4, 8
    x = np.ones((1, 2, n), np.float32)
    rows = np.ones((experts, n), np.float32)
    ids = np.array([[experts, 1]], np.int32)
    stored = {"x": x.reshape(-1).view(np.uint8), "r": rows.reshape(-1).view(np.uint8),
              "i": ids.reshape(-1).view(np.uint8)}  # fmt: skip
    z = ops.add_id(input("x", x.shape), input("r", rows.shape), input("i", ids.shape, I32),
                   name="z")  # fmt: skip
    assert run(z, stored)[0].tolist() == [[1.0] * n, [2.0] * n]


def attended(
    rows: int, mask: Array, kind: DType = F16, length: int | None = None, seed: int = 0
) -> tuple[Tensor, dict[str, Array]]:
    """Attention of 4 heads of 64 over 200 cache rows of 2; the mask may be lists."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        input("q", (rows, 4, 64)),
        input("k", (200, 2, 64), kind),
        input("v", (200, 2, 64), kind),
    )
    stored = {t.name: bytes_of(t, rng.standard_normal(t.shape).astype(np.float32))
              for t in (q, k, v)}  # fmt: skip
    m = input("m", mask.shape, I32) if mask.dtype == np.int32 else input("m", mask.shape)
    stored["m"] = mask.reshape(-1).view(np.uint8).copy()
    given = []
    if length is not None:
        given = [input("n", (1,), I32)]
        stored["n"] = np.array([length], np.int32).view(np.uint8)
    return ops.flash_attn(q, k, v, m, *given, scale=0.125, name="y"), stored


@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("length", [None, 150])
def test_lists_of_slots_are_what_a_mask_shows(rows: int, length: int | None) -> None:
    """The same bits as by a mask that shows the same, for few rows and for more than a tree has;
    entries behind a list's end, and slots behind the length, are not looked at."""
    rng = np.random.default_rng(rows)
    lists = np.full((rows, 190), -1, np.int32)
    mask = np.full((rows, 200), -np.inf, np.float32)
    for own, shown in zip(lists, mask, strict=True):
        slots = np.sort(rng.choice(200, rng.integers(1, 180), replace=False))
        own[: len(slots)] = slots
        own[len(slots) + 1 :] = 3  # behind the end
        shown[slots] = 0
    y, stored = attended(rows, lists, length=length)
    assert accepts(y)
    got = run(y, stored)
    assert_near(got, meaning(y, stored), 2e-3, "lists")
    if rows <= attention.FEW_ROWS:
        z, other = attended(rows, mask, length=length)
        assert got.tobytes() == run(z, other).tobytes()


@pytest.mark.parametrize("width", [1, 5, 128, 129, 300])
def test_a_list_ends_at_its_first_number_below_0(width: int) -> None:
    """Whichever thread has it, though slots and other ends stand behind it."""
    ends = sorted({0, 1, 2, 3, width // 2, width - 2, width - 1, width} & {*range(width + 1)})
    lists = np.random.default_rng(width).integers(0, 200, (len(ends), width), np.int32)
    for own, end in zip(lists, ends, strict=True):
        own[end::3] = -1 - own[end::3]
    y, stored = attended(len(ends), lists)
    assert_near(run(y, stored), meaning(y, stored), 2e-3, "lists")
    for own, end in zip(lists, ends, strict=True):
        own[end:] = -1
    alone = dict(stored, m=lists.reshape(-1).view(np.uint8))
    assert run(y, stored).tobytes() == run(y, alone).tobytes()


def test_lists_may_name_a_slot_twice_and_be_longer_than_the_cache() -> None:
    lists = np.full((2, 300), -1, np.int32)
    lists[0, :260] = np.arange(260) % 200
    lists[1, :3] = 7, 199, 7
    y, stored = attended(2, lists)
    assert_near(run(y, stored), meaning(y, stored), 2e-3, "twice")


def test_the_order_of_a_list_and_not_the_slots_decide_the_bits() -> None:
    """What a text of a batch sees may lie anywhere in the cache."""
    lists = np.arange(150, dtype=np.int32)[None]
    y, stored = attended(1, lists)
    place = np.random.default_rng(5).permutation(200)
    other = dict(stored, m=place[:150].astype(np.int32).view(np.uint8))
    for name in ("k", "v"):
        moved = np.empty((200, len(stored[name]) // 200), np.uint8)
        moved[place] = stored[name].reshape(200, -1)
        other[name] = moved.reshape(-1)
    assert run(y, stored).tobytes() == run(y, other).tobytes()


@pytest.mark.parametrize(
    ("heads", "kv", "kind", "mask_kind"),
    [(4, 4, F16, F32), (5, 1, BF16, F16), (6, 2, F16, BF16), (8, 1, Q8_0, F32), (3, 1, F32, F16)],
)
def test_many_rows_that_see_windows(
    heads: int, kv: int, kind: DType, mask_kind: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps of a block that belong to other rows, rows that see steps far apart, with hidden ones
    between, before and behind; a bias in one of them."""
    monkeypatch.setattr(attention, "FEW_ROWS", 32)
    rng = np.random.default_rng(heads)
    rows, context, dim = 70, 500, 64
    q, m = input("q", (rows, heads, dim)), input("m", (rows, context), mask_kind)
    k, v = (input(n, (context, kv, dim), kind) for n in "kv")
    behind = np.arange(rows)[:, None] * 6 + 60 - np.arange(context)
    mask = np.where((behind >= 0) & (behind < 50), 0, -np.inf)
    mask[20, 470] = mask[69, 3] = mask[69, 150] = 0.5
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (q, k, v)}
    stored = {t.name: bytes_of(t, values[t.name]) for t in (q, k, v)}
    stored["m"] = bytes_of(m, mask.astype(np.float32))
    y = ops.flash_attn(q, k, v, m, scale=0.125, name="y")
    assert accepts(y)
    assert_near(run(y, stored), meaning(y, stored), 2e-5, "windows")


@pytest.mark.parametrize("kind", [F16, F32])
def test_many_rows_of_a_cache_that_lies_at_odd_places(
    kind: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no sixteen bytes may be read at once; with the mask as a view of a wider one."""
    monkeypatch.setattr(attention, "FEW_ROWS", 32)
    rng = np.random.default_rng(3)
    rows, context, dim = 40, 70, 32
    q, m = input("q", (rows, 2, dim)), input("m", (rows, context + 3))
    k, v = (input(n, (context, 2, dim + 1), kind) for n in "kv")
    leaves = (q, k, v, m)
    stored = {t.name: bytes_of(t, rng.standard_normal(t.shape).astype(np.float32)) for t in leaves}
    keys, values = (t[:, :, 1:] for t in (k, v))
    y = ops.flash_attn(q, keys, values, m[:, 3:], scale=0.2, name="y")
    assert accepts(y)
    assert_near(run(y, stored), meaning(y, stored), 2e-5, "odd places")


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("kind", [F16, BF16])
def test_rows_without_gaps_become_half_as_long(kind: DType, first: int) -> None:
    """Four at a time, wherever they begin and end; numbers beyond f16 become infinite."""
    x = input("x", (4107,))
    values = np.random.default_rng(first).standard_normal(4107).astype(np.float32)
    values[[5, 4106]] = 1e6, -np.inf
    got = run(ops.cast(x[first:], kind, name="y"), {"x": bytes_of(x, values)})
    wanted = bytes_of(input("y", got.shape, kind), values[first:])
    assert np.array_equal(bytes_of(input("y", got.shape, kind), got), wanted)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 4), (3, 0), (1, 1)])
def test_pairs_without_gaps_begin_and_end_anywhere(first: int, second: int) -> None:
    x, z = (input(name, (1030,)) for name in "xz")
    rng = np.random.default_rng(first)
    stored = {t.name: bytes_of(t, rng.standard_normal(1030).astype(np.float32)) for t in (x, z)}
    y = ops.mul(x[first : first + 1025], z[second : second + 1025], name="y")
    assert run(y, stored).tobytes() == meaning(y, stored).tobytes()


def test_many_rows_whose_scores_are_far_below_zero() -> None:
    """In two blocks; a maximum that began at zero would lose all weights."""
    rows, context = 70, 40
    q, k, v = (input(n, (rows if n == "q" else context, 2, 32)) for n in "qkv")
    m = input("m", (rows, context))
    rng = np.random.default_rng(0)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (k, v)}
    values["q"] = np.ones((rows, 2, 32), np.float32)
    values["k"] = values["k"] * 0.01 - 10
    values["m"] = np.zeros((rows, context), np.float32)
    y = ops.flash_attn(q, k, v, m, scale=1.0, name="y")
    stored = {t.name: bytes_of(t, values[t.name]) for t in (q, k, v, m)}
    assert_near(run(y, stored), meaning(y, stored), 1e-2, "far below zero")


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_query_of_zeros_mixes_all_that_it_sees(rows: int) -> None:
    """A score of zero is one as any other: it weighs, and so does a split of the cache whose
    greatest it is."""
    y, stored = attended(rows, np.zeros((rows, 200), np.float32))
    stored["q"][:] = 0
    assert_near(run(y, stored), meaning(y, stored), 1e-3, "a query of zeros")


def test_a_sink_of_zero_takes_part() -> None:
    rows, context = 70, 33
    q, k, v = (input(n, (rows if n == "q" else context, 2, 32)) for n in "qkv")
    m, s = input("m", (rows, context)), input("s", (2,))
    rng = np.random.default_rng(0)
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) * 0.1 for t in (q, k, v)}
    values |= {"m": np.zeros((rows, context), np.float32), "s": np.array([0, -np.inf], np.float32)}
    y = ops.flash_attn(q, k, v, m, None, s, scale=0.2, name="y")
    stored = {t.name: bytes_of(t, values[t.name]) for t in (q, k, v, m, s)}
    assert_near(run(y, stored), meaning(y, stored), 1e-3, "sinks")
