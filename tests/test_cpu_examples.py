"""Every example of every op that has kernels, through the CPU backend: what the oracle says.

An op's kernels are thus under test as soon as they have a lowering.
"""

import numpy as np
import pytest
from oracles import ORACLES

from ggraph import ops
from ggraph.backends.cpu.lowering.lower import LOWERINGS
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import decode, to_storage
from ggraph.tensor import Array, Example, OpSpec, apply, input
from models.run.load import open_session

CASES = [c for c in examples.every() if c[0].name in LOWERINGS]
NAMES = [f"{spec.name}-{i}" for spec, i, _ in CASES]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("spec", "i", "example"), CASES, ids=NAMES)
def test_kernels_say_what_the_oracle_says(
    spec: OpSpec, i: int, example: Example, threads: int
) -> None:
    leaves = [input(t.name, t.shape, t.dtype) for t in examples.leaves(spec, example)]
    sources = list(leaves)
    if spec.overwrites is not None:  # what the host wrote is not for ops to change
        sources[spec.overwrites] = ops.dup(sources[spec.overwrites])
    y = apply(spec.name, *sources, name="y", **example.attrs)
    if y.size == 0 or y.dtype.is_block or y.dtype.name == "a8":
        return
    given = examples.feeds(spec, example, seed=i)
    exact = ORACLES[spec.name](*(np.array(a) for a in given.values()), **example.attrs)
    wanted = examples.rounded(np.float32(exact) if y.dtype.is_float else exact, y)
    session = open_session(threads=threads, exact=True)
    session.prepare("op", lambda: Graph.of({"y": y}), lambda t: np.zeros(0))
    stored = {t.name: to_storage(np.array(given[t.name]), t) for t in leaves}
    got = decode(session.run("op", stored)["y"], y.dtype)
    session.close()
    assert_near(got, wanted, max(example.tolerance, 1e-5))


def assert_near(got: Array, wanted: Array, tolerance: float) -> None:
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(got), finite)
    span = float(np.abs(wanted[finite]).max(initial=1e-30))
    assert float(np.abs(got[finite] - wanted[finite]).max(initial=0)) <= tolerance * span


def test_there_are_examples_of_every_kernel() -> None:
    assert {spec.name for spec, _, _ in CASES} == set(LOWERINGS)
