"""Sources that are every second element of a leaf, for every op on every backend.

The class of what `scripts/fuzz_graphs.py` found: a norm whose weight is the diagonal of a matrix.
"""

from collections.abc import Iterator
from itertools import count
from math import prod

import numpy as np
import pytest
from cuda_host import COMPILER, HostDriver

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.protocol import Backend
from ggraph.errors import ShapeError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, to_logical, to_storage
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import OPS, Array, Example, Kind, OpSpec, Tensor, apply, input, state

TIGHT = 1e-4
PART = 60  # results of one graph: placing them takes time by the square of their number


def sparse(t: Tensor, name: str) -> Tensor:
    """A view of this shape, every second element of a leaf."""
    leaf = input(name, (2 * t.size,), t.dtype)
    return ops.view(leaf, t.shape, [2 * prod(t.shape[i + 1 :]) for i in range(len(t.shape))])


def calls() -> Iterator[tuple[Tensor, dict[str, Array], float]]:
    """Each op's examples, each source in turn sparse: the result, feeds, what it may lose."""
    number = count()
    for spec in list(OPS.values()):
        for example in spec.examples if spec.name not in ("copy", "quantise") else ():
            for slot in range(len(example.args)):
                found = call(spec, example, slot, f"{next(number)}.")
                if found is not None:
                    yield found


def call(
    spec: OpSpec, example: Example, slot: int, prefix: str
) -> tuple[Tensor, dict[str, Array], float] | None:
    """One of them; None where the op takes no such source, or nothing is in it."""
    leaves = [
        (state if i == spec.overwrites else input)(prefix + t.name, t.shape, t.dtype)
        for i, t in enumerate(examples.leaves(spec, example))
    ]
    plain = leaves[slot]
    if slot == spec.overwrites or plain.dtype.is_block or plain.size < 2 or spec.rounds:
        return None
    try:
        sources: list[Tensor] = list(leaves)
        sources[slot] = sparse(plain, plain.name)
        y = apply(spec.name, *sources, **example.attrs)
    except ShapeError as error:
        assert "contiguous" in str(error)
        return None
    feeds = {}
    for i, (t, arg) in enumerate(zip(leaves, example.args, strict=True)):
        value = examples.rounded(examples.values(arg, np.random.default_rng(i)), t)
        value = 0 * value if i == spec.overwrites else value  # as a session begins with
        feeds[t.name] = np.repeat(value.reshape(-1), 2) if i == slot else value
        if i == slot:
            feeds[t.name][1::2] = 0  # what lies between must not be read
    return y, feeds, max(example.tolerance, TIGHT)


def opened(world: str) -> dict[str, Backend]:
    cpu = {"cpu": open_backend("cpu", threads=1, exact=True)}
    if world == "cpu":
        return cpu
    driver = HostDriver()
    return {"cuda0": CudaBackend(cuda_spec("cuda0", driver), driver, False, Events()), **cpu}


@pytest.mark.parametrize("world", ["cpu", "cuda"] if COMPILER is not None else ["cpu"])
def test_sparse_sources_give_the_same(world: str) -> None:
    made = list(calls())
    assert len(made) > 150
    session = Session(opened(world), Options(rewrites=False))
    parts = [made[at : at + PART] for at in range(0, len(made), PART)]
    wrong = [line for key, part in enumerate(parts) for line in told(session, key, part)]
    session.close()
    assert not wrong, "\n".join(wrong)


def told(
    session: Session, key: int, made: list[tuple[Tensor, dict[str, Array], float]]
) -> list[str]:
    """What differs in one graph of these."""
    graph = Graph.of({f"y{i}": y for i, (y, _, _) in enumerate(made)})
    feeds = {n: a for _, given, _ in made for n, a in given.items()}
    leaves = {t.name: t for t in graph.leaves(Kind.INPUT)}
    session.prepare(key, graph)
    got = session.run(key, {n: to_storage(feeds[n], t) for n, t in leaves.items()})
    right = evaluate(graph, feeds)
    wrong = []
    for i, (y, _, allowed) in enumerate(made):
        t = graph[f"y{i}"]
        a, b = (to_logical(got[t.name], t), right[t.name])
        span = float(np.abs(b[np.isfinite(b)]).max(initial=1e-30))
        if not np.allclose(a, b, 0, allowed * span, equal_nan=True):
            wrong.append(f"{y!r} of {y.sources}: off by {np.nanmax(np.abs(a - b))}")
    return wrong
