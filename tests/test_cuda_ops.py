"""Every op that has a CUDA rule, against the oracles.

On the stand-in the kernels are compiled as host C++ (see `cuda_host`), so arithmetic, index
calculations, argument packing and grids are the ones that a GPU would get. docs/cuda.md says what
this cannot show.
"""

import numpy as np
import pytest
from cuda_kit import assert_near, bytes_of, meaning, need_driver, run
from oracles import ORACLES

from ggraph import ops
from ggraph.backends.cuda import attention
from ggraph.backends.cuda.attention import frequencies
from ggraph.backends.cuda.lower import RULES, accepts
from ggraph.dtype import BF16, F16, F32, I32, I64, Q8_0, DType
from ggraph.errors import ShapeError
from ggraph.ops import examples
from ggraph.ops.rope import DEFAULTS, YARN, rope_angles
from ggraph.tensor import Array, Example, OpSpec, Tensor, apply, input, state

pytestmark = need_driver
CASES = [c for c in examples.every() if c[0].name in RULES]
NAMES = [f"{spec.name}-{i}" for spec, i, _ in CASES]
LEFT = {
    ("cast", 4), ("cast", 7), ("cpy", 2), ("mul_mat", 3), ("mul_mat_id", 3),
    ("mul_mat_gated", 6), ("mul_mat_gated", 7), ("mul_mats", 2), ("mul_mats", 3), ("mul_mats", 4),
    ("set", 1), ("set_rows", 4),
    ("soft_max", 3),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "i", "example"), CASES, ids=NAMES)
def test_kernels_agree_with_the_oracles(spec: OpSpec, i: int, example: Example) -> None:
    y = examples.build(spec, example)
    assert accepts(y) == ((spec.name, i) not in LEFT), "what goes to the CPU is known"
    if not accepts(y):
        return
    given = examples.feeds(spec, example, seed=i)
    exact = ORACLES[spec.name](*given.values(), **example.attrs)
    wanted = examples.rounded(exact.astype(np.float32) if y.dtype.is_float else exact, y)
    stored = {t.name: bytes_of(t, given[t.name]) for t in examples.leaves(spec, example)}
    assert_near(run(y, stored), wanted, example.tolerance, f"{spec.name} example {i}")


@pytest.mark.parametrize(("spec", "i", "example"), CASES, ids=NAMES)
def test_strided_sources_give_the_same(spec: OpSpec, i: int, example: Example) -> None:
    """Each source in turn is a view with exchanged axes; the rule may refuse, never be wrong."""
    leaves = examples.leaves(spec, example)
    given = examples.feeds(spec, example, seed=i)
    for slot, t in enumerate(leaves):
        if slot == spec.overwrites or len(t.shape) < 2 or t.dtype.is_block or not t.size:
            continue
        axes = (1, 0, *range(2, len(t.shape)))
        turned = input(t.name, [t.shape[a] for a in axes], t.dtype)
        sources = [*leaves]
        sources[slot] = ops.permute(turned, *axes)
        y = ops.cont(leaves[0]) if spec.name == "cpy" else _applied(spec, sources, example)
        if y is None or not accepts(y):
            continue
        stored = {s.name: bytes_of(s, given[s.name]) for s in leaves}
        stored[t.name] = bytes_of(turned, given[t.name].transpose(axes))
        assert_near(run(y, stored), meaning(y, stored), example.tolerance, f"{spec.name} {slot}")


def _applied(spec: OpSpec, sources: list[Tensor], example: Example) -> Tensor | None:
    try:
        return apply(spec.name, *sources, name="y", **example.attrs)
    except ShapeError as error:
        assert "not contiguous" in str(error) or "whole values" in str(error), error
        return None


def test_the_last_of_two_rows_for_one_place_stays() -> None:
    cache, rows = state("c", (4, 3)), input("r", (5, 3))
    y = ops.set_rows(cache, rows, input("i", (5,), I64), name="y")
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    index = np.array([2, 0, 2, 2, 4], np.int64)  # one beyond the end is written nowhere
    stored = {
        "c": bytes_of(cache, np.full((4, 3), -1, np.float32)),
        "r": values.reshape(-1).view(np.uint8), "i": index.view(np.uint8),
    }  # fmt: skip
    got = run(y, stored)
    assert np.array_equal(got, [values[1], [-1] * 3, values[3], [-1] * 3])


@pytest.mark.parametrize("n", [4, 64, 132, 1024, 4100])
def test_a_norm_s_bits_are_the_same_wherever_rows_begin(n: int) -> None:
    """Rows at multiples of 16 bytes have a kernel of their own; where they begin may hang on how
    many other rows there are."""
    values = np.random.default_rng(n).standard_normal((3, n + 8)).astype(np.float32)
    wide = input("x", (3, n + 8))
    found = []
    for first in (0, 1):
        y = ops.rms_norm(ops.columns(wide, first, n), eps=1e-5, name="y")
        moved = np.roll(values, first, -1)
        found.append(run(y, {"x": bytes_of(wide, moved)}))
    assert np.array_equal(*found)


@pytest.mark.parametrize("kind", [F32, F16, Q8_0], ids=str)
def test_rows_of_a_wider_table_go_to_their_places(kind: DType) -> None:
    cache, wide = state("c", (4, 2, 32), kind), input("r", (3, 192))
    rows = ops.columns(wide, 64, 64).reshape(3, 2, 32)
    y = ops.set_rows(cache, rows, input("i", (3,), I64), name="y")
    assert not rows.is_contiguous and accepts(y)
    values = np.random.default_rng(2).standard_normal((3, 192)).astype(np.float32)
    stored = {
        "c": bytes_of(cache, np.ones((4, 2, 32), np.float32)), "r": bytes_of(wide, values),
        "i": np.array([2, 0, 3], np.int64).view(np.uint8),
    }  # fmt: skip
    assert_near(run(y, stored), meaning(y, stored), 1e-6, f"{kind}")


def test_turned_rows_for_places_outside_the_cache_are_written_nowhere() -> None:
    cache, x = state("c", (4, 2, 8)), input("x", (3, 2, 8))
    given = {**DEFAULTS, "n_rot": 8, "has_factors": False}
    places = input("p", (3,), I32), input("i", (3,), I64)
    y = ops.rope_set_rows(cache, x, *places, **given, name="y")
    values = np.random.default_rng(6).standard_normal((3, 2, 8)).astype(np.float32)
    kept = np.full((4, 2, 8), 7, np.float32)
    stored = {
        "c": bytes_of(cache, kept), "x": bytes_of(x, values),
        "p": np.array([3, 5, 2], np.int32).view(np.uint8),
        "i": np.array([1, 4, -1], np.int64).view(np.uint8),
    }  # fmt: skip
    got = run(y, stored)
    assert np.array_equal(got[[0, 2, 3]], kept[1:]) and not np.array_equal(got[1], kept[1])


@pytest.mark.parametrize("kind", [F32, F16, Q8_0], ids=str)
@pytest.mark.parametrize(("heads", "kv", "dim", "context"), [(4, 2, 64, 200), (2, 1, 32, 65)])
def test_attention_with_a_tree_mask(
    kind: DType, heads: int, kv: int, dim: int, context: int
) -> None:
    rng = np.random.default_rng(0)
    rows = 6
    mask = np.where(rng.random((rows, context)) < 0.4, 0, -np.inf).astype(np.float32)
    mask[4] = -np.inf  # a row that sees nothing
    y, stored = _attention(rng, kind, rows, heads, kv, dim, context, mask)
    got = run(y, stored)
    assert_near(got, meaning(y, stored), 2e-5, f"{kind}")
    assert not got[4].any()


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_attention_of_many_rows(kind: DType, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles: causal, with a row that sees nothing, one that sees one place, and few others."""
    monkeypatch.setattr(attention, "FEW_ROWS", 32)
    rng = np.random.default_rng(dim)
    rows, context = 43, 71
    mask = np.where(np.arange(context) <= np.arange(rows)[:, None] + 20, 0, -np.inf)
    mask[40] = -np.inf
    mask[41] = np.where(np.arange(context) == 66, 0, -np.inf)
    mask[42] = np.where(rng.random(context) < 0.2, -1.5, -np.inf)
    y, stored = _attention(rng, kind, rows, 4, 2, dim, context, mask.astype(np.float32))
    got = run(y, stored)
    assert_near(got, meaning(y, stored), 2e-5, f"{kind}")
    assert not got[40].any()


def test_attention_of_many_rows_with_a_length_and_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FEW_ROWS", 32)
    rng = np.random.default_rng(7)
    q, k, v = input("q", (33, 3, 64)), input("k", (50, 1, 64), F16), input("v", (50, 1, 32), F16)
    y = ops.flash_attn(q, k, v, None, input("n", (1,), I32), scale=0.3, softcap=2.0, name="y")
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (q, k, v)}
    stored = {t.name: bytes_of(t, values[t.name]) for t in (q, k, v)}
    stored["k"][37 * 128 :] = 0xFF  # beyond the length: NaN
    stored["v"][37 * 64 :] = 0xFF
    stored["n"] = np.array([37], np.int32).view(np.uint8)
    kept = {n: b[: 37 * size] for n, b, size in (("k", stored["k"], 128), ("v", stored["v"], 64))}
    k, v = input("k", (37, 1, 64), F16), input("v", (37, 1, 32), F16)
    short = ops.flash_attn(q, k, v, scale=0.3, softcap=2.0, name="y")
    assert_near(run(y, stored), meaning(short, {**stored, **kept}), 2e-5, "length")


def test_attention_of_many_rows_with_sinks() -> None:
    """By tiles: one more score in each head's sum, also where a row sees nothing."""
    rng = np.random.default_rng(9)
    mask = np.where(np.arange(50) <= np.arange(40)[:, None], 0, -np.inf).astype(np.float32)
    mask[7] = -np.inf
    q, k, v = input("q", (40, 2, 32)), input("k", (50, 1, 32), F16), input("v", (50, 1, 32), F16)
    given = (input("m", mask.shape), None, input("s", (2,)))
    y = ops.flash_attn(q, k, v, *given, scale=0.3, name="y")
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (q, k, v)}
    stored = {t.name: bytes_of(t, values[t.name]) for t in (q, k, v)}
    stored["m"] = mask.reshape(-1).view(np.uint8)
    stored["s"] = np.array([3.0, -40.0], np.float32).view(np.uint8)
    got = run(y, stored)
    assert_near(got, meaning(y, stored), 2e-5, "sinks")
    assert not got[7].any()


# Heads, key-value heads, key and value sizes: groups of 1, 3, 20 and 6 share tiles of 16; rows of
# 40, 160 and 1024 bytes begin at multiples of 16 or of 8.
SHAPES = [
    (4, 4, 40, 40, BF16), (9, 3, 64, 32, F16), (20, 1, 32, 32, F16), (6, 1, 20, 20, F16),
    (6, 2, 80, 48, BF16), (2, 1, 512, 72, F16), (3, 1, 20, 7, F32), (4, 2, 96, 160, Q8_0),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv", "dim", "v_dim", "kind"), SHAPES)
def test_attention_of_a_tree_by_any_tile(
    heads: int, kv: int, dim: int, v_dim: int, kind: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that agree on a past across the end of a split, then see forks of a tree, one of them
    less; with a bias and a cap. Each row alone has the same bits, as have slices of rows."""
    rng = np.random.default_rng(dim)
    rows, past, context = 7, 135, 150
    mask = np.full((rows, context), -np.inf, np.float32)
    mask[:, :past] = rng.choice([0.0, -0.5], (rows, past))
    mask[:, past:][rng.random((rows, context - past)) < 0.5] = 0.25
    mask[5, 60:] = -np.inf
    y, stored = _attention(rng, kind, rows, heads, kv, dim, context, mask, v_dim, 3.0)
    whole = run(y, stored)
    assert_near(whole, meaning(y, stored), 2e-5, f"{kind}")
    for t in (0, 5, 6):
        one = {**stored, "q": stored["q"].reshape(rows, -1)[t].copy()}
        one["m"] = mask[t].copy().view(np.uint8)
        alone, _ = _attention(rng, kind, 1, heads, kv, dim, context, mask[t : t + 1], v_dim, 3.0)
        assert np.array_equal(run(alone, one)[0], whole[t]), f"row {t}"
    monkeypatch.setattr(attention, "PART_BYTES", heads * 2 * (2 + v_dim) * 4 * 3)
    assert np.array_equal(run(y, stored), whole)


@pytest.mark.parametrize("size", [1e-30, 1e-4, 3e4, 1e7])
def test_queries_of_any_size_meet_half_precision(size: float) -> None:
    """Larger than f16 holds, and smaller, beside others in their tile."""
    mask = np.zeros((3, 40), np.float32)
    rng = np.random.default_rng(5)
    y, stored = _attention(rng, F16, 3, 4, 2, 32, 40, mask)
    stored["q"].view(np.float32).reshape(3, 4, 32)[1] *= np.float32(size)
    assert_near(run(y, stored), meaning(y, stored), 2e-5, f"{size}")


def test_scores_far_below_zero_are_weighed_by_the_largest() -> None:
    """Not by zero, where all weights would be none."""
    mask = np.full((20, 40), -300, np.float32)
    y, stored = _attention(np.random.default_rng(8), F16, 20, 4, 2, 32, 40, mask)
    assert_near(run(y, stored), meaning(y, stored), 2e-5, "attention")


def test_what_one_text_sees_does_not_reach_its_neighbour() -> None:
    """Rows of two texts in a tile; the cache of one of them holds no numbers."""
    mask = np.full((2, 64), -np.inf, np.float32)
    mask[0, :32] = mask[1, 32:] = 0
    y, stored = _attention(np.random.default_rng(3), F16, 2, 4, 2, 32, 64, mask)
    whole = run(y, stored)
    for name in ("k", "v"):
        stored[name].reshape(64, -1)[32:] = 0xFF
    got = run(y, stored)
    assert np.array_equal(got[0], whole[0]) and np.isnan(got[1]).all()


def _attention(
    rng: np.random.Generator,
    kind: DType,
    rows: int,
    heads: int,
    kv: int,
    dim: int,
    context: int,
    mask: Array,
    v_dim: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, dict[str, Array]]:
    q = input("q", (rows, heads, dim))
    k, v = input("k", (context, kv, dim), kind), input("v", (context, kv, v_dim or dim), kind)
    given = {"scale": dim**-0.5, "softcap": softcap}
    y = ops.flash_attn(q, k, v, input("m", mask.shape), **given, name="y")
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in (q, k, v)}
    return y, {**{t.name: bytes_of(t, values[t.name]) for t in (q, k, v)},
               "m": mask.reshape(-1).view(np.uint8).copy()}  # fmt: skip


def test_attention_bits_depend_on_the_row_alone() -> None:
    """Neither other rows, as many as a tree of 64 nodes has, nor unused cache rows change a bit."""
    rows, context = 64, 300
    mask = np.full((rows, context), -np.inf, np.float32)
    for t in range(rows):
        mask[t, : 85 + t] = 0
    y, stored = _attention(np.random.default_rng(1), F16, rows, 4, 2, 64, context, mask)
    whole = run(y, stored)
    cut = {"k": 150 * 2 * 64 * 2, "v": 150 * 2 * 64 * 2}
    for t in (0, 1, 31, 32, 63):
        one = {n: b[: cut.get(n, len(b))] for n, b in stored.items()}
        one["q"] = stored["q"].reshape(rows, -1)[t].copy()
        one["m"] = mask[t, :150].copy().view(np.uint8)
        y1, _ = _attention(np.random.default_rng(1), F16, 1, 4, 2, 64, 150, mask[t : t + 1, :150])
        assert np.array_equal(run(y1, one)[0], whole[t]), f"row {t}"


def test_attention_bits_do_not_depend_on_where_it_lies() -> None:
    """The same keys and values among hidden rows of a longer cache, across the ends of splits."""
    rng = np.random.default_rng(2)
    rows, context, wide = 4, 130, 211
    mask = np.where(rng.random((rows, context)) < 0.8, 0, -np.inf).astype(np.float32)
    y, stored = _attention(rng, F16, rows, 4, 2, 64, context, mask)
    slots = np.sort(rng.choice(wide, context, replace=False))
    spread = np.full((rows, wide), -np.inf, np.float32)
    spread[:, slots] = mask
    z, other = _attention(rng, F16, rows, 4, 2, 64, wide, spread)
    other["q"] = stored["q"]
    for name in ("k", "v"):
        other[name] = other[name].reshape(wide, -1).copy()
        other[name][slots] = stored[name].reshape(context, -1)
        other[name] = other[name].reshape(-1)
    assert np.array_equal(run(z, other), run(y, stored))


@pytest.mark.parametrize("changes", [{}, {"freq_scale": 0.125}, YARN, {"freq_base": 1e6}])
def test_frequencies_are_those_of_the_tables(changes: dict[str, float]) -> None:
    attrs = {**DEFAULTS, "n_rot": 64, **changes}
    positions = np.array([0, 1, 77, 131071])
    freqs, magnitude = frequencies(attrs)
    cos, sin = rope_angles(positions, None, attrs)
    angles = positions[:, None] * freqs
    assert np.abs(np.cos(angles) * magnitude - cos).max() < 1e-9
    assert np.abs(np.sin(angles) * magnitude - sin).max() < 1e-9


@pytest.mark.parametrize("n", [4096, 4097, 6144, 9001])
def test_the_best_of_a_long_row_is_found_by_parts(n: int) -> None:
    """Ties across parts, NaN, nothing but NaN; the last value; rows that lie apart."""
    rng = np.random.default_rng(n)
    values = rng.integers(-9, 3, (5, n)).astype(np.float32)
    values[1, [7, n - 1]] = np.nan, 50
    values[2] = np.nan
    values[3] = -np.inf
    values[4, n - 2 :] = 50
    y = ops.argmax(input("x", (5, n)), name="y")
    stored = {"x": values.reshape(-1).view(np.uint8)}
    assert np.array_equal(run(y, stored), meaning(y, stored))
    apart = ops.argmax(ops.permute(input("x", (5, 1, n)), 1, 0, 2), name="y")
    assert np.array_equal(run(apart, stored), meaning(apart, stored))


def test_a_long_row_is_ordered_right() -> None:
    x = input("x", (2, 5000))
    values = np.random.default_rng(2).integers(0, 50, (2, 5000)).astype(np.float32)
    values[0, 17] = np.nan
    stored = {"x": values.reshape(-1).view(np.uint8)}
    for y in (ops.top_k(x, 9, name="y"), ops.top_k(x, 1000, name="y"), ops.argmax(x, name="y")):
        assert np.array_equal(run(y, stored), meaning(y, stored))  # the last part has 904 values
    assert not accepts(ops.argsort(x, name="y"))


def test_what_is_no_number_is_the_least() -> None:
    """Also where all else is below zero."""
    x = input("x", (2, 40))
    values = -np.random.default_rng(3).random((2, 40)).astype(np.float32)
    values[0, 7] = values[1, 0] = np.nan
    stored = {"x": values.reshape(-1).view(np.uint8)}
    for y in (ops.top_k(x, 39, name="y"), ops.argmax(x, name="y"), ops.argsort(x, name="y")):
        assert np.array_equal(run(y, stored), meaning(y, stored)), y.op


def test_chances_far_below_zero_and_of_nothing() -> None:
    """Without sinks the largest score is taken off whatever it is; all hidden gives zeros."""
    x, mask = input("x", (3, 33)), input("m", (3, 33))
    values = np.random.default_rng(4).standard_normal((3, 33)).astype(np.float32) - 300
    hidden = np.zeros((3, 33), np.float32)
    hidden[1] = -np.inf
    stored = {"x": values.reshape(-1).view(np.uint8), "m": hidden.reshape(-1).view(np.uint8)}
    y = ops.soft_max(x, mask, name="y")
    got = run(y, stored)
    assert_near(got, meaning(y, stored), 1e-5, "soft_max")
    assert not got[1].any() and np.abs(got[2].sum() - 1) < 1e-5


def test_rows_of_integers_that_do_not_exist_are_zeros() -> None:
    table = input("t", (3, 4), I32)
    values = np.arange(1, 13, dtype=np.int32)
    stored = {"t": values.view(np.uint8), "i": np.array([2, 3, -1], np.int32).view(np.uint8)}
    got = run(ops.get_rows(table, input("i", (3,), I32), name="y"), stored)
    assert np.array_equal(got, [values[8:], [0] * 4, [0] * 4])


def test_experts_that_do_not_exist_have_no_share() -> None:
    chances = input("c", (2, 3))
    y = ops.moe_shares(chances, input("i", (2, 2), I32), normalise=False, name="y")
    values = np.arange(1, 7, dtype=np.float32)
    ids = np.array([3, 1, -1, 2], np.int32)
    got = run(y, {"c": values.view(np.uint8), "i": ids.view(np.uint8)})
    assert np.array_equal(got, [[0, 2], [0, 6]])
    x, rows = input("x", (2, 2, 1)), input("r", (3, 1))
    z = ops.add_id(x, rows, input("i", (2, 2), I32), name="z")
    held = {"x": values[:4].view(np.uint8), "r": values[:3].view(np.uint8)}
    assert run(z, {**held, "i": ids.view(np.uint8)}).reshape(-1).tolist() == [1, 4, 3, 7]


def test_integers_keep_all_digits() -> None:
    x = input("x", (3,), I64)
    values = np.array([2**31 - 1, -(2**31), 16777217], np.int64)
    got = run(ops.cast(x, I32, name="y"), {"x": values.view(np.uint8)})
    assert np.array_equal(got, values)
