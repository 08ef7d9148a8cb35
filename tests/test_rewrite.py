"""Rewrites keep every output's value and make the graph smaller."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import ops
from ggraph.device import DeviceSpec
from ggraph.dtype import F32, I32, Q4_0
from ggraph.errors import GraphError, InputError
from ggraph.formats.quants import quantize
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.ops.fused import FEW_ROWS
from ggraph.pipeline import make_plan
from ggraph.rewrite import RULES, Known, Rule, drop_identities, merge_duplicates, rewrite
from ggraph.tensor import Kind, Tensor, frozen, input, state, weight


def names(g: Graph) -> list[str]:
    return [t.name for t in g]


def test_equal_results_are_computed_once() -> None:
    x, y = input("x", (4,)), input("y", (4,))
    g = merge_duplicates(Graph.of({"out": ops.mul(x + y, x + y)}))
    assert names(g) == ["x", "y", "add_2", "out"]
    assert g["out"].sources[0] is g["out"].sources[1]


def test_different_attributes_stay_apart() -> None:
    x = input("x", (4,))
    g = Graph.of({"out": ops.scale(x, 2.0) + ops.scale(x, 3.0)})
    assert len(merge_duplicates(g).nodes) == 3


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: ((1, x),)])
def test_zeros_of_two_signs_are_not_the_same(form: Callable[[float], Any]) -> None:
    keys = [frozen({"w": form(x)}) for x in (0.0, -0.0, 0.0)]
    assert keys[0] == keys[2] != keys[1] and len({*keys}) == 2
    assert frozen({"w": form(1)}) != frozen({"w": form(2)})


def test_outputs_are_never_merged_away() -> None:
    x = input("x", (4,))
    g = merge_duplicates(Graph.of({"a": x + x, "b": x + x}))
    assert {t.name: t.op for t in g.outputs} == {"a": "add", "b": "add"}


def test_a_copy_of_a_leaf_or_of_a_changed_state_stays() -> None:
    x, s = input("x", (4, 8)), state("s", (4, 8))
    changed = ops.set_rows(s, x, input("i", (4,), I32))
    for source, copies in ((x, 1), (s, 1), (changed, 1), (ops.tanh(x), 0)):
        g = drop_identities(Graph.of({"out": ops.add(ops.cont(source), x)}))
        assert [t.op for t in g.nodes].count("cont") == copies, source


def test_few_rows_of_a_gated_unit_are_counted_over_all_axes_but_the_last() -> None:
    spec = DeviceSpec("cpu", "cpu", fused=frozenset({"mul_mat_gated"}))
    gates, ups = weight("gates", (4, 8, 32)), weight("ups", (4, 8, 32))
    for rows, each, taken in ((FEW_ROWS, 1, 1), (FEW_ROWS, 2, 0), (FEW_ROWS + 1, 1, 0)):
        x, ids = input("x", (rows, 1, 32)), input("ids", (rows, each), I32)
        unit = ops.swiglu(ops.mul_mat_id(gates, x, ids), ops.mul_mat_id(ups, x, ids))
        made = [t.op for t in rewrite(Graph.of({"y": unit}), [spec]).nodes]
        assert made.count("mul_mat_gated") == taken, (rows, each)


def test_a_scale_that_changes_nothing_goes() -> None:
    x = input("x", (4,))
    g = drop_identities(Graph.of({"out": ops.scale(x + x, 1.0) + x}))
    assert [t.op for t in g.nodes] == ["add", "add"]


@given(
    st.lists(st.tuples(st.sampled_from("asm"), st.integers(0, 9), st.integers(0, 9)), max_size=8)
)
def test_rewriting_keeps_the_meaning(steps: list[tuple[str, int, int]]) -> None:
    """Evaluate the graph as a polynomial in x at two points, before and after."""
    x = input("x", (2,))
    made: list[Tensor] = [x]
    for kind, i, j in steps:
        a, b = made[i % len(made)], made[j % len(made)]
        made.append({"a": ops.add, "s": ops.sub, "m": ops.mul}[kind](a, b))
    g = Graph.of({"out": ops.add(made[-1], x)})
    after = drop_identities(merge_duplicates(g))
    for point in (2, 3):
        assert value(g["out"], point) == value(after["out"], point)
    assert len(after.nodes) <= len(g.nodes)


Step = Callable[[Tensor], Tensor]
MADE: tuple[Step, ...] = (ops.relu, lambda t: t + t, lambda t: ops.relu(t) + ops.relu(t))
SHOWN: tuple[Step, ...] = (
    lambda t: t.permute(*reversed(range(len(t.shape)))),
    lambda t: t[:, 1:],
    lambda t: t[1:],
)
COPIED: tuple[Step, ...] = (
    lambda t: t * 1.0,
    lambda t: t**1,
    ops.cont,
    lambda t: ops.cast(t, t.dtype),
)
USED: tuple[Step, ...] = (lambda t: t.reshape(-1), lambda t: t.reshape(2, -1), ops.relu)
ROUND = st.tuples(*map(st.sampled_from, (MADE, SHOWN, COPIED, USED)))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@given(st.lists(ROUND, min_size=1, max_size=3))
def test_a_rule_keeps_what_users_of_a_tensor_see(rule: Rule, rounds: list[Sequence[Step]]) -> None:
    """Shape, type and strides of all that stays, and every bit of the result. Steps that do not fit
    are left out."""
    t = input("x", (4, 6))
    for i, step in enumerate(step for steps in rounds for step in steps):
        with suppress(GraphError, InputError):
            t = step(t).named(f"n{i}")
    graph = Graph.of({"out": ops.relu(t)})
    known = Known(EIGHT | {"chain", "mul_mats"}, {}, lambda t: True)
    changed = rule.change(graph, known)
    before = {t.name: (t.shape, t.dtype, t.strides) for t in graph}
    after = {t.name: (t.shape, t.dtype, t.strides) for t in changed}
    assert {n: seen for n, seen in after.items() if n in before} == {
        n: seen for n, seen in before.items() if n in after
    }
    x = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)
    first, second = (evaluate(g, {"x": x})["out"] for g in (graph, changed))
    assert first.tobytes() == second.tobytes()


def value(t: Tensor, x: int) -> int:
    if t.is_leaf:
        return x
    a, b = (value(s, x) for s in t.sources)
    return {"add": a + b, "sub": a - b, "mul": a * b}[t.op]


def quantised_block(rows: int = 3, *, shown: bool = False) -> Graph:
    """A norm read by two products, a gated unit, and a residual that is read twice; what opens the
    unit may be `shown`, so that a product is no part of it."""
    x = input("x", (rows, 64))
    w = [weight(f"w{i}", (64, 64), Q4_0) for i in range(4)]
    h = ops.mul_mat(w[0], x) + x
    n = ops.mul(ops.rms_norm(h, eps=1e-5), weight("scale", (64,)), name="n")
    gate, up = ops.mul_mat(w[1], n, name="gate"), ops.mul_mat(w[2], n, name="up")
    out = h + ops.mul_mat(w[3], ops.swiglu(gate, up, name="act"))
    return Graph.of({"out": out, **({"shown": gate} if shown else {})})


EIGHT = frozenset(
    {"rms_norm_mul", "mul_mat_add", "quantise", "rms_norm_quantise", "swiglu_quantise"}
)


def picky(t: Tensor) -> bool:
    """Kernels of rows without gaps, and a `cont` of whatever has some; none of `relu`."""
    whole = all(s.is_contiguous for s in t.sources)
    return t.op == "cont" or (whole and t.op != "relu")


def test_windows_are_copied_once_for_all_that_take_no_gaps() -> None:
    x = input("x", (4, 6))
    wide = ops.add(x, x)
    window = ops.columns(wide, 1, 3)
    plain = ops.rows(wide, 1, 2)
    out = {
        "a": ops.mul(window, window), "b": ops.exp(window), "c": ops.relu(window),
        "d": ops.mul(plain, plain), "e": window.reshape(2, 2, 3) * 2.0, "f": ops.exp(window.T),
    }  # fmt: skip
    graph = Graph.of(out)
    changed = rewrite_by("copy_windows", graph, picky)
    made = [t for t in changed.nodes if t.op == "cont"]
    assert [t.sources[0].op for t in made] == ["slice", "reshape", "transpose"]
    assert changed["a"].sources == (made[0], made[0]) and changed["b"].sources == (made[0],)
    assert changed["c"].sources[0].op == "slice", "what has no kernel either way stays as it is"
    assert changed["d"].sources[0].op == "slice"
    given = {"x": np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)}
    before, after = evaluate(graph, given), evaluate(changed, given)
    assert all(np.array_equal(before[n], after[n]) for n in out)


def test_one_window_among_what_has_no_gaps_is_copied_and_the_rest_is_not() -> None:
    x = input("x", (4, 3))
    wide, plain = ops.tanh(input("w", (4, 6))), ops.exp(x)
    graph = Graph.of({"y": ops.mul(ops.columns(wide, 1, 3), plain)})
    changed = rewrite_by("copy_windows", graph, picky)
    assert [s.op for s in changed["y"].sources] == ["cont", "exp"]


def test_nothing_is_copied_where_a_copy_would_have_no_kernel() -> None:
    """Nor where the reader has none either way; what is not copied is not asked for."""
    wide = ops.tanh(input("w", (4, 6)))
    whole = ops.relu(input("x", (4, 3)))
    graph = Graph.of({"y": ops.mul(ops.columns(wide, 1, 3), whole)})
    for without, copies in (("cont", 0), ("mul", 0), ("relu", 1)):
        runs = lambda t, op=without: t.op != op and (t.op == "cont" or picky(t))  # noqa: E731
        changed = rewrite_by("copy_windows", graph, runs)
        assert [t.op for t in changed.nodes].count("cont") == copies, without


def test_a_kernel_counts_where_every_device_supports_and_has_it() -> None:
    wide = ops.tanh(input("w", (4, 6)))
    graph = Graph.of({"y": ops.exp(ops.columns(wide, 1, 3))})
    whole = lambda t: t.op == "cont" or all(s.is_contiguous for s in t.sources)  # noqa: E731
    able = DeviceSpec("a", "sim")
    has = replace(able, name="b", compiled=whole)
    lacks = replace(has, ops=frozenset({"tanh", "cont"}))
    for devices, copies in (([has], 1), ([able, has], 1), ([able], 0), ([lacks], 0)):
        made = [t.op for t in rewrite(graph, devices).nodes]
        assert made.count("cont") == copies, (devices, made)


def rewrite_by(name: str, graph: Graph, runs: Callable[[Tensor], bool]) -> Graph:
    """One rule, where devices have kernels as `runs` says."""
    (rule,) = (r for r in RULES if r.name == name)
    return rule.change(graph, Known(frozenset(), {}, runs))


def test_rows_become_8_bits_once_for_all_their_products() -> None:
    spec = DeviceSpec("cpu", "cpu", fused=EIGHT)
    graph = rewrite(quantised_block(), [spec])
    assert [t.op for t in graph.nodes] == [
        "quantise", "mul_mat_add", "rms_norm_quantise", "mul_mat", "mul_mat", "swiglu_quantise",
        "mul_mat_add",
    ]  # fmt: skip
    assert graph["gate"].sources[1] is graph["up"].sources[1]
    data = {t.name: np.random.default_rng(3).normal(size=t.shape) for t in graph.leaves(Kind.INPUT)}
    values = {n: v.astype(np.float32) for n, v in data.items()}
    for t in graph.leaves(Kind.WEIGHT):
        numbers = np.random.default_rng(len(t.name)).normal(size=t.shape).astype(np.float32)
        values[t.name] = quantize(numbers, Q4_0) if t.dtype is Q4_0 else numbers
    before, after = (evaluate(g, values)["out"] for g in (quantised_block(), graph))
    assert np.abs(before - after).max() < 2e-2 * np.ptp(before)


def test_what_others_read_keeps_its_32_bits() -> None:
    x = input("x", (3, 64))
    n = ops.mul(ops.rms_norm(x, eps=1e-5), weight("scale", (64,)), name="n")
    wide = ops.mul_mat(weight("f", (8, 64)), n)
    narrow = ops.mul_mat(weight("q", (8, 64), Q4_0), n)
    spec = DeviceSpec("cpu", "cpu", fused=EIGHT)
    graph = rewrite(Graph.of({"a": wide, "b": narrow}), [spec])
    assert sorted(t.op for t in graph.nodes) == ["mul_mat", "mul_mat", "quantise", "rms_norm_mul"]
    assert graph["n@a8"].sources[0] is graph["n"]


def test_one_device_that_knows_no_8_bits_is_enough() -> None:
    both = [DeviceSpec("cpu", "cpu", fused=EIGHT), DeviceSpec("sim0", "sim")]
    ops_left = {t.op for t in rewrite(quantised_block(), both).nodes}
    assert ops_left == {"mul_mat", "add", "rms_norm", "mul", "swiglu"}


def kept_and_overwritten() -> dict[str, Tensor]:
    """An op that reads a value before something else replaces it, for every rule; the results."""
    s, x = state("s", (4, 8)), input("x", (4, 8))
    i, p = input("i", (4,), I32), input("p", (4,), I32)
    vector, square = weight("v", (8,)), weight("w", (8, 8))
    z = ops.add(x, x)
    found: dict[str, Tensor] = {}
    for name, old in (("state", s), ("value", z)):
        new = ops.set_rows(old, x, i)
        heads = old.reshape(4, 2, 4)
        readers = {
            "product": ops.mul_mat(square, old),
            "product of the other side": ops.mul_mat(old, x).reshape(2, 8),
            "norm": ops.mul(ops.rms_norm(old), vector),
            "copy": ops.cont(old),
            "two copies": ops.add(ops.cont(old), ops.dup(old)),
            "view": ops.scale(ops.rows(old, 0, 2), 1.0),
            "rope": ops.set_rows(state("t", (4, 2, 4)), ops.rope(heads, p, n_rot=4), i),
        }
        for what, read in readers.items():
            flat = read.reshape(-1, 8)
            found[f"{what} of a {name}"] = ops.add(flat, ops.rows(new, 0, flat.shape[0]))
    a, b = ops.scale(x, 2.0), ops.scale(x, 2.0)
    found["of two equal values one is overwritten"] = ops.add(b, ops.set_rows(a, x, i))
    c = ops.cont(ops.add(x, x))
    found["a copy is overwritten"] = ops.add(ops.set_rows(c, x, i), ops.add(x, x))
    return found


@pytest.mark.parametrize("what", sorted(kept_and_overwritten()))
def test_what_is_overwritten_is_read_before(what: str) -> None:
    """No rule lets a reader of the old value wait for what holds the new one: a sound graph stays
    sound, and its meaning is the same."""
    graph = Graph.of({"out": kept_and_overwritten()[what]})
    spec = DeviceSpec("cpu", "cpu", fused=EIGHT | {"rope_set_rows"})
    values = {
        t.name: np.random.default_rng(3).normal(size=t.shape).astype(np.float32)
        if t.dtype is F32
        else np.arange(4, dtype=np.int32)[::-1]
        for t in graph
        if t.is_leaf
    }
    before, after = (evaluate(g, values)["out"] for g in (graph, rewrite(graph, [spec])))
    assert np.abs(before - after).max() <= 1e-5 * np.abs(before).max()
    make_plan(graph, [replace(spec, host_visible=True)])


def test_what_is_wanted_on_two_devices_is_computed_on_both() -> None:
    x = input("x", (3, 4))
    a, b = ops.add(x, x, name="a"), ops.add(x, x, name="b")
    graph = Graph.of({"y": ops.mul(a, a, name="c"), "z": ops.mul(b, x, name="d")})
    both = dict.fromkeys("ab", "sim0")
    for there, count in (({"a": "sim0", "b": "sim1"}, 2), (both, 1), ({}, 1)):
        kept = [t for t in rewrite(graph, [], homes=there).nodes if t.op == "add"]
        assert len(kept) == count, there
