"""The evaluator: storage and values of every dtype, states, overwrites, bad feeds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ggraph.ops as ops
from ggraph.backends import open_backend
from ggraph.dtype import BF16, F16, F32, F64, I8, I16, I32, I64, Q4_0, Q8_0, DType
from ggraph.errors import GraphError, InputError, ShapeError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, read, reference, to_logical, to_storage, write
from ggraph.session import Session
from ggraph.tensor import Array, Tensor, input, state, weight

RNG = np.random.default_rng(11)
TYPES = (F32, F16, BF16, I8, I16, I32, I64, Q8_0, Q4_0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_storage_round_trips(dtype: DType) -> None:
    t = input("x", (3, 64), dtype)
    values = RNG.integers(-9, 9, t.shape).astype(np.float32 if dtype.is_float else dtype.np)
    stored = to_storage(values, t)
    assert stored.nbytes == t.nbytes
    logical = to_logical(stored, t)
    assert logical.shape == t.shape
    assert logical.dtype == (np.float32 if dtype.is_float else dtype.np)
    assert np.array_equal(to_storage(logical, t), stored)
    memory = np.full(t.nbytes + 20, 0xEE, np.uint8)
    write(t, memory, 8, values)
    assert np.array_equal(read(t, memory, 8), logical)
    assert (memory[:8] == 0xEE).all() and (memory[-12:] == 0xEE).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_windows_of_every_type_are_read_and_written(dtype: DType) -> None:
    whole = input("x", (4, 3, 64), dtype)
    values = RNG.integers(0, 9, whole.shape).astype(np.float32 if dtype.is_float else dtype.np)
    memory = np.frombuffer(to_storage(values, whole).tobytes(), np.uint8).copy()
    logical = read(whole, memory).copy()
    box = ops.permute(ops.slice(whole, (1, 0, 32), (2, 3, 32)), 1, 0, 2)
    assert np.array_equal(read(box, memory), logical[1:3, :, 32:].transpose(1, 0, 2))
    write(box, memory, 0, np.zeros(box.shape, values.dtype))
    logical[1:3, :, 32:] = 0
    assert np.array_equal(read(whole, memory), logical)


def test_copies_of_block_types_keep_their_bits() -> None:
    x = weight("x", (4, 64), Q4_0)
    raw = RNG.integers(0, 256, (4, 36)).astype(np.uint8)
    raw[:, [1, 19]] = 0x3C  # scales near 1, so that no value is NaN
    y = ops.cont(ops.copy(ops.rows(x, 1, 2), "elsewhere"))
    found = evaluate(Graph.of({"y": y}), {"x": raw})
    assert np.array_equal(found["y"], to_logical(raw, x)[1:3])


def test_states_begin_as_zeros_and_end_as_their_last_value() -> None:
    cache, x, at = state("c", (3, 2)), input("x", (1, 2)), input("i", (1,), I32)
    old = ops.scale(cache, 1.0)
    new = ops.set_rows(cache, x, at)
    newest = ops.set_rows(new, ops.scale(x, 2.0), input("j", (1,), I32))
    g = Graph.of({"old": old, "mid": ops.cont(new)}, also=[newest])
    feeds = {"x": np.ones((1, 2), np.float32), "i": np.array([1]), "j": np.array([2])}
    feeds |= {k: feeds[k].astype(np.int32) for k in "ij"}
    found = evaluate(g, feeds)
    assert found["old"].tolist() == [[0, 0]] * 3
    assert found["mid"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert found["c"].tolist() == [[0, 0], [1, 1], [2, 2]]
    again = evaluate(g, {**feeds, "c": found["c"]})
    assert again["old"].tolist() == found["c"].tolist()


def test_every_value_is_kept_as_it_was_computed() -> None:
    cache, x = state("c", (2,)), input("x", (2,))
    first = ops.cpy(x, cache).named("first")
    g = Graph.of({"y": ops.add(first, x)}, also=[ops.cpy(ops.neg(x), first).named("second")])
    found = evaluate(g, {"x": np.array([1, 2], np.float32)}, every=True)
    assert found["first"].tolist() == [1, 2] and found["second"].tolist() == [-1, -2]
    assert found["y"].tolist() == [2, 4] and found["c"].tolist() == [-1, -2]


def test_bad_feeds_are_input_errors() -> None:
    g = Graph.of({"y": ops.neg(input("x", (2, 3)))})
    with pytest.raises(InputError, match="input %x was not fed; fed: z"):
        evaluate(g, {"z": np.zeros(1)})
    with pytest.raises(InputError, match=r"'x' is f32.*: expected shape \[2, 3\], got \[3, 2\]"):
        evaluate(g, {"x": np.zeros((3, 2), np.float32)})
    quantised = Graph.of({"y": ops.cast(input("w", (1, 32), Q8_0), F32)})
    with pytest.raises(InputError, match=r"expected uint8 \[1, 34\], got uint8 \[33\]"):
        evaluate(quantised, {"w": np.zeros(33, np.uint8)})


def test_a_feed_that_no_leaf_takes_is_refused() -> None:
    """It was passed over: a mistyped state began as zeros, and nobody was told."""
    held, x = state("cache.k", (2, 3)), input("x", (2, 3))
    graph = Graph.of({"y": ops.cont(ops.cpy(ops.add(held, x), held)), "z": (x * 2).named("z")})
    fed = {"x": np.ones((2, 3), np.float32)}
    for name, told in (
        ("cache.K", "; is it 'cache.k'?"),
        ("chache.k", "; is it 'cache.k'?"),
        ("another graph's", ""),
        ("z", ": %z: f32[2, 3] = scale(%x) {bias=0.0 scale=2.0} -> out is computed"),
        (x, ""),
    ):
        with pytest.raises(InputError) as error:
            evaluate(graph, {**fed, name: fed["x"]})  # type: ignore[dict-item]
        assert str(error.value).startswith("no input, weight or state is called ")
        assert str(error.value).endswith(told)
    with pytest.raises(InputError, match=r"input %x was not fed; fed: X; is it 'X'\?"):
        evaluate(graph, {"X": fed["x"]})


def test_reading_outside_memory_is_refused() -> None:
    t = input("x", (4,))
    with pytest.raises(GraphError, match=r"bytes 4 \+ 16 leave 16"):
        read(t, np.zeros(16, np.uint8), 4)


def test_nothing_fed_is_ever_changed() -> None:
    c, x = state("c", (2, 2)), input("x", (2, 2))
    feeds = {"c": np.zeros((2, 2), np.float32), "x": np.ones((2, 2), np.float32)}
    for a in feeds.values():
        a.flags.writeable = False
    found = evaluate(Graph.of({"y": ops.cpy(x, c)}), feeds)
    assert found["y"].tolist() == [[1, 1], [1, 1]] and feeds["c"].sum() == 0


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_bf16_rounds_to_nearest_even(values: list[float]) -> None:
    t = input("x", (len(values),), BF16)
    given_values = np.array(values, np.float32)
    got = to_logical(to_storage(given_values, t), t)
    bits = given_values.view(np.uint32).astype(np.uint64)
    low, high = bits >> 16 << 16, (bits >> 16 << 16) + 0x10000
    for v, down, up, r in zip(bits, low, high, got.view(np.uint32), strict=True):
        below, above = int(v) - int(down), int(up) - int(v)
        tie = down if (int(down) >> 16) % 2 == 0 else up
        assert int(r) == int(down if below < above else up if above < below else tie)


def test_what_is_given_in_64_bits_stays_so() -> None:
    """Ops that promise the type of their source: some went through float32, where 1e300 is none."""
    x = np.array([[1e300, -1e-300, 700.0, 1 / 3]])
    t, s = input("x", x.shape, "f64"), input("s", (1, 4), "f64")
    small = np.array([[1e-200, 2e-200, -1 / 3, 700.0]])
    exp = np.exp(small)
    over = np.exp(small - small.max())
    with np.errstate(all="ignore"):  # roots of what is below zero, and 700 to itself
        root, power = x**0.5, small**small
    cases: dict[str, tuple[Tensor, Array]] = {
        "abs": (ops.abs(t), np.abs(x)), "neg": (-t, -x), "sqr": (ops.sqr(s), small * small),
        "exp": (ops.exp(s), exp), "relu": (ops.relu(t), np.maximum(x, 0)),
        "scale": (t * 0.1, x * 0.1), "shift": (s + 1e-200, small + 1e-200),
        "sqrt": (t**0.5, root), "third": (t / 3, x * (1 / 3)),
        "pow": (ops.pow(s, s), power),
        "reglu": (ops.reglu(t, s), np.maximum(x, 0) * small),
        "cumsum": (ops.cumsum(s), small.cumsum(-1)),
        "soft_max": (ops.soft_max(s), over / over.sum()),
        "l2_norm": (ops.l2_norm(s), small / np.sqrt((small**2).sum())),
        "several": (ops.exp(ops.abs(s)) * s, np.exp(np.abs(small)) * small),
        "greater": (s > 0, (small > 0) * 1.0),
        "clamp": (ops.clamp(t, -0.1, 0.1), x.clip(-0.1, 0.1)),
    }  # fmt: skip
    graph = Graph.of({n: y for n, (y, _) in cases.items()})
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", graph)
        found = session.run("k", {"x": x, "s": small})
    with np.errstate(all="ignore"):
        meant = evaluate(graph, {"x": x, "s": small})
    for name, (y, want) in cases.items():
        assert str(y.dtype) == "f64", name
        for got in (found[name], meant[name]):
            assert np.allclose(got, want, 1e-13, 0, equal_nan=True), name


def test_no_meaning_leaves_64_bits() -> None:
    """Every op whose rule gives its source's type computes in it."""
    rng, checked = np.random.default_rng(0), set()
    for spec, _, example in examples.every():
        args = tuple(replace(a, dtype=F64) if a.dtype is F32 else a for a in example.args)
        try:
            y = examples.build(spec, replace(example, args=args))
        except ShapeError:
            continue
        if y.dtype is not F64 or y.is_view:
            continue
        values = [
            given.astype(np.float64) if t.dtype is F64 else given
            for given, t in zip((examples.values(a, rng) for a in args), y.sources, strict=True)
        ]
        assert reference(y, values).dtype == np.float64, (spec.name, example)
        checked.add(spec.name)
    assert {"rope", "clamp", "norm", "soft_max", "where"} < checked and len(checked) > 50, checked
