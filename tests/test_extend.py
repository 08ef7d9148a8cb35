"""Ops from outside: compiled from their meaning, by a C function, or told; held to the truth."""

import ctypes
import inspect
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Array, Graph, Session, input, open_backend, ops, register_op
from ggraph.dtype import ALL, I32, Q8_0, DType
from ggraph.errors import GgraphError, GraphError, ShapeError
from ggraph.extend import address_of, load_installed
from ggraph.ops.evaluate import evaluate, to_logical, to_storage
from ggraph.ops.rules import same_shape
from ggraph.tensor import OPS, Arg, Attrs, Example, Meta, OpSpec, Tensor, apply, register
from ggraph.testing import Differs, _same_bits, check_op, check_plan
from models import door

SMALL = (Example((Arg((3, 5)),)), Example((Arg((0, 4)),)), Example((Arg((2, 3, 37)),)))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What a test registers goes with it."""
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def mish(x: Array) -> Array:
    y: Array = x * np.tanh(np.log1p(np.exp(x)))
    return y


def test_an_op_has_a_kernel_because_it_has_a_meaning() -> None:
    op = register_op("mish", mish, examples=SMALL, elementwise=True, inplace=(0,))
    found = check_op("mish")
    assert [c.compiled for c in found] == [True] * len(found) and len(found) == 6
    x = input("x", (4, 6))
    feeds = {"x": np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)}
    assert check_plan(Graph.of({"y": op(x, name="m") + 1}), feeds, orders=2) == 2
    with pytest.raises(GraphError, match="registered twice"):
        register_op("mish", mish, examples=SMALL)


def test_an_op_that_reduces_has_one_too() -> None:
    def standardised(x: Array) -> Array:
        c = x - x.mean(-1, keepdims=True)
        y: Array = c / np.maximum(abs(c).max(-1, keepdims=True), 1e-6)
        return y

    register_op("standardised", standardised, examples=SMALL)
    assert all(c.compiled for c in check_op("standardised", ("cpu",)))


CENTRED: dict[str, Callable[..., Array]] = {
    "centred": lambda x: x - x.mean(-1, keepdims=True),
    "mirrored": lambda x: x.astype(np.float64).mean(-1, keepdims=True) - x,
    "summed": lambda x: x + x.astype(np.float64).sum(-1, keepdims=True) / -x.shape[-1],
}


@pytest.mark.parametrize("name", CENTRED)
def test_within_an_op_a_mean_is_not_rounded(name: str) -> None:
    """Else its error is large beside what is left of numbers far from 0."""
    meaning = CENTRED[name]
    op = register_op(name, meaning, examples=SMALL[::2])
    assert all(c.compiled for c in check_op(name, ("cpu",)))
    for shape, axes in (((40, 30), (1, 0)), ((30, 40), (0, 1))):  # along vectors, and across
        far = np.random.default_rng(0).normal(1e4, 1, shape).astype(np.float32)
        x = input("x", shape).permute(*axes)
        with Session({"cpu": open_backend("cpu", threads=1)}) as session:
            session.prepare("k", Graph.of({"y": op(ops.cont(x) if axes[0] == 0 else x)}))
            got = session.run("k", {"x": far})["y"]
        want = meaning(far.transpose(axes).astype(np.float64))
        assert np.abs(got - want).max() < 1e-6


@pytest.mark.parametrize("dtype", [d for d in ALL if not d.is_block], ids=str)
def test_an_op_without_a_rule_has_its_first_sources_type(dtype: DType) -> None:
    """Of every plain type, integers too, whose ops were refused as no floats."""
    args = Arg((3, 8), dtype, "ids:9"), Arg((3, 8), dtype, "ids:9")
    op = register_op(
        "together", lambda a, b: np.maximum(a, b) * 3 - b, examples=[Example(args)],
        elementwise=True,
    )  # fmt: skip
    assert all(c.error == 0 for c in check_op("together"))
    x = input("x", (6, 9), dtype)
    y = op(op(x.T[1:], x.T[1:]), x.T[:-1])
    assert y.dtype is dtype and y.shape == (8, 6)
    fed = {"x": to_storage(np.arange(54, dtype=np.float32).reshape(6, 9) % 11, x)}
    with Session({"cpu": open_backend("cpu")}) as session:
        session.prepare("k", Graph.of({"y": y}))
        found = session.run("k", fed)["y"]
    t = (np.arange(54).reshape(6, 9) % 11).T
    assert np.array_equal(to_logical(found, y), np.maximum(t[1:] * 2, t[:-1]) * 3 - t[:-1])
    with pytest.raises(GgraphError, match="expected a plain type, got q8_0"):
        op(input("w", (2, 32), Q8_0), x)


def test_an_op_that_is_registered_anew_has_its_new_meaning() -> None:
    for factor in (2.0, 3.0):
        OPS.pop("again", None)
        op = register_op("again", lambda x, f=factor: x * f, examples=SMALL)
        assert all(c.compiled for c in check_op("again", ("cpu",)))
        assert check_plan(Graph.of({"y": op(input("x", (3,)))}), {"x": np.ones(3, "f4")}, orders=1)


Meaning = Callable[[Array, Array], Array]
ONES: dict[str, Callable[..., Array]] = {
    "f32": lambda a: a.astype(np.float32), "f64": lambda a: a.astype(np.float64),
    "i32": lambda a: a.astype(np.int32), "bool": lambda a: a.astype(np.bool_),
    "negative": np.negative, "abs": np.abs, "floor": np.floor, "sign": np.sign,
    "sum": lambda a: a.sum(-1, keepdims=True), "max": lambda a: a.max(-1, keepdims=True),
    "most": lambda a: a.max(-1, keepdims=True, initial=0.0), "roll": lambda a: np.roll(a, 1, 1),
    "half": lambda a: a * 0.5, "more": lambda a: a + 1, "or": lambda a: a + True,
}  # fmt: skip
TWOS: dict[str, Callable[..., Array]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "greater": np.greater, "equal": np.equal, "less": np.less_equal,
    "where": lambda a, b: np.where(a, b, a), "choose": lambda a, b: np.where(a > b, 1, 0),
}  # fmt: skip


def one_of(name: str, a: Meaning) -> Meaning:
    return lambda x, n: ONES[name](a(x, n))


def two_of(name: str, a: Meaning, b: Meaning) -> Meaning:
    return lambda x, n: TWOS[name](a(x, n), b(x, n))


LEAVES = st.sampled_from([lambda x, n: x, lambda x, n: n, lambda x, n: x > 0])
MEANINGS: st.SearchStrategy[Meaning] = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(one_of, st.sampled_from(sorted(ONES)), inner)
        | st.builds(two_of, st.sampled_from(sorted(TWOS)), inner, inner)
    ),
    max_leaves=4,
)


def same_as_numpy(meaning: Meaning, x: Array, n: Array) -> bool:
    """Whether the CPU gives what NumPy does, by a kernel or without."""

    def whole(x: Array, n: Array) -> Array:
        y = meaning(x, n)
        return y if y.shape == x.shape else y * x

    try:
        want = np.asarray(whole(x, n)).astype(np.float32)
    except (TypeError, ValueError):  # NumPy has no negative truths
        return True
    OPS.pop("drawn", None)
    register(OpSpec("drawn", infer=same_shape, reference=whole, examples=SMALL))
    y = apply("drawn", input("x", x.shape), input("n", n.shape, "i32"))
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", Graph.of({"y": y}))
        return np.array_equal(session.run("k", {"x": x, "n": n})["y"], want)


@given(meaning=MEANINGS, seed=st.integers(0, 9))
def test_a_kernel_made_of_a_meaning_gives_what_numpy_gives(meaning: Meaning, seed: int) -> None:
    """Of floats, integers and truths, whose numbers have few bits, so that all is exact."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(-7, 8, (3, 5)) / 4).astype(np.float32)
    assert same_as_numpy(meaning, x, rng.integers(-3, 4, (3, 5)).astype(np.int32))


@pytest.mark.parametrize(
    "meaning",
    [
        lambda x, n: (x.astype(np.int32) * 2).astype(np.float32),
        lambda x, n: x.astype(np.float16).astype(np.float32),
        lambda x, n: (x - 9).max(-1, keepdims=True, initial=0.0) + x,
        lambda x, n: ((n + 1) - n).astype(np.float32),
        lambda x, n: np.where(n > 2**24, x, -x),
        lambda x, n: np.where(n == n + 1, x, -x),
        lambda x, n: x.sum(-1, dtype=np.int64, keepdims=True) + x,
        lambda x, n: np.roll(np.concatenate([n, n], 1), 1, 1)[:, :5] * x,
    ],
)
def test_what_kernels_would_compute_otherwise_is_left_to_numpy(meaning: Meaning) -> None:
    x = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
    n = (2**24 + np.arange(15)).astype(np.int32).reshape(3, 5)
    assert same_as_numpy(meaning, x, n)


def test_an_op_that_sorts_has_none_and_runs_all_the_same() -> None:
    register_op("sorted", lambda x: np.sort(x, -1), examples=SMALL)
    assert [c.compiled for c in check_op("sorted", ("cpu",))] == [False, True, False]  # no element


SOURCE = """
#include <stdint.h>
void reversed(const int64_t *operands, int64_t thread, int64_t threads) {
    float *y = (float *)operands[0];
    const float *x = (const float *)operands[2];
    int64_t count = operands[1] / 4;
    for (int64_t i = thread * count / threads; i < (thread + 1) * count / threads; i++)
        y[i] = x[count - 1 - i];
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_an_op_with_a_c_function(tmp_path: Path) -> None:
    (tmp_path / "own.c").write_text(SOURCE)
    library = tmp_path / "own.so"
    command = ["cc", "-O2", "-shared", "-fPIC", str(tmp_path / "own.c"), "-o", str(library)]
    subprocess.run(command, check=True)

    def meaning(x: Array) -> Array:
        return np.ascontiguousarray(x.reshape(-1)[::-1]).reshape(x.shape)

    kernel = ctypes.CDLL(str(library)).reversed
    register_op("reversed", meaning, examples=SMALL, kernel=kernel)
    assert all(c.compiled for c in check_op("reversed", ("cpu",)))
    with pytest.raises(GraphError, match="own may not work in place"):
        register_op("again", meaning, examples=SMALL, kernel=kernel, inplace=(0,))


def writes(x: Array) -> Array:
    y: Array = np.add(x, 1, out=x)
    return y


def bare(name: str, meaning: Callable[..., Array]) -> None:
    """An op as a package might record it, past the checks of `register_op`."""
    record = OpSpec(name, infer=same_shape, reference=meaning, examples=SMALL)
    register(record)


def test_a_record_that_does_not_hold_is_told() -> None:
    with pytest.raises(GraphError, match=r"op 'writes': the meaning fails on example 0.*read-only"):
        register_op("writes", writes, examples=SMALL)
    wide = partial(np.tile, reps=2)
    with pytest.raises(
        GraphError, match=r"gives \[3, 10\] on example 0, expected \[3, 5\]; `shape=`"
    ):
        register_op("wide", wide, examples=SMALL)
    assert not {"writes", "wide"} & OPS.keys()
    bare("writes", writes)
    with pytest.raises(Differs, match="writes, example 0: the reference writes"):
        check_op("writes")
    bare("wide", wide)
    with pytest.raises(Differs, match=r"wide, example 0: shape \(3, 5\), reference \(3, 10\)"):
        check_op("wide")
    with pytest.raises(GraphError, match="at least one example"):
        register_op("bare", mish, examples=())


PAIR = (Example((Arg((4, 5)), Arg((4, 5)))),)
LIES: dict[str, tuple[Callable[..., Array], dict[str, object]]] = {
    "whole": (lambda x: x - x.mean(), {"elementwise": True}),
    "turned": (lambda x: x[::-1] * 1, {"elementwise": True}),
    "sorted": (lambda x: np.sort(x, -1), {"elementwise": True}),
    "other": (lambda x, y: x + y[::-1], {"elementwise": True, "inplace": (0,)}),
    "first": (lambda x, y: x[::-1] + y, {"inplace": (0,)}),
    "second": (lambda x, y: x + y[::-1] * 2, {"inplace": (0, 1)}),
    "either": (lambda x, y: x[::-1] + y[::-1], {"inplace": (0, 1)}),
}


@pytest.mark.parametrize("name", LIES)
def test_each_promise_of_a_record_is_held_to_the_truth(name: str) -> None:
    """Planning believes them: a result was put over what its kernel had still to read."""
    meaning, promises = LIES[name]
    examples = SMALL[:1] if len(inspect.signature(meaning).parameters) == 1 else PAIR
    register_op(name, meaning, examples=examples, **promises)  # type: ignore[arg-type]
    with pytest.raises(Differs, match=f"{name}, example 0"):
        check_op(name)


def test_promises_that_hold_pass() -> None:
    """A source that repeats stays as it is, and a result in place is tried over each source."""
    args = Arg((4, 5)), Arg((5,)), Arg((4, 5), I32, "ids:4")
    register_op(
        "kept", lambda x, row, n: np.where(n > 1, x * row, -x), examples=[Example(args)],
        elementwise=True, inplace=(0,),
    )  # fmt: skip
    register_op("sums", lambda x, y: x + 2 * y, examples=PAIR, elementwise=True, inplace=(0, 1))
    register_op("rows", lambda x: x - x.mean(-1, keepdims=True), examples=SMALL[::2], inplace=(0,))
    assert all(c.error < 1e-6 for name in ("kept", "sums", "rows") for c in check_op(name))


@pytest.mark.parametrize("slots", [{"inplace": (2,)}, {"inplace": (-1,)}, {"overwrites": 2},
                                   {"overwrites": -1}])  # fmt: skip
def test_a_promise_about_no_source_is_refused(slots: dict[str, object]) -> None:
    with pytest.raises(GraphError, match=r"op 'none': (inplace|overwrites)=.*no source.*example 0"):
        register_op("none", np.add, examples=PAIR, **slots)  # type: ignore[arg-type]
    assert "none" not in OPS


def test_a_call_of_an_op_is_held_against_its_meaning() -> None:
    """Where it is written, not where a session plans it, and in the words of other ops."""
    op = register_op(
        "own", lambda x, *, by=(1,): x + sum(by), examples=SMALL,
        shape=lambda sources, attrs: Meta(sources[0].shape),
    )  # fmt: skip
    x = input("x", (3, 5))
    for odd in (3, None, "x", np.ones((3, 5)), [x]):
        with pytest.raises(ShapeError, match=r"own: sources=.*: expected a tensor \(feed"):
            op(odd)
    for odd in ({}, len, np.ones(3), ["a"]):
        with pytest.raises(ShapeError, match=r"own: by=.*: expected a whole number or"):
            op(x, by=odd)
    with pytest.raises(ShapeError, match=r"own: name=3: expected a string"):
        op(x, name=3)
    for call in (lambda: op(), lambda: op(x, x), lambda: op(x, to=1)):
        with pytest.raises(TypeError, match=r"^own\(x, by\): "):
            call()
    assert op(x, by=[np.int64(1), 2]).attrs == {"by": (1, 2)}
    assert type(op(x, by=np.float32(2)).attrs["by"]) is float
    plain = register_op("plain", np.positive, examples=SMALL)  # whose signature nobody knows
    assert plain(x).shape == (3, 5)
    doubled = register_op(
        "doubled", lambda x: np.repeat(x, 2, 0), examples=SMALL[:1],
        shape=lambda sources, attrs: Meta((np.int64(2 * sources[0].shape[0]), 5)),
    )  # fmt: skip
    assert repr(doubled(x)) == "%?: f32[6, 5] = doubled(%x)"


@pytest.mark.parametrize("meaning", [
    lambda x: x[..., : x.shape[-1] // 2 * 2 : 2] + x[..., 1::2],  # fewer than the rule says
    lambda x: x[..., ::2].T if x.shape[-1] == 5 else x[..., ::2],  # as many, in another order
])  # fmt: skip
def test_a_meaning_of_another_shape_is_told_where_it_is_planned(
    meaning: Callable[..., Array],
) -> None:
    """On an example it has the rule's. What the kernel left unwritten came out as it lay there."""
    op = register_op(
        f"halved{id(meaning)}", meaning, examples=[Example((Arg((3, 8)),))],
        shape=lambda s, attrs: Meta((*s[0].shape[:-1], (s[0].shape[-1] + 1) // 2)),
    )  # fmt: skip
    graph = Graph.of({"y": op(input("x", (2, 5)))})
    told = r"%y: f32\[2, 3\] = .*: its meaning gives \[[23], 2\]"
    session = Session({"cpu": open_backend("cpu")})
    with pytest.raises(GraphError, match=told):
        session.prepare("k", graph)
    session.close()


@pytest.mark.parametrize("name", ["", "a b", "a-b", "a%", "1st"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="expected a name of letters, digits and underscores"):
        register_op(name, mish, examples=SMALL)


def test_a_meaning_cannot_change_what_others_read() -> None:
    """Each device that runs it in NumPy, and `evaluate`: the bytes of other values stay theirs."""
    bare("writes", writes)
    x = input("x", (3, 5))
    graph = Graph.of({"a": apply("writes", x), "b": x + 0})
    feeds = {"x": np.zeros((3, 5), np.float32)}
    with pytest.raises(ValueError, match="read-only"):
        evaluate(graph, feeds)
    for device in ("cpu", "sim0"):
        with pytest.raises((GgraphError, ValueError), match="read-only"):
            session = Session({device: open_backend(device)})
            session.prepare("k", graph)
            session.run("k", feeds)


def test_a_meaning_that_raises_in_a_run_says_which_tensor_it_computes() -> None:
    def small(x: Array) -> Array:
        if x.max() > 9:
            raise ArithmeticError("too large")
        y: Array = np.sort(x, -1)
        return y

    op = register_op("small", small, examples=SMALL[:1])
    x = input("x", (3, 5))
    graph = Graph.of({"y": op(op(x, name="first") + 9, name="second")})
    feeds = {"x": np.ones((3, 5), np.float32)}
    sessions = [Session({device: open_backend(device)}) for device in ("cpu", "sim0")]
    for session in sessions:
        session.prepare("k", graph)
    for run in (*(lambda s=s: s.run("k", feeds) for s in sessions), lambda: evaluate(graph, feeds)):
        with pytest.raises(ArithmeticError, match="too large") as error:
            run()
        assert error.value.__notes__ == ["computing %y: f32[3, 5] = small(%scale_2) -> out"]


def fresh(x: Array) -> Array:
    y = x.copy()
    y[:1] = 0
    return y


def wider(x: Array) -> Array:
    y = x.astype(np.float64)
    y[..., :1] = 0
    return y


def through_a_view(x: Array, kept: Array) -> Array:
    kept[2:][:1] = x
    return kept


def turned(x: Array, kept: Array) -> Array:
    kept.T[...] = np.ones((5, 4)) * x.T
    return kept


def every_other(x: Array, kept: Array) -> Array:
    kept[::2, :] = x
    return kept


def one_number(x: Array, kept: Array) -> Array:
    kept[1:3, 1:2] = 7
    return kept


def into_a_copy(x: Array, kept: Array) -> Array:
    kept.copy()[:1, :] = x
    return kept


@pytest.mark.parametrize(
    "meaning", [fresh, wider, through_a_view, turned, every_other, one_number, into_a_copy]
)
def test_what_a_meaning_writes_is_what_a_device_has(meaning: Callable[..., Array]) -> None:
    """Kernels of such meanings forgot what was written, or wrote it elsewhere."""
    args = (Arg((1, 5)), Arg((4, 5)))
    slot = 1 if "kept" in inspect.signature(meaning).parameters else None

    def shape(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
        return Meta(sources[-1].shape, sources[-1].dtype)

    given = args if slot else args[:1]
    register_op("w", meaning, examples=[Example(given)], shape=shape, overwrites=slot)
    assert all(c.error == 0 for c in check_op("w"))


def test_packages_bring_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one entry, whatever it is called; loaded again, they are there already."""
    known = dict(door.FOUND)
    (tmp_path / "someones_models.py").write_text(
        "from dataclasses import replace\n"
        "from models.families.llama import LLAMA\n"
        "BOTH = [replace(LLAMA, name=n, hf=(f'{n}ForCausalLM',)) for n in ('owl', 'elk')]\n"
    )
    info = tmp_path / "someones_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ggraph.architectures]\nzoo = someones_models:BOTH\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        door.load_installed()
        assert door.FOUND.keys() - known.keys() == {"owl", "elk"}
    door.FOUND.clear()
    door.FOUND.update(known)


def test_packages_bring_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's entry point is loaded and called."""
    (tmp_path / "someones_ops.py").write_text(
        "from ggraph import register_op\n"
        "from ggraph.tensor import Arg, Example\n"
        "def bring():\n"
        "    register_op('tripled', lambda x: 3 * x, examples=[Example((Arg((2, 2)),))])\n"
    )
    info = tmp_path / "someones_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ggraph.ops]\nown = someones_ops:bring\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_installed() == ("tripled",)
    assert check_op("tripled", ("cpu",))[0].compiled


@pytest.mark.parametrize("kernel", ["foo", b"foo", 5, True, 3.5, mish])
def test_a_kernel_is_a_c_function(kernel: object) -> None:
    with pytest.raises(GraphError, match="expected a C function of ctypes or numba"):
        address_of(kernel)
    with pytest.raises(GraphError, match="expected a C function of ctypes or numba"):
        register_op("fails", mish, examples=SMALL, kernel=kernel)
    assert "fails" not in OPS


def test_a_kernel_that_makes_another_zero_is_found_by_its_bits() -> None:
    want = np.array([0.0, -0.0, np.nan, 2.0], np.float32)
    assert _same_bits(want.copy(), want) and _same_bits(want * 1, want)
    for i, other in ((0, -0.0), (1, 0.0), (2, 0.0), (3, np.nextafter(np.float32(2), 3))):
        got = want.copy()
        got[i] = other
        assert not _same_bits(got, want)


@pytest.mark.parametrize("meaning", [int, lambda a: a + np.ones(7), lambda a: 3, lambda: 0])
def test_a_meaning_that_fails_on_its_examples_is_refused(meaning: Callable[..., Array]) -> None:
    with pytest.raises(GraphError, match=r"op 'fails': the meaning .* example 0"):
        register_op("fails", meaning, examples=[Example((Arg((3, 5)),))])
    assert "fails" not in OPS


def test_a_meaning_that_hangs_on_more_than_its_sources_is_refused() -> None:
    """A kernel is made from it once: every run had the same random numbers."""
    rng, calls = np.random.default_rng(0), iter(range(9))
    for odd in (lambda x: x + rng.random(x.shape, np.float32), lambda x: x * next(calls)):
        with pytest.raises(GraphError, match="another result on example 0 when it is asked again"):
            register_op("odd", odd, examples=[Example((Arg((3, 5)),))])
    assert "odd" not in OPS
    register_op("has_nans", lambda x: x * np.float32("nan"), examples=[Example((Arg((3, 5)),))])


def test_a_meaning_that_insists_on_arrays_is_numpys() -> None:
    """It has no kernel, which is made of what it does with symbols."""

    def asserts(x: Array) -> Array:
        assert isinstance(x, np.ndarray)
        return x * 2

    def refuses(x: Array) -> Array:
        if x.shape == (2, 3):
            raise RuntimeError("not so")
        return np.sort(x)

    given = np.ones((2, 3), np.float32)
    with Session({"cpu": open_backend("cpu")}) as session:
        insists = register_op("insists", asserts, examples=[Example((Arg((3, 5)),))])
        session.prepare("k", Graph.of({"y": insists(input("x", (2, 3)))}))
        assert session.run("k", {"x": given})["y"].tolist() == (given * 2).tolist()
        refused = register_op("refuses", refuses, examples=[Example((Arg((3, 5)),))])
        with pytest.raises(RuntimeError, match="not so") as error:
            session.prepare("r", Graph.of({"y": refused(input("x", (2, 3)))}))
        assert error.value.__notes__ == ["computing %y: f32[2, 3] = refuses(%x) -> out"]


def test_a_meaning_of_floats_is_not_cut_to_integers() -> None:
    whole = [Example((Arg((3, 5), I32, "ids:9"),))]
    with pytest.raises(GraphError, match=r"gives float64 on example 0, expected i32; `shape=`"):
        register_op("cut", lambda x: x * 1.5, examples=whole)
    with pytest.raises(GraphError, match=r"gives complex64 on example 0, expected f32"):
        register_op("cut", lambda x: x * np.complex64(1j), examples=[Example((Arg((3, 5)),))])
    assert "cut" not in OPS
    register_op("kept_whole", lambda x: x * 2, examples=whole)
