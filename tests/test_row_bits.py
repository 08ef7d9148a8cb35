"""A row's bits do not depend on how many rows are computed with it, whatever a graph does with it.

Plans of few rows are rewritten otherwise than those of many, and other kernels run in them.
"""

import numpy as np
import pytest
from row_kit import TYPES, Function, complaint, outputs

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.dtype import F16, F32, Q4_0
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import to_storage
from ggraph.ops.fused import FEW_ROWS
from ggraph.ops.glu import UNITS
from ggraph.tensor import Arg, Array, Tensor, apply, input, weight

AROUND = (1, 2, FEW_ROWS, FEW_ROWS + 1)
MOST = 2 * FEW_ROWS + 5


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_functions_of_rows(first: int) -> None:
    """More of them: scripts/fuzz_rows.py."""
    for seed in range(first, first + 10):
        wrong = complaint(
            Function(seed, MOST), AROUND, lambda: {"cpu": open_backend("cpu", threads=2)}
        )
        assert not wrong


class Unit:
    """A gated unit of two products, with what reads it, as a function of rows."""

    def __init__(self, unit: str, gate: Tensor, up: Tensor, after: str) -> None:
        self.most, self.seed = MOST, 0
        self.unit, self.gate, self.up, self.after = unit, gate, up, after

    def graph(self, m: int) -> tuple[Graph, dict[str, Arg]]:
        """The graph of m rows, and what its leaves hold."""
        x = input("x", (m, self.gate.shape[1]))
        y = apply(self.unit, ops.mul_mat(self.gate, x), ops.mul_mat(self.up, x), name="unit")
        if self.after == "clamp":
            y = ops.clamp(y, -1.0, 1.0)
        elif self.after:
            y = ops.mul_mat(weight("down", (32, y.shape[-1]), self.gate.dtype), y)
        graph = Graph.of({"y": y})
        return graph, {t.name: Arg(t.shape, t.dtype) for t in graph if t.is_leaf}

    def values(self) -> dict[str, Array]:
        """What the leaves hold."""
        graph, given = self.graph(self.most)
        rng = np.random.default_rng(1)
        return {n: to_storage(examples.values(a, rng), graph[n]) for n, a in given.items()}


@pytest.mark.parametrize("after", ["", "clamp", "down"])
@pytest.mark.parametrize("unit", UNITS)
def test_gated_units_of_few_rows_and_of_many(unit: str, after: str) -> None:
    """A unit without a kernel of its own was a loop nest of both products for few rows, and one
    that an op of elements read was part of a chain for many: both with other bits."""
    for dtype in (F32, F16, Q4_0, TYPES[-1]):
        n = dtype.block if dtype.block > 32 else 96
        gate, up = weight("gate", (n, n), dtype), weight("up", (n, n), dtype)
        f = Unit(unit, gate, up, after)
        for exact in (False, True):
            wrong = complaint(
                f, AROUND, lambda e=exact: {"cpu": open_backend("cpu", threads=2, exact=e)}
            )
            assert not wrong, dtype


def test_a_function_that_parts_is_found() -> None:
    """What the tests above compare with is sensitive: other values give other bits."""
    f = Function(1, 8)
    values = f.values()
    whole = outputs(f, 8, values, {"cpu": open_backend("cpu", threads=1)})
    values["x"] = np.nextafter(values["x"], np.float32(9))
    other = outputs(f, 8, values, {"cpu": open_backend("cpu", threads=1)})
    assert any(not np.array_equal(whole[n], other[n]) for n in whole)
