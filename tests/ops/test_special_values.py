"""What is not finite, or nearly so, comes out of every element-wise op as the reference says.

The class of what `scripts/fuzz_graphs.py` found: the logarithm of a state of zeros, then a gated
unit.
"""

from itertools import product

import numpy as np
import pytest
from cuda_host import COMPILER, HostDriver

from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.protocol import Backend
from ggraph.dtype import F32
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import OPS, apply, input

SPECIAL = np.array(
    [-np.inf, -3e38, -1e30, -1e4, -88.5, -87.0, -1.0, -0.0, 0.0, 1e-39, 1e-30, 0.5, 1.0, 2.0, 3.0,
     87.0, 88.5, 89.5, 1e4, 1e30, 3e38, np.inf, np.nan], np.float32,
)  # fmt: skip
PAIRS = dict(
    zip("ab", np.array(list(product(SPECIAL, repeat=2)), np.float32).T.copy(), strict=True)
)
WORLDS = ["cpu", "exact", "cuda"]


def element_wise() -> Graph:
    """Every op that takes one or two float32 tensors of a shape, element by element."""
    names = [
        n
        for n, s in sorted(OPS.items())
        if s.elementwise and not s.rounds and s.examples and not s.examples[0].attrs
        if len(s.examples[0].args) <= 2
        if len({(a.shape, a.dtype) for a in s.examples[0].args}) == 1
        if s.examples[0].args[0].dtype is F32
    ]
    assert len(names) > 25 and {"exp", "silu", "swiglu", "div"} < set(names), names
    a, b = (input(n, x.shape) for n, x in PAIRS.items())
    return Graph.of({n: apply(n, *(a, b)[: len(OPS[n].examples[0].args)]) for n in names})


def opened(world: str) -> dict[str, Backend]:
    cpu = {"cpu": open_backend("cpu", threads=1, exact=world != "cpu")}
    if world != "cuda":
        return cpu
    driver = HostDriver()
    return {"cuda0": CudaBackend(cuda_spec("cuda0", driver), driver, False, Events()), **cpu}


@pytest.mark.parametrize("world", WORLDS if COMPILER is not None else WORLDS[:2])
def test_special_values_come_out_as_the_reference_says(world: str) -> None:
    graph, session = element_wise(), Session(opened(world), Options(rewrites=False))
    session.prepare("special", graph)
    got = session.run("special", PAIRS)
    session.close()
    with np.errstate(all="ignore"):
        right = evaluate(graph, PAIRS)
        wrong = [
            f"{name}({PAIRS['a'][i]}, {PAIRS['b'][i]}) = {got[name][i]}, expected {y[i]}"
            for name, y in right.items()
            for i in np.flatnonzero(~np.isclose(got[name], y, 1e-5, 1e-7, equal_nan=True))
        ]
    assert not wrong, "\n".join(wrong)
