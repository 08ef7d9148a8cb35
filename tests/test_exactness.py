"""Rewrites that keep every bit, rewrites that approximate, and a certificate that names these."""

import random
import re

import numpy as np
import pytest
from cuda_host import HostDriver
from graph_kit import random_graph
from hypothesis import given
from hypothesis import strategies as st
from test_rewrite import quantised_block

from ggraph import ops
from ggraph.backends.cpu import FUSED, IN_8_BITS, cpu_spec
from ggraph.backends.cuda import cuda_spec
from ggraph.dtype import F32, Q4_0
from ggraph.errors import PlanError
from ggraph.formats.quants import quantize
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.ops.fused import FEW_ROWS
from ggraph.pipeline import Options, make_plan
from ggraph.rewrite import RULES, Known
from ggraph.show import plan_text
from ggraph.tensor import OPS, Array, Kind, Tensor, input, weight
from ggraph.verify import Approximation, approximations

KNOWN = Known(FUSED | IN_8_BITS, {}, lambda t: True)
KEEPING = [r for r in RULES if r.keeps_bits]
ROUNDING = [r for r in RULES if not r.keeps_bits]


def fed(graph: Graph, seed: int) -> dict[str, Array]:
    """Every leaf but the states; weights in blocks are quantised, indices distinct."""
    rng = np.random.default_rng(seed)

    def fill(t: Tensor) -> Array:
        if not t.dtype.is_float:
            return rng.permutation(t.size).astype(t.dtype.np).reshape(t.shape)
        numbers = rng.standard_normal(t.shape).astype(np.float32)
        return numbers if t.dtype is F32 else quantize(numbers, t.dtype)

    return {t.name: fill(t) for t in graph if t.is_leaf and t.kind is not Kind.STATE}


def outputs(graph: Graph, values: dict[str, Array]) -> dict[str, bytes]:
    known = graph.named  # a rewrite may have dropped a leaf
    found = evaluate(graph, {n: a for n, a in values.items() if n in known})
    return {name: a.tobytes() for name, a in found.items()}


def test_the_kinds_are_what_they_are() -> None:
    assert [r.name for r in KEEPING] == [
        "merge_duplicates", "drop_identities", "copy_windows", "fuse", "join_products",
        "fuse_chains",
    ]  # fmt: skip
    assert [r.name for r in ROUNDING] == ["quantise_activations"]
    assert {s.name for s in OPS.values() if s.rounds} == IN_8_BITS


@pytest.mark.parametrize("rule", KEEPING, ids=lambda r: r.name)
@given(st.randoms(use_true_random=False), st.integers(0, 1 << 30))
def test_a_rule_keeps_every_bit_of_outputs_and_states(
    rule: object, r: random.Random, seed: int
) -> None:
    graph = random_graph(r, 12)
    values = fed(graph, seed)
    changed = rule.change(graph, KNOWN)  # type: ignore[attr-defined]
    assert outputs(changed, values) == outputs(graph, values)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_rule_that_approximates_is_known_by_its_bits_and_by_its_ops(rule: object) -> None:
    """On a block with a norm, a gated unit and residuals, where every rule but one finds work."""
    graph = quantised_block()
    values = fed(graph, 1)
    changed = rule.change(graph, KNOWN)  # type: ignore[attr-defined]
    same = outputs(changed, values) == outputs(graph, values)
    rounds = any(t.spec is not None and t.spec.rounds for t in changed)
    assert same == rule.keeps_bits == (not rounds)  # type: ignore[attr-defined]


def named(
    options: Options, exact_device: bool = False, rows: int = 3, shown: bool = False
) -> tuple[str, ...]:
    graph = quantised_block(rows, shown=shown)
    verified = make_plan(graph, [cpu_spec("cpu", exact_device)], options)
    return verified.certificate.approximations


def test_the_certificate_names_what_is_rounded() -> None:
    units = ("mul_mat_gated_quantise", "swiglu_quantise")
    for rows, shown in ((3, False), (FEW_ROWS + 1, False), (3, True)):
        made, other = units if not shown else reversed(units)
        sources = {"quantise": "x", "rms_norm_quantise": "n", made: "act"}
        assert {*sources, other} == IN_8_BITS
        for said, op in zip(named(Options(), rows=rows, shown=shown), sorted(sources), strict=True):
            assert re.fullmatch(rf"{op}: rows to 8 bits \(1: {sources[op]}.a8\)", said), said
    (only,) = named(Options(rewrites=False))
    assert only.startswith("mul_mat on cpu: rows to 8 bits (4: ") and only.endswith(", ..)")
    assert named(Options(), exact_device=True) == ()


def test_exact_allows_none() -> None:
    """Neither a rewrite nor what kernels of the device do by themselves."""
    assert named(Options(exact=True), exact_device=True) == ()
    for shown, product in ((False, "mul_mat_gated"), (True, "mul_mat")):
        said = rf"is to be exact and rounds: .*{product} on cpu: rows to 8"
        with pytest.raises(PlanError, match=said):
            named(Options(exact=True), shown=shown)


def test_exact_allows_what_the_graph_itself_asks_for() -> None:
    x, w = input("x", (3, 64)), weight("w", (64, 64), Q4_0)
    graph = Graph.of({"y": ops.mul_mat(w, ops.quantise(x, name="rounded"))})
    verified = make_plan(graph, [cpu_spec("cpu")], Options(exact=True))
    assert verified.certificate.approximations == ("quantise: rows to 8 bits (1: rounded)",)


def test_many_rows_are_rounded_by_a_gpus_library() -> None:
    spec = cuda_spec("cuda0", HostDriver())
    for rows, said in ((64, set()), (65, {"rows to bf16"})):
        found = approximations(make_plan(quantised_block(rows), [spec, cpu_spec("cpu")]).plan)
        assert {a.rounds for a in found} == said
        assert {a.device for a in found} == ({"cuda0"} if said else set())


def test_the_plans_text_says_so() -> None:
    rounded = make_plan(quantised_block(), [cpu_spec("cpu")])
    assert re.search(r"approximates: quantise: rows to 8 bits \(1: x.a8\)", plan_text(rounded))
    exact = make_plan(quantised_block(), [cpu_spec("cpu", True)])
    assert "exact: nothing is rounded that the graph does not round" in plan_text(exact)


def test_a_line_names_a_few_tensors_and_says_where_it_leaves_some_out() -> None:
    for names, told in (("abc", "(3: a, b, c)"), ("abcd", "(4: a, b, c, ..)")):
        assert str(Approximation("op", "d", "rows", tuple(names))) == f"op on d: rows {told}"
