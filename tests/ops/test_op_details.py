"""What single ops promise beyond their examples: errors by name, edges, compositions."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import ORACLES

import ggraph.ops as ops
from ggraph import Session, open_backend
from ggraph.dtype import BF16, F16, F32, I32, I64, Q4_0, Q8_0, DType
from ggraph.errors import GgraphError, InputError, ShapeError
from ggraph.graph import Graph
from ggraph.ops.evaluate import encode, evaluate, read, reference, to_logical
from ggraph.ops.rope import rope_angles
from ggraph.tensor import Array, Tensor, input, state

RNG = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def run(y: Tensor, **feeds: Array) -> Array:
    return evaluate(Graph.of({"y": y}), feeds)["y"]


@pytest.mark.parametrize(
    ("window", "shape"),
    [
        (lambda x: ops.columns(x, 4, 12), (6, 3, 4)),
        (lambda x: ops.columns(x, 4, 12), (2, 3, 2, -1)),
        (lambda x: ops.columns(x, 4, 12), (3, 1, 2, 12, 1)),
        (lambda x: ops.columns(ops.rows(x, 2, 1), 4, 12), (12,)),
        (lambda x: ops.transpose(x), (4, 5, 6)),
        (lambda x: ops.transpose(x), (20, 3, 2)),
        (lambda x: ops.permute(ops.reshape(x, 6, 4, 5), 1, 0, 2), (2, 2, 6, 5)),
        (lambda x: ops.columns(ops.columns(x, 4, 12).reshape(6, 3, 4), 1, 2), (2, 3, 3, 2)),
        (lambda x: ops.view(x, (4, 6), (0, 1)), (2, 2, 3, 2)),
    ],
)
def test_a_window_takes_another_shape_where_its_steps_allow_it(
    window: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    """Nothing is copied, and numbers are those of a copy in that shape."""
    x = input("x", (6, 20))
    view, copied = window(x), ops.cont(window(x))
    assert not view.is_contiguous
    seen = ops.reshape(view, *shape)
    assert seen.is_view and seen.root is x and seen.shape == ops.reshape(copied, *shape).shape
    given = np.arange(120, dtype=np.float32).reshape(6, 20)
    graph = Graph.of({"seen": seen * 1.0, "copied": ops.reshape(copied, *shape)})
    wanted = evaluate(graph, {"x": given})
    assert np.array_equal(wanted["seen"], wanted["copied"])
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("step", graph)
        got = session.run("step", {"x": given})
    assert np.array_equal(got["seen"], wanted["seen"])
    assert np.array_equal(got["copied"], wanted["seen"])


@given(st.randoms(use_true_random=False))
def test_numpy_knows_the_same_windows_in_other_shapes(r: random.Random) -> None:
    sizes = [r.choice((1, 2, 3, 4, 6)) for _ in range(r.randint(1, 4))]
    x = input("x", [n + r.randint(0, 2) for n in sizes])
    window = ops.slice(x, [0] * len(sizes), sizes)
    window = ops.permute(window, *r.sample(range(len(sizes)), len(sizes)))
    shape, left = list[int](), window.size
    while left > 1 or (len(shape) < 5 and r.random() < 0.4):
        shape.append(r.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= shape[-1]
    r.shuffle(shape)
    held = np.zeros(x.shape, np.float32)
    seen = held[tuple(slice(n) for n in sizes)]
    seen = np.lib.stride_tricks.as_strided(seen, window.shape, window.strides)
    try:
        wanted = np.reshape(seen, shape, copy=False)
    except ValueError:
        with pytest.raises(ShapeError, match="would take a copy"):
            ops.reshape(window, *shape)
        return
    found = ops.reshape(window, *shape)
    steps = zip(shape, found.strides, wanted.strides, strict=True)
    assert all(n == 1 or ours == theirs for n, ours, theirs in steps)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (1, 12), (12, 1), (12,), (1, 3, 1, 4)])
def test_one_row_of_a_window_lies_as_many_do(shape: tuple[int, ...]) -> None:
    """Kernels are chosen by strides, and a row has the same bits in any company."""
    one, many = (
        ops.reshape(ops.columns(input("x", (rows, 20)), 4, 12), rows, *shape) for rows in (1, 6)
    )
    assert one.strides == many.strides and not one.is_contiguous


def test_rows_of_blocks_with_gaps_are_cut_between_blocks() -> None:
    block = Q8_0.block_bytes
    seen = ops.reshape(ops.columns(input("x", (4, 96), Q8_0), 32, 64), 2, 2, -1, 32)
    assert seen.shape == (2, 2, 2, 32) and seen.offset == block
    assert seen.strides == (6 * block, 3 * block, block, block)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.mul_mat(input("w", (4, 5)), input("x", (2, 6))), "inner sizes 5 and 6 differ"),
        (
            lambda: ops.mul_mat(input("w", (3, 4, 5)), input("x", (4, 2, 5))),
            r"no multiple of \[3\]",
        ),
        (lambda: ops.mul_mat(input("w", (4, 32)), input("x", (2, 32), Q8_0)), "plain float"),
        (lambda: ops.reshape(input("x", (2, 3)), 4, 2), r"6 elements do not fill shape \[4, 2\]"),
        (lambda: ops.reshape(input("x", (0, 3)), -1, 0), "do not fill"),
        (lambda: ops.reshape(ops.transpose(input("x", (2, 3))), 6), "not contiguous"),
        (lambda: ops.reshape(ops.columns(input("x", (4, 6)), 0, 4), 2, 8), "would take a copy"),
        (lambda: ops.reshape(ops.columns(input("x", (4, 6)), 0, 4), 5, -1), "do not fill"),
        (
            lambda: ops.reshape(ops.columns(input("x", (2, 96), Q8_0), 0, 64), 4, -1, 16),
            "cut blocks of q8_0",
        ),
        (lambda: ops.reshape(input("x", (2, 32), Q8_0), 4, 16), "cut blocks of q8_0"),
        (lambda: ops.permute(input("x", (2, 32), Q8_0), 1, 0), "must stay last"),
        (lambda: ops.permute(input("x", (2, 3)), 0, 0), "not an order of 2 axes"),
        (lambda: ops.columns(input("x", (2, 64), Q8_0), 16, 32), "cut blocks"),
        (lambda: ops.rows(input("x", (2, 3)), 1, 2), r"leave \[2, 3\]"),
        (lambda: ops.narrow(input("x", (2, 3)), 2, 0, 1), "has no axis 2"),
        (lambda: ops.view(input("x", (4,)), (3,), (2,)), "element 4 is outside"),
        (lambda: ops.rope(input("x", (2, 1, 6)), input("p", (3,), I32)), r"expected %p \[2\]"),
        (lambda: ops.rope(input("x", (2, 1, 6)), input("p", (2,), I32), n_rot=5), "n_rot=5"),
        (lambda: ops.rope(input("x", (2, 1, 6)), input("p", (2,), I32), mode="x"), "one of normal"),
        (
            lambda: ops.rope(input("x", (2, 1, 6)), input("p", (2,), I32), ext_factor=1.0),
            "needs n_ctx_orig",
        ),
        (
            lambda: ops.flash_attn(
                input("q", (2, 3, 8)), input("k", (5, 2, 8)), input("v", (5, 2, 8)), scale=1
            ),
            "3 query heads are no multiple of 2",
        ),
        (
            lambda: ops.flash_attn(
                input("q", (2, 2, 8)), input("k", (5, 2, 8)), input("v", (4, 2, 8)), scale=1
            ),
            r"expected %v \[5, 2, any\]",
        ),
        (lambda: ops.soft_max(input("x", (2, 3)), max_bias=8.0), "needs a mask"),
        (lambda: ops.top_k(input("x", (2, 3)), 4), "k=4: expected 1 to 3"),
        (lambda: ops.argmax(input("x", (2, 0))), "no element"),
        (lambda: ops.concat([input("x", (2, 3)), input("z", (3, 3))]), "off axis 1"),
        (lambda: ops.concat([input("x", (2,)), input("z", (2,), F16)]), "%z is f16, %x is f32"),
        (lambda: ops.cast(input("x", (2, 33)), Q4_0), "not whole blocks of 32"),
        (lambda: ops.repeat(input("x", (2,)), (3,)), "no multiple"),
        (lambda: ops.swiglu(input("x", (2, 3))), "no two halves"),
        (lambda: ops.group_norm(input("x", (3, 2, 2)), 2), "3 channels are not 2 groups"),
        (lambda: ops.arange(0, 1, 0), "a step"),
        (lambda: ops.fill((2,), 0.5, I32), "does not fit i32"),
        (lambda: ops.im2col(input("x", (1, 1, 2, 2)), (3, 3)), "does not fit"),
        (
            lambda: ops.conv_2d(input("w", (1, 2, 1, 1)), input("x", (1, 1, 2, 2))),
            r"\[O, I, h, w\]",
        ),
        (lambda: ops.pool_2d(input("x", (2, 2)), "min", (1, 1)), "one of max, avg"),
        (lambda: ops.pool_1d(input("x", (4,)), "max", 2, 0), "kernel 2, stride 0"),
        (lambda: input("w", (4, 64), Q8_0)[:, ::2], "by steps of 2 cut blocks"),
    ],
)
def test_errors_name_what_was_expected(build: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        build()  # type: ignore[operator]


def test_only_whole_values_are_overwritten() -> None:
    cache, rows, index = state("c", (4, 2, 3)), input("r", (1, 6)), input("i", (1,), I32)
    flat = ops.set_rows(cache.reshape(4, 6), rows, index)
    assert flat.shape == (4, 6) and flat.overwritten is not None
    with pytest.raises(ShapeError, match="window on %c; only whole values"):
        ops.set_rows(ops.rows(cache, 0, 2).named("w"), input("r", (1, 2, 3)), index)
    with pytest.raises(ShapeError, match="only whole values"):
        ops.cpy(input("x", (2, 4, 3)), ops.permute(cache, 1, 0, 2))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, Q8_0, Q4_0], ids=str)
def test_set_rows_keeps_every_other_row_bit_for_bit(dtype: DType) -> None:
    cache = state("c", (5, 2, 32), dtype)
    stored = encode(normal(5, 2, 32), dtype)
    rows, index = normal(3, 2, 32), np.array([4, 1, 4], np.int32)
    new = ops.set_rows(cache, input("r", (3, 2, 32)), input("i", (3,), I32))
    got = evaluate(Graph.of([], also=[new]), {"c": stored, "r": rows, "i": index})["c"]
    old = to_logical(stored, cache)
    wanted = old.copy()
    for t, i in enumerate(index):
        wanted[i] = to_logical(encode(rows[t : t + 1], dtype), input("o", (1, 2, 32), dtype))[0]
    assert np.array_equal(got, wanted)
    assert np.array_equal(got[0], old[0]) and not np.array_equal(got[1], old[1])


def test_indices_out_of_range_are_input_errors() -> None:
    ids = input("i", (1,), I32)
    for bad in (-1, 4):
        index = np.array([bad], np.int32)
        with pytest.raises(InputError, match=r"leave \[0, 4\)"):
            run(ops.get_rows(input("t", (4, 2)), ids), t=normal(4, 2), i=index)
        with pytest.raises(InputError, match=r"leave \[0, 4\)"):
            run(ops.set_rows(state("c", (4, 2)), input("r", (1, 2)), ids), r=normal(1, 2), i=index)
        with pytest.raises(InputError, match=r"leave \[0, 4\)"):
            w, x = input("w", (4, 2, 2)), input("x", (1, 1, 2))
            y = ops.mul_mat_id(w, x, ids.reshape(1, 1))
            run(y, w=normal(4, 2, 2), x=normal(1, 1, 2), i=index)


def test_rope_is_accurate_at_large_positions() -> None:
    """Against angles in exact rational steps of pi, where float32 products would be off by 1e-2."""
    n, base, position = 128, 1e6, 99_991
    attrs = {"n_rot": n, "freq_base": base, "freq_scale": 1.0, "ext_factor": 0.0}
    cos, sin = rope_angles(np.array([position]), None, {**attrs, "attn_factor": 1.0})
    for pair in range(n // 2):
        angle = position * base ** (-2 * pair / n)
        assert math.isclose(cos[0, pair], math.cos(angle), abs_tol=1e-9)
        assert math.isclose(sin[0, pair], math.sin(angle), abs_tol=1e-9)


def test_rope_turns_scores_into_functions_of_distance() -> None:
    x, p = input("x", (2, 1, 8)), input("p", (2,), I32)
    data = normal(2, 1, 8)
    scores = []
    for shift in (0, 5000):
        y = run(ops.rope(x, p), x=data, p=np.array([3 + shift, 7 + shift], np.int32))
        scores.append(float(y[0, 0] @ y[1, 0]))
    assert abs(scores[0] - scores[1]) < 1e-4


def test_neox_is_normal_with_its_features_in_another_order() -> None:
    x, p = input("x", (3, 2, 8)), input("p", (3,), I32)
    data, at = normal(3, 2, 8), np.array([0, 9, 70], np.int32)
    mixed = data.reshape(3, 2, 4, 2).swapaxes(2, 3).reshape(3, 2, 8)  # halves from pairs
    normal_pairs = run(ops.rope(x, p), x=data, p=at)
    halves = run(ops.rope(x, p, mode="neox"), x=mixed, p=at)
    assert np.array_equal(halves, normal_pairs.reshape(3, 2, 4, 2).swapaxes(2, 3).reshape(3, 2, 8))


def test_flash_attn_never_looks_behind_the_length() -> None:
    q, k, v = input("q", (2, 4, 8)), input("k", (9, 2, 8)), input("v", (9, 2, 8))
    y = ops.flash_attn(q, k, v, None, input("n", (1,), I32), scale=0.3)
    data = {"q": normal(2, 4, 8), "k": normal(9, 2, 8), "v": normal(9, 2, 8)}
    count = np.array([5], np.int32)
    clean = run(y, **data, n=count)
    data["k"][5:], data["v"][5:] = np.nan, np.inf
    assert np.array_equal(run(y, **data, n=count), clean)
    with pytest.raises(InputError, match=r"length 10 is outside \[0, 9\]"):
        run(y, **data, n=np.array([10], np.int32))


def test_rows_that_see_nothing_give_zeros() -> None:
    hidden = np.full((2, 3), -np.inf, np.float32)
    hidden[1, 2] = 0
    x, m = input("x", (2, 3)), input("m", (2, 3))
    assert run(ops.soft_max(x, m), x=normal(2, 3), m=hidden).tolist() == [[0, 0, 0], [0, 0, 1]]
    q, k = input("q", (2, 1, 4)), input("k", (3, 1, 4))
    data = normal(3, 1, 4)
    got = run(ops.flash_attn(q, k, k, m, scale=1), q=normal(2, 1, 4), k=data, m=hidden)
    assert np.array_equal(got, np.stack([np.zeros((1, 4), np.float32), data[2]]))


def test_flash_attn_reads_views_of_a_cache() -> None:
    cache = state("c", (2, 10, 3, 8), F16)  # k and v in one tensor
    k, v = (ops.narrow(cache, 0, i, 1).reshape(10, 3, 8) for i in (0, 1))
    seen = [ops.rows(t, 0, 6) for t in (k, v)]
    data, q = normal(2, 10, 3, 8).astype(np.float16).astype(np.float32), normal(2, 6, 8)
    got = run(ops.flash_attn(input("q", (2, 6, 8)), *seen, scale=0.5), c=data, q=q)
    flags = {"softcap": 0.0, "has_mask": False, "has_length": False, "has_sinks": False}
    wanted = ORACLES["flash_attn"](q, data[0, :6], data[1, :6], scale=0.5, **flags)
    assert np.abs(got - wanted).max() < 1e-5


def test_packed_gates_are_views_of_one_tensor() -> None:
    x, data = input("x", (3, 8)), normal(3, 8)
    gate, up = data[:, :4], data[:, 4:]
    for swapped in (False, True):
        got = run(ops.geglu(x, swapped=swapped), x=data)
        wanted = ORACLES["geglu"](*((up, gate) if swapped else (gate, up)))
        assert np.abs(got - wanted).max() < 1e-5
    assert all(s.is_view for s in ops.geglu(x).sources)


def test_special_values_order_as_promised() -> None:
    x = input("x", (5,))
    data = np.array([np.nan, 1, np.inf, 1, -np.inf], np.float32)
    assert run(ops.argsort(x, "desc"), x=data).tolist()[:3] == [2, 1, 3]
    assert run(ops.top_k(x, 2), x=data).tolist() == [2, 1]
    assert run(ops.argmax(x), x=data).tolist() == 2
    assert run(ops.argmax(x), x=np.full(5, np.nan, np.float32)).tolist() == 0


def test_convolution_agrees_with_its_definition() -> None:
    x, w = normal(2, 3, 5, 6), normal(4, 3, 2, 3)
    y = ops.conv_2d(input("w", w.shape), input("x", x.shape), (2, 1), (1, 0), (1, 2))
    got = run(y, x=x, w=w)
    wide = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
    assert got.shape == (2, 4, 3, 2)
    for n, o, i, j in np.ndindex(*got.shape):
        patch = wide[n, :, 2 * i : 2 * i + 2, j : j + 5 : 2]
        assert math.isclose(got[n, o, i, j], float((patch * w[o]).sum()), abs_tol=1e-4)


@pytest.mark.parametrize("taps", [(2, 2), (3, 3), (4, 3), (1, 2), (5, 1)])
@pytest.mark.parametrize("stride", [(2, 2), (1, 1), (3, 2)])
def test_a_transposed_convolution_spreads_its_kernel(
    taps: tuple[int, int], stride: tuple[int, int]
) -> None:
    x, w = normal(2, 3, 4, 5), normal(3, 4, *taps)
    got = run(ops.conv_transpose_2d(input("w", w.shape), input("x", x.shape), stride), x=x, w=w)
    wanted = np.zeros((2, 4, 3 * stride[0] + taps[0], 4 * stride[1] + taps[1]))
    for n, i, r, q in np.ndindex(*x.shape):
        a, b = r * stride[0], q * stride[1]
        wanted[n, :, a : a + taps[0], b : b + taps[1]] += x[n, i, r, q] * w[i].astype(np.float64)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() < 1e-5


def test_conv_1d_and_pool_1d_are_their_two_dimensional_peers() -> None:
    x, w = normal(2, 3, 7), normal(4, 3, 2)
    got = run(ops.conv_1d(input("w", w.shape), input("x", x.shape), 2), x=x, w=w)
    wanted = [[[(x[n, :, 2 * j : 2 * j + 2] * w[o]).sum() for j in range(3)] for o in range(4)]
              for n in range(2)]  # fmt: skip
    assert np.allclose(got, wanted, atol=1e-5)
    windows = (ops.transpose(input(n, v.mT.shape)) for n, v in (("w", w), ("x", x)))
    assert np.array_equal(run(ops.conv_1d(*windows, 2), x=x.mT, w=w.mT), got)
    pooled = run(ops.pool_1d(input("x", x.shape), "max", 3, 2), x=x)
    window = ops.transpose(input("x", x.mT.shape))
    assert np.array_equal(run(ops.pool_1d(window, "max", 3, 2), x=x.mT), pooled)
    assert np.array_equal(pooled, np.stack([x[..., i : i + 3].max(-1) for i in (0, 2, 4)], -1))


def test_experts_are_chosen_and_mixed() -> None:
    logits, values = normal(5, 8), normal(5, 3, 4)
    ids, shares = ops.moe_route(input("l", (5, 8)), 3)
    y = ops.moe_mix(input("v", (5, 3, 4)), shares)
    found = evaluate(Graph.of({"ids": ids, "y": y}), {"l": logits, "v": values})
    for t in range(5):
        order = sorted(range(8), key=lambda i, row=logits[t]: -row[i])[:3]  # type: ignore[misc]
        assert found["ids"][t].tolist() == order
        weights = np.exp(logits[t, order].astype(np.float64))
        wanted = (weights / weights.sum()) @ values[t]
        assert np.allclose(found["y"][t], wanted, atol=1e-5)


def test_casts_round_to_even_and_keep_special_values() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, np.nan, -0.0], np.float32)
    got = run(ops.cast(input("x", (7,)), BF16), x=x)
    assert got[:2].tolist() == [1.0, 1 + 2**-6] and got[3] == np.inf and got[4] == -np.inf
    assert np.isnan(got[5]) and np.signbit(got[6])
    assert run(ops.cast(input("x", (2,)), I64), x=np.float32([-1.9, 2.9])).tolist() == [-1, 2]


sizes = st.integers(0, 4)


@given(shape=st.lists(sizes, min_size=1, max_size=4), data=st.data())
def test_chains_of_views_show_what_numpy_shows(shape: list[int], data: st.DataObject) -> None:
    t: Tensor = input("x", shape)
    values: Array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    memory = np.frombuffer(values.tobytes(), np.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        t = data.draw(st.sampled_from(_next_views(t, data)))
        assert t.spec is not None
        values = reference(t, [values])
        assert np.array_equal(read(t, memory), values)
        assert t.size == 0 or t.offset + t.nbytes <= t.root.nbytes


def _next_views(t: Tensor, data: st.DataObject) -> list[Tensor]:
    n = len(t.shape)
    axis = data.draw(st.integers(0, n - 1))
    start = data.draw(st.integers(0, t.shape[axis]))
    count = data.draw(st.integers(0, t.shape[axis] - start))
    found = [
        ops.permute(t, *data.draw(st.permutations(range(n)))),
        ops.narrow(t, axis, start, count),
    ]
    if t.is_contiguous:
        found.append(ops.reshape(t, *data.draw(st.permutations(t.shape))))
    return found


@given(
    lead=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), max_size=2),
    m=st.integers(0, 3),
    n=st.integers(0, 3),
    k=st.integers(0, 5),
)
def test_mul_mat_broadcasts_as_ggml(lead: list[tuple[int, int]], m: int, n: int, k: int) -> None:
    w = normal(*[a for a, _ in lead], n, k)
    x = normal(*[a * b for a, b in lead], m, k)
    got = run(ops.mul_mat(input("w", w.shape), input("x", x.shape)), w=w, x=x)
    wanted = ORACLES["mul_mat"](w, x)
    assert got.shape == wanted.shape and np.allclose(got, wanted, atol=1e-5)


@given(shapes=st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=3), data=st.data())
def test_any_shapes_give_a_result_or_a_typed_error(
    shapes: list[list[int]], data: st.DataObject
) -> None:
    from ggraph.tensor import OPS, apply

    spec = OPS[data.draw(st.sampled_from(sorted(OPS)))]
    example = data.draw(st.sampled_from(spec.examples))
    leaves = [input(f"s{i}", s) for i, s in enumerate(shapes)]
    try:
        y = apply(spec.name, *leaves, **example.attrs)
        g = Graph.of({"y": y})
        evaluate(g, {t.name: normal(*t.shape) for t in leaves})
    except GgraphError:
        return
    assert g["y"].shape == y.shape
