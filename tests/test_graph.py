"""The DSL's values: naming, ordering, views, overwrites, and what is refused."""

import copy
import pickle
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ggraph.ops.elementwise as ops
from ggraph.dtype import F16, F32, I32, I64, Q4_0, DType
from ggraph.errors import GraphError, ShapeError
from ggraph.face import scope
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.ops.recurrent import ssm_conv, ssm_conv_next
from ggraph.ops.rows import set_rows
from ggraph.ops.shape import narrow, permute, view
from ggraph.strides import contiguous
from ggraph.tensor import Kind, Tensor, input, leaf, state, weight


def test_operators_build_ops_and_a_graph_names_them() -> None:
    x = input("x", (2, 3))
    g = Graph.of({"y": (x + x) * 2.0})
    assert [t.name for t in g] == ["x", "add_1", "y"]
    assert g["y"].is_output and not g["add_1"].is_output
    assert repr(g["add_1"]) == "%add_1: f32[2, 3] = add(%x, %x)"
    assert g.to_networkx().number_of_edges("x", "add_1") == 2


def test_a_copy_is_the_thing_itself_and_other_processes_make_their_own() -> None:
    g = Graph.of({"y": input("x", (2, 3)) * 2.0})
    for value in (g, g["y"]):
        assert copy.copy(value) is value and copy.deepcopy([value])[0] is value
        with pytest.raises(GraphError, match="cannot be pickled: make it in each process"):
            pickle.dumps(value)


def test_strides_are_bytes_and_block_rows_are_whole_blocks() -> None:
    assert contiguous((2, 3, 4), F32) == (48, 16, 4)
    assert contiguous((3, 64), Q4_0) == (36, 18)
    assert contiguous((), F32) == () and contiguous((0, 4), F32) == (16, 4)
    for negative in ((-1, 4), (4, -1), (-2, -2)):
        with pytest.raises(ShapeError, match="negative size in shape"):
            contiguous(negative, F32)
    with pytest.raises(ShapeError, match="33 elements"):
        contiguous((3, 33), Q4_0)
    for shape in ((1 << 60,), (2, 1 << 59), (1 << 59, 2), (1 << 20, 1 << 20, 1 << 20)):
        assert contiguous(shape, F32)[-1] == 4  # all that may be held
        with pytest.raises(ShapeError, match="more than"):
            contiguous((*shape[:-1], shape[-1] + 1), F32)


def test_duplicate_names_and_nameless_leaves_are_refused() -> None:
    x = input("x", (2,))
    with pytest.raises(GraphError, match="two tensors are called 'x'"):
        Graph.of([ops.add(input("x", (1, 2)), x)])
    with pytest.raises(GraphError, match="expected a name"):
        leaf(Kind.INPUT, "", (2,), F32)


def test_broadcast_names_the_culprit() -> None:
    with pytest.raises(ShapeError, match=r"\[3\] of %b into \[2\]"):
        ops.add(input("a", (2,)), input("b", (3,)))


def test_leaves_that_are_alike_are_one() -> None:
    """A layer may ask for the same weight, input or state again; only what differs is refused."""

    def part() -> Tensor:
        return ops.add(input("x", (2, 4)), weight("w", (4,), "f32"))

    s = state("s", (2, 4))
    new = set_rows(state("s", (2, 4)), part(), input("i", (2,), "i32"))
    g = Graph.of({"y": part() + part(), "new": new * 1.0, "old": s * 2.0})
    assert [t.name for t in g if t.is_leaf] == ["x", "w", "s", "i"]
    order = [t.name for t in g]
    assert g.updates["s"].op == "set_rows" and order.index("old") < order.index(g.updates["s"].name)
    for other in (weight("w", (4, 1)), weight("w", (4,), "f16"), input("w", (4,))):
        with pytest.raises(GraphError, match="two tensors are called 'w'"):
            Graph.of([part() + part(), other])


def test_names_of_ours_give_way_to_the_users() -> None:
    x = input("x", (2,))
    g = Graph.of({"y": ops.add(ops.add(x, x), ops.scale(x, 2.0, name="add_1"))})
    assert [t.name for t in g] == ["x", "add_1_", "add_1", "y"]


@pytest.mark.parametrize(
    "outputs", [None, 3, {"y": 3}, {"": "x"}, {3: "x"}, ["x", 3], [None], "x", {"y": None}]
)
def test_what_is_no_output_is_told(outputs: object) -> None:
    x = input("x", (2,))
    given = outputs
    if isinstance(outputs, dict):
        given = {k: x if v == "x" else v for k, v in outputs.items()}
    elif isinstance(outputs, list):
        given = [x if v == "x" else v for v in outputs]
    elif outputs == "x":
        given = x
    with pytest.raises(GraphError, match=r"^outputs: "):
        Graph.of(given)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"^also: "):
        Graph.of({"y": x}, also=x if outputs == "x" else [outputs])  # type: ignore[arg-type, list-item]


def test_a_graph_of_nothing_is_refused() -> None:
    """It would run, and give nothing; one that only changes a state has that to do."""
    for nothing in ({}, [], ()):
        with pytest.raises(GraphError, match="graph 'g': no outputs"):
            Graph.of(nothing, name="g")
    kept = set_rows(state("s", (2, 1)), input("x", (1, 1)), input("i", (1,), I32))
    assert set(Graph.of({}, also=[kept]).updates) == {"s"}


def test_of_two_overwrites_of_one_value_both_are_named() -> None:
    s, x = state("s", (4, 2)), input("x", (4, 2))
    one, other = (set_rows(s, x, input(n, (4,), I64)) for n in ("i", "j"))
    with pytest.raises(GraphError, match=r"%s, %x, %i\) and .*%s, %x, %j\) both overwrite %s: let"):
        Graph.of({"a": one, "b": other})
    after = set_rows(one, x, input("j", (4,), I64))
    assert Graph.of({"a": after}).updates["s"].op == "set_rows"


def test_what_has_no_name_yet_is_told_by_its_op() -> None:
    s, i = state("s", (4, 2)), input("i", (2,), I64)
    for whole, said in ((s, "s"), (s + 1, "scale")):
        with pytest.raises(GraphError, match=rf"source 1 \(%slice\) shows bytes of %{said}, which"):
            set_rows(whole, whole[1:3], i)


def test_rows_of_a_state_of_integers_are_told_to_be_overwritten_otherwise() -> None:
    """The state is what is wrong, not the rows, which a cast would not mend."""
    words = r"^set_rows\(.*\): %s: expected a float type, got i32; ops.cpy, ops.set overwrite it$"
    s, i = state("s", (4, 2), I32), input("i", (4,), I64)
    for rows in (input("x", (4, 2), I32), input("x", (4, 2))):
        with pytest.raises(ShapeError, match=words):
            set_rows(s, rows, i)


@pytest.mark.parametrize("name", [None, "", 3, b"x"])
def test_a_leaf_has_a_name(name: object) -> None:
    with pytest.raises(GraphError, match="input: expected a name, got"):
        input(name, (2,))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [None, 3, 2.5, (2.5, 2), ("a",), "ab", (None,), [(1, 2)], {1.5}])
def test_a_shape_is_whole_numbers(shape: object) -> None:
    with pytest.raises(ShapeError, match=r"^%x: shape .*: expected several whole numbers"):
        input("x", shape)  # type: ignore[arg-type]


def test_sizes_and_types_may_be_numpys() -> None:
    t = weight("x", np.array([2, 3]), np.float16)  # type: ignore[arg-type]
    assert t.shape == (2, 3) and type(t.shape[0]) is int and t.dtype is F16
    for text, wanted in (("f16", F16), ("float32", F32), ("Q4_0", Q4_0), (np.dtype("i4"), I32)):
        assert weight("x", (32,), text).dtype is wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "float", "f33", np.uint16, np.uint8, complex, 3, object()])
def test_an_unknown_dtype_is_told(given: object) -> None:
    if given == "float":
        assert input("x", (2,), given).dtype.name == "f64"  # type: ignore[arg-type]
        return
    with pytest.raises(ShapeError, match=r"^unknown dtype .*; known: f32, f16"):
        input("x", (2,), given)  # type: ignore[arg-type]


def test_a_state_goes_on_right_behind_its_last_reader() -> None:
    """Caches hold it then, and its operands need not be kept until the end."""
    x, w = input("x", (4, 8)), weight("w", (3, 8))
    rows = input("parents", (4,), I32), input("replay", (1, 2), I32), input("past", (1,), I32)
    at, certain = input("at", (4,), I32), input("certain", (1,), I32)
    also = []
    for i in range(3):
        held, log = state(f"held.{i}", (1, 2, 8)), state(f"log.{i}", (6, 8))
        also.append(set_rows(log, x, at, name=f"log.{i}.new"))
        also.append(ssm_conv_next(held, log, x, *rows, certain, name=f"held.{i}.new"))
        x = ops.scale(ssm_conv(held, log, x, w, *rows, name=f"conv.{i}"), 2.0, name=f"x.{i}")
    g = Graph.of([x], also=also)
    first = [part for i in range(3) for part in (f"conv.{i}", f"held.{i}.new", f"x.{i}")]
    for made in (g, g.replace({})):
        names = [t.name for t in made.nodes]
        assert names[: len(first)] == first
        assert {*names[len(first) :]} == {f"log.{i}.new" for i in range(3)}


def test_what_a_replacement_leaves_as_it_was_stays_the_same_tensor() -> None:
    x = input("x", (2, 3))
    before, old = ops.mul(x, x).named("before"), ops.scale(x, 5.0).named("old")
    behind = (ops.mul(old, old) + before).named("behind")
    g = Graph.of({"y": behind * 2, "before": before})
    new = g.replace({"old": ops.scale(g["x"], 3.0)})
    assert new["x"] is g["x"] and new["before"] is g["before"]
    assert new["behind"] is not g["behind"] and new["behind"].sources[1] is g["before"]
    told = {line.replace("scale=5.0", "scale=3.0") for line in repr(g).splitlines()}
    assert {line.replace("scale_2", "old") for line in repr(new).splitlines()} == told


def test_behind_an_heir_of_another_shape_rules_are_asked_again() -> None:
    x, old = input("x", (1, 3)), ops.scale(input("z", (1, 3)), 2.0, name="old")
    g = Graph.of({"y": ops.mul(ops.add(old, x, name="sum"), x)})
    wide = g.replace({"old": input("wide", (4, 3))})
    assert {t.name: t.shape for t in wide.nodes} == {"sum": (4, 3), "y": (4, 3)}
    assert g["y"].shape == (1, 3)
    with pytest.raises(ShapeError):
        g.replace({"old": input("wide", (4, 5))})


@pytest.mark.parametrize("taken", ["x", "a", "y"])
def test_an_heir_that_has_the_name_of_another_tensor_is_not_that_tensor(taken: str) -> None:
    x = input("x", (4,))
    g = Graph.of({"y": ops.scale(x, 2.0, name="a") + ops.scale(x, 3.0, name="b")})
    with pytest.raises(GraphError, match=f"two tensors are called '{taken}'"):
        g.replace({"b": ops.scale(g["x"], 5.0, name=taken)})


def test_an_heir_may_need_what_it_replaces_and_what_others_replace() -> None:
    x = input("x", (4,))
    a = ops.scale(x, 2.0, name="a")
    g = Graph.of({"y": ops.scale(a, 3.0, name="b") + a})
    b = ops.scale(g["b"], 5.0, name="b2") + g["a"]  # its `b` is the one of before
    new = g.replace({"a": ops.scale(g["x"], 7.0, name="a7"), "b": b})
    values = evaluate(new, {"x": np.ones(4, np.float32)})
    assert np.array_equal(values["y"], np.full(4, 5 * 3 * 7 + 7 + 7, np.float32))


def test_what_is_replaced_in_a_scope_keeps_its_names() -> None:
    """Views and overwriting results are inferred again: under their own names, not the scope's."""
    x = input("x", (4, 2))
    flat = ops.scale(x, 2.0).reshape(-1)
    held = set_rows(state("s", (4, 2)), ops.scale(x, 2.0), input("i", (4,), I32), name="new")
    g = Graph.of({"y": flat.reshape(2, 4) + 1.0, "z": held + 1.0})
    heirs = {t.name: ops.add(x, x, name=t.name) for t in g.nodes if t.sources[0].name == "x"}
    assert len(heirs) == 2
    with scope("a"):
        inside = g.replace(heirs)
    assert [t.name for t in inside] == [t.name for t in g.replace(heirs)]


SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3)


def bytes_shown(t: Tensor) -> set[int]:
    """Element by element, or block by block, from its offset along its strides."""
    counts = [*t.shape[:-1], t.shape[-1] // t.dtype.block] if t.shape else []
    starts = [t.offset + sum(i * s for i, s in zip(at, t.strides, strict=True))
              for at in np.ndindex(*counts)]  # fmt: skip
    return {b for start in starts for b in range(start, start + t.dtype.block_bytes)}


@given(SIZES, st.integers(0, 3), st.permutations([0, 1, 2]), st.integers(1, 70))
@example([(3, 2), (2, 5)], 0, [0, 1, 2], 70)
@example([(2, 5), (3, 2), (2, 1)], 0, [2, 0, 1], 70)
def test_the_bytes_of_a_view_are_those_of_its_elements(
    axes: list[tuple[int, int]], start: int, turned: list[int], limit: int
) -> None:
    """Any window, overlapping itself or with gaps, turned: exact up to so many runs, else whole."""
    shape, steps = [n for n, _ in axes], [s for _, s in axes]
    x = input("x", (70,), F16)
    t = view(x, shape, steps, start)
    t = permute(t, *(a for a in turned if a < len(shape)))
    shown, found = bytes_shown(t), t.byte_ranges(limit)
    covered = {b for first, stop in found for b in range(first, stop)}
    assert covered >= shown and t.nbytes == (max(shown) + 1 - min(shown) if shown else 0)
    assert all(first < stop for first, stop in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    if covered != shown:
        assert found == ((t.offset, t.offset + t.nbytes),) and prod(shape) > limit
    assert t.is_contiguous == (not shown or t.strides == contiguous(t.shape, F16))


@pytest.mark.parametrize("dtype", [F32, Q4_0])
def test_the_bytes_of_a_box_are_whole_blocks(dtype: DType) -> None:
    x = input("x", (3, 4, 96), dtype)
    for starts, sizes in (
        ((0, 1, 32), (3, 2, 32)),
        ((1, 0, 0), (1, 4, 96)),
        ((2, 3, 64), (1, 1, 32)),
    ):
        t = x
        for axis, (start, count) in enumerate(zip(starts, sizes, strict=True)):
            t = narrow(t, axis, start, count)
        t = permute(t, 1, 0, 2)
        covered = {b for first, stop in t.byte_ranges() for b in range(first, stop)}
        shown = bytes_shown(t)
        assert covered == shown and t.nbytes == max(shown) + 1 - min(shown)


def test_a_name_that_a_graph_lacks_is_told_with_the_nearest() -> None:
    graph = Graph.of({"logits": input("tokens", (2,)) * 2})
    with pytest.raises(GraphError, match=r"graph.* has no tensor .Logit.; is it .logits.\?$"):
        graph["Logit"]
    with pytest.raises(GraphError, match=r"^graph 'graph' has no tensor 3$"):
        graph[3]  # type: ignore[index]
