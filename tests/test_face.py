"""Tensors in expressions: numbers, broadcasting, indices, reductions, scopes; what is shown."""

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ggraph import (
    Array,
    Graph,
    InputError,
    Options,
    Session,
    Tensor,
    explain,
    input,
    open_backend,
    ops,
    scope,
    show,
    state,
    weight,
)
from ggraph.dtype import Q8_0
from ggraph.errors import ShapeError
from ggraph.formats import quantize
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, to_logical, to_storage
from ggraph.plan import Plan
from ggraph.verify import examine

RNG = np.random.default_rng(0)
A = RNG.standard_normal((3, 4, 5)).astype(np.float32)
B = RNG.standard_normal(5).astype(np.float32)
P = np.abs(A) + np.float32(0.1)
a, b, p = input("a", A.shape), input("b", B.shape), input("p", P.shape)


def over(x: Tensor) -> Tensor:
    e = ops.exp(x - x.max(0, keepdims=True))
    return e / e.sum(0, keepdims=True)


CASES: dict[str, tuple[Tensor, Array]] = {
    "1 - a": (1 - a, 1 - A), "a + 2": (a + 2, A + 2), "2 + a": (2 + a, 2 + A),
    "2 * a": (2 * a, 2 * A), "a / 4": (a / 4, A / 4), "1 / p": (1 / p, 1 / P),
    "a ** 2": (a**2, A**2), "a ** 3": (a**3, A**3), "p ** .5": (p**0.5, P**0.5),
    "p ** 1.7": (p**1.7, P**1.7), "2 ** a": (2**a, 2**A), "p ** a": (p**a, P**A),
    "a - b": (a - b, A - B), "b - a": (b - a, B - A), "b / p": (b / p, B / P),
    "outer": (b.reshape(5, 1) * b, B[:, None] * B), "abs": (abs(a), np.abs(A)),
    "a > b": (a > b, (A > B) * 1.0), "a >= .5": (a >= 0.5, (A >= 0.5) * 1.0),
    "a < 0": (a < 0, (A < 0) * 1.0), "a <= b": (a <= b, (A <= B) * 1.0),
    "a[np.int64]": (a[np.int64(1)], A[1]), "reshape": (a.reshape((5, 12)), A.reshape(5, 12)),
    "permute": (a.permute([2, 0, np.int64(1)]), A.transpose(2, 0, 1)),
    "a[0]": (a[0], A[0]), "a[-1]": (a[-1], A[-1]), "a[..., 1:3]": (a[..., 1:3], A[..., 1:3]),
    "a[:, 1]": (a[:, 1], A[:, 1]), "a[::2]": (a[::2], A[::2]),
    "a[:, ::3, 1::2]": (a[:, ::3, 1::2], A[:, ::3, 1::2]),
    "a[-1, :, None, 2]": (a[-1, :, None, 2], A[-1, :, None, 2]), "a[1:1]": (a[1:1], A[1:1]),
    "sum": (a.sum(), A.sum()), "sum(0)": (a.sum(0), A.sum(0)),
    "sum((0, -1))": (a.sum((0, -1)), A.sum((0, -1))), "min": (a.min(), A.min()),
    "mean(1)": (a.mean(1, keepdims=True), A.mean(1, keepdims=True)),
    "max(-1)": (a.max(-1), A.max(-1)), "cumsum(1)": (a.cumsum(1), A.cumsum(1)),
    "cumsum": (a.cumsum(), A.cumsum(-1)), "a dot b": (a @ b.reshape(5, 1), A @ B[:, None]),
    "where": (ops.where(a > 0, a, b), np.where(A > 0, A, B)),
    "maximum": (ops.maximum(a, b), np.maximum(A, B)),
    "minimum": (ops.minimum(a, b), np.minimum(A, B)),
    "where, numbers": (ops.where(a > 0, 1, 0.5), np.where(A > 0, 1, 0.5)),
    "where, all ways": (ops.where(b > 0, b, a), np.where(B > 0, B, A)),
    "where over columns": (ops.where(a[:, :1] > 0, a, b), np.where(A[:, :1] > 0, A, B)),
    "maximum of a number": (ops.maximum(0.5, a), np.maximum(0.5, A)),
    "minimum both ways": (ops.minimum(b, a[..., :1]), np.minimum(B, A[..., :1])),
    "pow of a number": (ops.pow(2, a), np.float32(2) ** A),
    "pow both ways": (ops.pow(p[0, 0], a), P[0, 0] ** A),
    "soft_max over 0": (over(a), np.exp(A) / np.exp(A).sum(0)),
}  # fmt: skip


def test_every_expression_means_what_numpys_does() -> None:
    graph = Graph.of({name: t for name, (t, _) in CASES.items()})
    feeds = {"a": A, "b": B, "p": P}
    session = Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True))
    session.prepare("k", graph)
    found, meant = session.run("k", feeds), evaluate(graph, feeds)
    session.close()
    for name, (_, want) in CASES.items():
        for got in (found[name], meant[name]):
            assert got.shape == np.shape(want), name
            assert np.allclose(got, want, atol=2e-6, rtol=2e-6), name


def turned(x: Any, r: np.random.Generator) -> Any:
    """A random view of a tensor or an array, of its sizes alone."""
    n = len(x.shape)
    if r.random() < 0.4:
        order = [int(i) for i in r.permutation(n)]
        return x.permute(order) if isinstance(x, Tensor) else x.transpose(order)
    lows = [int(r.integers(0, size // 3 + 1)) for size in x.shape]
    return x[tuple(slice(low, None, int(r.integers(1, 4))) for low in lows)]


def test_every_slice_is_a_view_of_whatever_layout_and_type() -> None:
    """Steps of what has gaps or another order were refused, as were rows of block types by steps;
    nothing is copied, and each result is what NumPy's is."""
    values = RNG.standard_normal((7, 9, 8)).astype(np.float32)
    rows = quantize(RNG.standard_normal((7, 3, 32)).astype(np.float32), Q8_0)
    made: dict[str, Tensor] = {"rows": input("r", (7, 3, 32), Q8_0)[1::2, ::2]}
    wanted = {"rows": rows[1::2, ::2]}
    for seed in range(30):
        x, want, ways = input("x", values.shape), values, (1, 2, 3, 4)
        for i in ways:
            x, want = (turned(v, np.random.default_rng([seed, i])) for v in (x, want))
        assert x.is_view and x.shape == want.shape, seed
        made[f"{seed}"], wanted[f"{seed}"] = x, want
    graph = Graph.of({n: ops.cont(x) for n, x in made.items()})
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", graph)
        found = session.run("k", {"x": values, "r": rows})
    for name, want in wanted.items():
        assert np.array_equal(found[name].reshape(want.shape), want), name


SHAPES = ((), (3,), (4,), (3, 4), (4, 3), (1, 4), (0, 4), (4, 0), (2, 3, 4), (2, 4, 3), (1, 4, 3),
          (4, 3, 4), (4, 4, 3), (2, 1, 3, 4), (2, 5, 4, 3), (5, 4, 3))  # fmt: skip


def test_the_length_is_that_of_the_first_axis() -> None:
    """As NumPy's, and as many as there are to go along."""
    for shape in ((3, 4, 5), (1,), (0, 2)):
        t = input("t", shape)
        assert len(t) == len(np.zeros(shape)) == len(list(t))


def test_products_are_numpys_and_refused_where_numpy_refuses() -> None:
    """Vectors on either side, leading axes that broadcast in both directions, nothing else."""
    made: dict[str, Tensor] = {}
    wanted: dict[str, Array] = {}
    fed: dict[str, Array] = {}
    for one, two in product(SHAPES, SHAPES):
        held = [RNG.standard_normal(s).astype(np.float32) for s in (one, two)]
        x, y = input(f"x{len(fed)}", one), input(f"y{len(fed)}", two)
        try:
            want = np.matmul(*held)
        except ValueError:
            with pytest.raises(ShapeError, match=rf"%{x.name} .* @ %{y.name} ") as refused:
                x @ y
            assert "transpose" not in str(refused.value) and "mul_mat" not in str(refused.value)
            continue
        name = f"{one} x {two}"
        made[name], wanted[name] = x @ y, want
        fed |= {x.name: held[0], y.name: held[1]}
    every = input("every", (9, 8))
    made["columns"] = every[:4, 1] @ every[4:8, ::2] @ every[1:5, 3]
    fed["every"] = e = RNG.standard_normal((9, 8)).astype(np.float32)
    wanted["columns"] = np.asarray(e[:4, 1] @ e[4:8, ::2] @ e[1:5, 3])
    graph = Graph.of(made)
    with Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True)) as session:
        session.prepare("k", graph)
        found, meant = session.run("k", fed), evaluate(graph, fed)
    assert len(made) > 60
    for name, want in wanted.items():
        for got in (found[name], meant[name]):
            assert got.shape == want.shape, name
            assert np.allclose(got, want, atol=1e-5), name


def test_numbers_beside_tensors_do_what_numpy_does() -> None:
    """To the bit, signs of zeros included: no reciprocal is taken, and no 0 added."""
    values = np.array([0.0, -0.0, 1, -1, 3, 7, 1e-39, 1e-45, 3e38, np.inf, np.nan], np.float32)
    values = np.concatenate([values, np.arange(1, 400, dtype=np.float32)])
    x = input("x", values.shape)
    ways: dict[str, Callable[[Any, float], Any]] = {
        "+": lambda v, c: v + c, "-": lambda v, c: v - c, "*": lambda v, c: v * c,
        "/": lambda v, c: v / c, "r+": lambda v, c: c + v, "r-": lambda v, c: c - v,
        "r*": lambda v, c: c * v, "r/": lambda v, c: c / v, "neg": lambda v, _: -v,
        "**1": lambda v, _: v**1, "gt": lambda v, c: v > c, "le": lambda v, c: v <= c,
    }  # fmt: skip
    numbers = (0.0, -0.0, 3, 0.1, -7, 2, 0.25, 1e-39, 3e38, 2.0**127)
    cases = {f"{name} {c!r}": (way, c) for name, way in ways.items() for c in numbers}
    made = {name: way(x, c) for name, (way, c) in cases.items()}
    graph = Graph.of(made)
    with Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True)) as session:
        session.prepare("k", graph)
        found, meant = session.run("k", {"x": values}), evaluate(graph, {"x": values})
    for name, (way, c) in cases.items():
        with np.errstate(all="ignore"):
            want = np.asarray(way(values, c), np.float32)
        for got in (found[name], meant[name]):
            assert np.array_equal(got, want, equal_nan=True), name
            there = ~np.isnan(want)
            assert np.array_equal(np.signbit(got)[there], np.signbit(want)[there]), name


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_numbers_beside_halves_keep_their_digits(dtype: str) -> None:
    """A number that the tensor's type does not hold was rounded to it, or to infinity, before."""
    x = input("x", (5,), dtype)
    values = to_logical(to_storage(np.array([0.1, -3, 7, 1000, 60000], np.float32), x), x)
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "x / c": lambda v, c: v / c, "c / x": lambda v, c: c / v, "c - x": lambda v, c: c - v,
        "x ** c": lambda v, c: v**c, "c ** x": lambda v, c: c**v, "x > c": lambda v, c: v > c,
    }  # fmt: skip
    cases = {f"{n} {c}": (way, c) for n, way in ways.items() for c in (1e5, 0.1, 1e-9, 0, 1.001)}
    made = {n: way(x, c) for n, (way, c) in cases.items()}
    made |= {f"pow {c}": ops.pow(c, abs(x)) for c in (1.001, 1e5)}
    assert all(y.dtype is x.dtype for y in made.values())
    graph = Graph.of(made)
    with Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True)) as session:
        session.prepare("k", graph)
        found = session.run("k", {"x": to_storage(values, x)})
    meant = evaluate(graph, {"x": values})
    cases |= {f"pow {c}": (lambda v, c: c ** np.abs(v), c) for c in (1.001, 1e5)}
    for name, (way, c) in cases.items():
        with np.errstate(all="ignore"):
            want = to_storage(np.asarray(way(values, np.float32(c)), np.float32), x)
        want = to_logical(want, x)
        for got in (to_logical(found[name], x), meant[name]):
            assert np.allclose(got, want, 8e-3 if dtype == "bf16" else 1e-3, equal_nan=True), name


@pytest.mark.parametrize("by", [1e-310, -1e-310, 5e-324, 3.0, 1e-300, 1e308, 1.7e308, np.inf])
def test_doubles_are_divided_by_any_number(by: float) -> None:
    """To the bit, and so do numbers divided by them: no digits of a reciprocal are lost."""
    values = np.array([0.0, -0.0, 1e-320, 1.0, -7e-305, 1e300, np.inf, np.nan])
    x = input("x", values.shape, "f64")
    graph = Graph.of({"y": x / by, "z": by / x})
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", graph)
        found, meant = session.run("k", {"x": values}), evaluate(graph, {"x": values})
    with np.errstate(all="ignore"):
        want = {"y": values / by, "z": by / values}
    for name in want:
        assert np.array_equal(found[name], want[name], equal_nan=True), name
        assert np.array_equal(meant[name], want[name], equal_nan=True), name


@pytest.mark.parametrize("left", ["f32", "f16", "f64"])
@pytest.mark.parametrize("right", ["f32", "f16", "f64", "number"])
def test_comparisons_are_made_in_the_wider_type(left: str, right: str) -> None:
    """The difference of two that are not equal rounded to 0 in the narrower one."""
    fine = 1e-60 if "f64" in (left, right) else 1e-9
    x, y = input("x", (3,), left), input("y", (1,), "f32" if right == "number" else right)
    given = {"x": np.array([0, 1, -1], np.float32), "y": np.array([fine], np.float32)}
    if left == "f64":
        fine, given["x"] = 1e-60, given["x"].astype(np.float64)
    if right == "f64":
        given["y"] = np.array([fine], np.float64)
    other: Tensor | float = fine if right == "number" else y
    small = fine if right in ("number", "f64") else examples.rounded(given["y"], y)[0]
    made = {"lt": x < other, "gt": x > other, "le": x <= other, "ge": x >= other}
    assert all(str(t.dtype) == left for t in made.values())
    graph = Graph.of({**made, "eq": ops.equal(x, other)})
    fed = {n: a for n, a in given.items() if n != "y" or right != "number"}
    stored = {n: to_storage(a, graph[n]) for n, a in fed.items()}
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("k", graph)
        for got in (session.run("k", stored), evaluate(graph, stored)):
            v = given["x"].astype(np.float64)
            for name, want in {"lt": v < small, "gt": v > small, "le": v <= small,
                               "ge": v >= small, "eq": v == small}.items():  # fmt: skip
                assert np.array_equal(got[name].astype(bool), want), name


def test_comparisons_of_what_is_no_number_are_numpys() -> None:
    special = np.array([-np.inf, -1, -0.0, 0, 1, np.inf, np.nan], np.float32)
    left, right = (v.ravel() for v in np.meshgrid(special, special))
    x, y = input("x", left.shape), input("y", right.shape)
    made = {
        "gt": x > y,
        "ge": x >= y,
        "lt": x < y,
        "le": x <= y,
        "n": x >= 0,
        "m": x <= np.nan,
        "eq": ops.equal(x, y),
    }
    graph = Graph.of(made)
    session = Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True))
    session.prepare("k", graph)
    got = session.run("k", {"x": left, "y": right})
    session.close()
    meant = {
        "gt": left > right, "ge": left >= right, "lt": left < right, "le": left <= right,
        "n": left >= 0, "m": left <= np.nan, "eq": left == right,
    }  # fmt: skip
    for name, want in meant.items():
        assert np.array_equal(got[name], want), name


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: a[7], "index 7 is outside an axis of 3"),
        (lambda: a[::-1], "a step of -1; views run forwards"),
        (lambda: a[0, 0, 0, 0], "4 indices for 3 axes"),
        (lambda: a[[0, 1]], "expected a number or a slice"),
        (lambda: a[0.5], "expected a number or a slice"),
        (lambda: a - [1, 2], "feed an array as an input"),
        (lambda: a - np.zeros(5), "feed an array as an input"),
        (lambda: np.zeros(5) - a, "feed an array as an input"),
        (lambda: a * True, "expected a tensor or a number"),
        (lambda: a * np.complex64(1j), "expected a tensor or a number"),
        (lambda: a @ 2, "expected a tensor"),
        (lambda: [[1.0]] @ a, "expected a tensor"),
        (lambda: a[1:2.5], "expected whole numbers"),
        (lambda: a.sum("x"), "axis 'x': expected a whole number"),
        (lambda: a.max(0.5), "axis 0.5: expected a whole number"),
        (lambda: a.cumsum(3), "3 is none of its 3 axes"),
        (lambda: a.cumsum(None), "axis None: expected a whole number"),
        (lambda: a.reshape("x"), "size 'x': expected a whole number"),
        (lambda: a.permute(0, 1, 2.0), "axis 2.0: expected a whole number"),
        (lambda: bool(a > 0), "no truth before it is computed"),
        (lambda: np.asarray(a), "no values before it is computed"),
        (lambda: float(a.sum()), "no values before it is computed"),
        (lambda: int(a.sum()), "no values before it is computed"),
        (lambda: math.exp(a.sum()), "no values before it is computed"),
        (lambda: len(a.sum()), "a scalar has no axis to go along"),
        (lambda: list(a.sum()), "a scalar has no axis to go along"),
        (lambda: a * input("z", (7,)), r"cannot broadcast \[3, 4, 5\] of %a and \[7\] of %z"),
        (lambda: a[::0], "a step of 0; views run forwards"),
        (lambda: a + 10**400, "beyond what a float can hold"),
        (lambda: 10**400 - a, "beyond what a float can hold"),
        (lambda: a * 10**400, "beyond what a float can hold"),
        (lambda: a / 10**400, "beyond what a float can hold"),
        (lambda: 10**400 / a, "beyond what a float can hold"),
        (lambda: a**10**400, "beyond what a float can hold"),
        (lambda: a < 10**400, "beyond what a float can hold"),
        (lambda: a >= 10**400, "beyond what a float can hold"),
        (lambda: ops.scale(a, 10**400), "expected a number"),
        (lambda: ops.maximum(a, 10**400), "or a number"),
        (lambda: np.sum(a), r"np.sum of %a.*write x.sum\("),
        (lambda: np.cumsum(a, axis=0), r"write x.cumsum\("),
        (lambda: np.concatenate([a, a]), "see ggraph.ops"),
        (lambda: a @ weight("q", (32, 32), "q8_0"), "q8_0 is no plain float type; see ops.mul_mat"),
        (lambda: a.sum(3), r"axes \[3\] are not axes"),
        (lambda: a.mean((2, -1)), r"axes \[2, 2\] are not axes"),
        (lambda: input("e", (0, 2)).max(0), "max over no element"),
        (lambda: ops.where(1, 2, 3), "where: condition=1: expected a tensor"),  # type: ignore[arg-type]
        (lambda: ops.maximum(1, 2), "maximum: .*: expected a tensor among them"),
        (lambda: ops.minimum(a, a[:, :3]), r"minimum: cannot broadcast \[3, 4, 5\] of %a and"),
    ],
)
def test_what_is_no_expression_is_a_shape_error(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        wrong()


@pytest.mark.parametrize(
    ("name", "said"),
    [("softmax", r"ops\.soft_max"), ("matmul", r"x @ y, or ops\.mul_mat"), ("clip", r"ops\.clamp"),
     ("nonsense", r"library\.md")],
)  # fmt: skip
def test_an_op_by_another_librarys_name_says_ours(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=rf"ggraph.ops has no '{name}'.*{said}"):
        getattr(ops, name)
    assert not hasattr(ops, name)
    told = re.findall(r"ops\.(\w+)", " ".join(ops._PEERS.values()))
    assert set(told) <= set(ops.__all__)


def test_scopes_stand_before_names_and_not_in_plans() -> None:
    with scope("blk.3"):
        w = weight("w", (4, 4))
        with scope("attn"):
            q = (input("x", (2, 4)) @ w).named("q")
        graph = Graph.of({"y": ops.cont(q)})
        session = Session({"cpu": open_backend("cpu", threads=1)})
        session.prepare("k", graph, {"blk.3.w": np.eye(4, dtype=np.float32)})
    assert {"blk.3.w", "blk.3.attn.x", "blk.3.attn.q", "y"} <= {t.name for t in graph}
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    assert np.array_equal(session.run("k", {"blk.3.attn.x": x})["y"], x)
    session.close()
    assert weight("w", (1,)).name == "w"


def test_a_plan_prints_and_every_noun_is_shown() -> None:
    graph = Graph.of({"y": (a * 2).sum(0)})
    session = Session({"cpu": open_backend("cpu", threads=1, profile=True)})
    verified = session.prepare("k", graph)
    assert str(verified).startswith("plan of 'graph'\nverified: ")
    assert "\nplace y " in show(verified) and "\nplace y " not in str(verified)
    assert str(verified.plan.schedule.commands[0]) in show(verified.plan)
    assert json.loads(show(verified, "json"))["graph"] == "graph"
    assert json.loads(show(graph, "json"))["tensors"][0]["name"] == "a"
    assert show(graph, "dot").startswith("digraph") and "<html" in show(verified, "html")
    assert show(explain(verified, "y")).startswith("y\n")
    assert "reads_proved" in show(verified.certificate)
    schedule, memory = verified.plan.schedule, verified.plan.memory
    for noun in (schedule.splits.placement, schedule.splits, memory):
        assert "cpu" in show(noun) and json.loads(show(noun, "json"))
    lost = Plan(replace(schedule, commands=schedule.commands[:1]), memory)
    assert "verify refuses this plan" in show(lost, "html")
    assert json.loads(show(examine(lost), "json"))["kind"] in show(examine(lost))  # type: ignore[arg-type]
    assert show(verified, "html")._repr_html_().startswith("<iframe")  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="a Graph has no html; it has text, dot, json"):
        show(graph, "html")
    with pytest.raises(InputError, match="cannot show 3"):
        show(3)
    table = session.profile("k", {"a": A}, runs=2)
    assert table.splitlines()[0].startswith("'k': ") and "chain" in table
    session.close()
    plain = Session({"cpu": open_backend("cpu", threads=1)})
    plain.prepare("k", graph)
    with pytest.raises(InputError, match="profile=True"):
        plain.profile("k", {"a": A})
    plain.close()


def test_a_selective_scan_is_mambas_recurrence_in_one_graph_and_row_by_row() -> None:
    rows, heads, width, size, groups = 7, 4, 3, 5, 2
    shapes = {
        "state": (heads, width, size), "x": (rows, heads, width), "dt": (rows, heads),
        "a": (heads, size), "b": (rows, groups, size), "c": (rows, groups, size),
    }  # fmt: skip
    rng = np.random.default_rng(7)
    fed = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    fed["a"] = -np.abs(fed["a"])
    held, wanted = fed["state"].astype(np.float64), np.empty(shapes["x"])
    for t in range(rows):
        for h in range(heads):
            step, g = np.log1p(np.exp(fed["dt"][t, h])), h // (heads // groups)
            taken = step * np.outer(fed["x"][t, h], fed["b"][t, g])
            held[h] = held[h] * np.exp(fed["a"][h] * step) + taken
            wanted[t, h] = held[h] @ fed["c"][t, g]
    session = Session({"cpu": open_backend("cpu", threads=1)}, Options(strict=True))
    y, after = ops.ssm_scan(*(input(n, s) for n, s in shapes.items()))
    session.prepare("whole", Graph.of({"y": y, "after": after}))
    found = session.run("whole", fed)
    assert np.allclose(found["y"], wanted, atol=1e-5)
    assert np.allclose(found["after"], held, atol=1e-5)
    one = {n: (1, *s[1:]) if n in ("x", "dt", "b", "c") else s for n, s in shapes.items()}
    kept = state("kept", shapes["state"])
    y, after = ops.ssm_scan(kept, *(input(n, s) for n, s in one.items() if n != "state"))
    session.prepare("row", Graph.of({"y": y}, also=[ops.cpy(after, kept)]))
    session.write_state("kept", fed["state"])
    steps = {n: v[:, None] if n != "a" else v for n, v in fed.items() if n != "state"}
    assert np.allclose(session.scan("row", steps)["y"][:, 0], wanted, atol=1e-5)
    session.close()
    with pytest.raises(ShapeError, match=r"ssm_scan\(state .*expected f32 x \[T, H, D\]"):
        ops.ssm_scan(*(input(n, (*s[:-1], 2)) for n, s in shapes.items()))


def test_what_torch_has_as_a_method_is_told_as_an_op() -> None:
    x = input("x", (2, 3))
    with pytest.raises(AttributeError, match=r"a tensor has no 'relu': ops\.relu\(x\)"):
        x.relu()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"a tensor has no 'softmax'; .* in ggraph\.ops"):
        x.softmax()  # type: ignore[attr-defined]
    assert not hasattr(x, "relu") and copy.copy(x).shape == (2, 3)
