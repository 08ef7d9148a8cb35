"""Chains: ops of elements and reductions that became one, on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, Options, Session, input, open_backend, ops
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.cpu.lowering.loops import plan_nests
from ggraph.errors import ShapeError
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import make_plan
from ggraph.tensor import Array, Tensor


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_chains_give_the_bits_of_their_parts() -> None:
    a, b = input("a", (7, 50)), input("b", (50,))
    graph = Graph.of({"y": ops.silu(a * b + 2.0) - ops.tanh(a)})
    feeds = {"a": normal(7, 50), "b": normal(50)}
    backends = {"cpu": open_backend("cpu", threads=1, exact=True)}
    plain = Session(backends, Options(rewrites=False))
    plain.prepare("k", graph)
    fused = Session(backends)
    nodes = [t.op for t in fused.prepare("k", graph).plan.graph.nodes]
    assert nodes == ["chain"]
    assert np.array_equal(plain.run("k", feeds)["y"], fused.run("k", feeds)["y"])
    fused.close()


def test_a_users_chain_joins_what_only_it_reads() -> None:
    a, b = input("a", (7, 50)), input("b", (50,))
    written = ops.chain(ops.tanh(a), b, program="mul(a, b); silu(0); add(1, a)")
    graph = Graph.of({"y": ops.scale(written, 0.5)})
    feeds = {"a": normal(7, 50), "b": normal(50)}
    backends = {"cpu": open_backend("cpu", threads=1, exact=True)}
    plain = Session(backends, Options(rewrites=False))
    plain.prepare("k", graph)
    fused = Session(backends)
    (node,) = fused.prepare("k", graph).plan.graph.nodes
    assert node.attrs["program"] == (
        "tanh(a); mul(0, b); silu(1); add(2, 0); scale(3){scale=0.5 bias=0.0}"
    )
    assert np.array_equal(plain.run("k", feeds)["y"], fused.run("k", feeds)["y"])
    fused.close()


def delta_step() -> tuple[Graph, dict[str, Array]]:
    """Two reductions along one axis, the second over what the first changed."""
    s, k, v = input("s", (3, 24, 80)), input("k", (3, 24, 1)), input("v", (3, 1, 80))
    q, b = input("q", (3, 24, 1)), input("b", (3, 1, 1))
    new = s + k * ((v - (s * k).sum(1, keepdims=True)) * b)
    feeds = {t.name: normal(*t.shape) for t in (s, k, v, q, b)}
    return Graph.of({"y": (new * q).sum(1, keepdims=True)}), feeds


def soft_max_over(axis: int, *shape: int) -> tuple[Graph, dict[str, Array]]:
    x = input("x", shape)
    e = ops.exp(x - x.max(axis, keepdims=True))
    return Graph.of({"y": e / e.sum(axis, keepdims=True)}), {"x": normal(*shape) * 3}


def ran(graph: Graph, feeds: dict[str, Array], threads: int) -> tuple[list[str], Array]:
    """The programs of a plan's chains, and what it gives."""
    session = Session({"cpu": open_backend("cpu", threads=threads)}, Options(strict=True))
    nodes = session.prepare("k", graph).plan.graph.nodes
    found = session.run("k", feeds)["y"]
    session.close()
    return [str(t.attrs.get("program", t.op)) for t in nodes], found


def test_reductions_join_the_ops_around_them() -> None:
    graph, feeds = delta_step()
    (program,), found = ran(graph, feeds, 1)
    assert program.count("reduce(") == 2 and program.count("repeat(") == 1
    want = evaluate(graph, feeds)["y"]
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


@given(st.sampled_from([(3, 17), (2, 1), (1, 1), (1, 5), (4, 1, 9), (2, 3, 1)]), st.data())
def test_any_chain_around_reductions_means_what_its_ops_do(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Also where a sum is of one, and where sums are taken from each other."""
    made: list[Tensor] = [input("x", shape)]
    for _ in range(data.draw(st.integers(1, 6))):
        a, b = (made[-data.draw(st.integers(1, min(3, len(made))))] for _ in "ab")
        kind = data.draw(st.sampled_from(["add", "sub", "tanh", "norm", "mean", "sum", "max"]))
        if kind in ("add", "sub"):
            a, b = (a, b) if a.size >= b.size else (b, a)
            made.append(a + b if kind == "add" else a - b)
        elif kind == "tanh":
            made.append(ops.tanh(a))
        elif kind == "norm":
            made.append(ops.norm(a, eps=1.0))
        else:
            axis = data.draw(st.integers(0, len(shape) - 1))
            made.append(ops.reduce(a, kind, (axis,)))
    feeds, graph = {"x": normal(*shape)}, Graph.of({"y": made[-1]})
    every = evaluate(Graph.of({str(i): t for i, t in enumerate(made)}), feeds)
    most = max(float(np.abs(a).max()) for a in every.values())
    found = ran(graph, feeds, 1)[1]
    assert np.abs(found - every[str(len(made) - 1)]).max() <= 1e-5 * most


@pytest.mark.parametrize("shape", [(5, 40, 130), (2, 7, 3), (9, 64), (1, 33, 512)])
def test_a_dear_function_is_computed_once_and_bits_do_not_depend_on_threads(
    shape: tuple[int, ...],
) -> None:
    for axis in range(len(shape)):
        graph, feeds = soft_max_over(axis, *shape)
        programs, found = ran(graph, feeds, 1)
        assert [(p.count("exp("), p.count("reduce(")) for p in programs] == [(1, 2)]
        assert np.array_equal(found, ran(graph, feeds, 3)[1])
        want = evaluate(graph, feeds)["y"]
        assert np.abs(found - want).max() < 1e-6


def held(program: str, *shapes: tuple[int, ...]) -> str | None:
    """The op of the step that the result's memory holds, of a chain of these sources."""
    sources = [input(name, shape) for name, shape in zip("abcd", shapes, strict=False)]
    planned = plan_nests(ops.chain(*sources, program=program))
    assert planned is not None
    nest = planned.result[0].nest
    return None if nest.held is None else nest.steps[nest.held][0]


SOFT = "sub(a, b); exp(0); reduce(1){kind=sum axes=[1]}; div(1, 2)"


def test_what_the_results_memory_holds() -> None:
    whole, row = (4, 33, 20), (4, 1, 20)
    assert held(SOFT, whole, row) == "exp"
    assert held(f"{SOFT}; mul(3, b)", whole, row) == "exp"
    assert held(f"{SOFT}; mul(3, a)", whole, row) is None  # `a` may lie where the result does
    assert held(SOFT.replace("exp", "abs"), whole, row) is None  # computed again for less
    both = "exp(a); tanh(a); mul(0, 1); reduce(2){kind=sum axes=[1]}; sub(0, 3); add(4, 1)"
    assert held(both, whole) is None  # there is one memory
    inner = "exp(a); tanh(0); reduce(1){kind=sum axes=[1]}; sub(1, 2)"
    assert held(inner, whole) == "tanh"


def test_where_a_source_is_read_late_regions_end_before_dear_functions() -> None:
    x = input("x", (5, 40, 130))
    e = ops.exp(x - x.max(1, keepdims=True))
    graph, feeds = Graph.of({"y": e / e.sum(1, keepdims=True) * x}), {"x": normal(5, 40, 130)}
    programs, found = ran(graph, feeds, 2)
    assert [p.count("exp(") for p in programs] == [1, 0]
    want = evaluate(graph, feeds)["y"]
    assert np.abs(found - want).max() < 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_result_on_its_sources_bytes_holds_what_it_must(axis: int) -> None:
    """The source is computed and read no more, so that the result takes its bytes."""
    x = input("x", (6, 35, 41))
    y = ops.soft_max(x.reshape(6 * 35, 41)).reshape(6, 35, 41) * 9.0
    kind = f"{{kind=max axes=[{axis}]}}"
    total = kind.replace("max", "sum")
    soft = f"reduce(a){kind}; sub(a, 0); exp(1); reduce(2){total}; div(2, 3)"
    graph, feeds = Graph.of({"y": ops.chain(y, program=soft)}), {"x": normal(6, 35, 41)}
    _, found = ran(graph, feeds, 2)
    want = evaluate(graph, feeds)["y"]
    assert np.abs(found - want).max() < 1e-6


def test_reductions_of_other_axes_or_spaces_stay_apart() -> None:
    x, w = input("x", (6, 16, 32)), input("w", (6, 16, 32))
    inner = (x * w).sum(2, keepdims=True)
    both = Graph.of({"y": (x - inner).sum(1, keepdims=True)})
    programs, _ = ran(both, {"x": normal(6, 16, 32), "w": normal(6, 16, 32)}, 1)
    assert [p.count("reduce(") for p in programs] == [1, 1]
    read_twice = x.max(1, keepdims=True)
    graph = Graph.of({"y": x - read_twice, "m": read_twice})
    nodes = make_plan(graph, [cpu_spec("cpu")]).plan.graph.nodes
    assert [t.op for t in nodes] == ["reduce", "sub"]


def test_how_wide_a_chain_is_read_does_not_depend_on_what_repeats() -> None:
    """Rows of a row: two operands that lie along the rows must not turn the vectors."""
    x, a, b = input("x", (64, 128)), input("a", (64, 1)), input("b", (64, 1))
    planned = plan_nests(
        ops.chain(x, a, b, program="mul(a, b); mul(0, c); reduce(1){kind=sum axes=[1]}")
    )
    assert planned is not None and planned.result[0].nest.along == "reduced"


@pytest.mark.parametrize(
    "program",
    [
        "reduce(a){kind=sum axes=[0]}; reduce(a){kind=sum axes=[1]}; mul(0, 1)",
        "reduce(a){kind=sum axes=[1]}; repeat(0){shape=[4,8]}; add(a, 1)",
        "reduce(a){kind=sum axes=[1}",
        "soft_max(a)",
    ],
)
def test_chains_of_several_spaces_are_refused(program: str) -> None:
    with pytest.raises(ShapeError, match=r"^chain\("):
        ops.chain(input("a", (4, 8)), program=program)
