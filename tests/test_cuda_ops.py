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
    ("cast", 4), ("cast", 7), ("cpy", 2), ("mul_mat", 3), ("set", 1), ("set_rows", 4),
    ("soft_max", 3), ("flash_attn", 7), ("flash_attn", 8),  # these by lists of slots
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
    index = np.array([2, 0, 2, 2, 9], np.int64)  # one beyond the end is written nowhere
    stored = {
        "c": bytes_of(cache, np.full((4, 3), -1, np.float32)),
        "r": values.reshape(-1).view(np.uint8), "i": index.view(np.uint8),
    }  # fmt: skip
    got = run(y, stored)
    assert np.array_equal(got, [values[1], [-1] * 3, values[3], [-1] * 3])


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


def _attention(
    rng: np.random.Generator,
    kind: DType,
    rows: int,
    heads: int,
    kv: int,
    dim: int,
    context: int,
    mask: Array,
) -> tuple[Tensor, dict[str, Array]]:
    q = input("q", (rows, heads, dim))
    k, v = input("k", (context, kv, dim), kind), input("v", (context, kv, dim), kind)
    y = ops.flash_attn(q, k, v, input("m", mask.shape), scale=dim**-0.5, name="y")
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


def test_a_long_row_is_ordered_right() -> None:
    x = input("x", (2, 5000))
    values = np.random.default_rng(2).integers(0, 50, (2, 5000)).astype(np.float32)
    values[0, 17] = np.nan
    stored = {"x": values.reshape(-1).view(np.uint8)}
    for y in (ops.top_k(x, 9, name="y"), ops.argmax(x, name="y")):
        assert np.array_equal(run(y, stored), meaning(y, stored))
    assert not accepts(ops.argsort(x, name="y"))


def test_integers_keep_all_digits() -> None:
    x = input("x", (3,), I64)
    values = np.array([2**31 - 1, -(2**31), 16777217], np.int64)
    got = run(ops.cast(x, I32, name="y"), {"x": values.view(np.uint8)})
    assert np.array_equal(got, values)
