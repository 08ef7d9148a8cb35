"""What the fuzzer feeds: no graph that it grows is refused by a reference for its values."""

import random

import numpy as np
import pytest
from fuzz_kit import OWN, Grown, graph_of, grow, meaning

from ggraph.graph import Graph
from ggraph.tensor import OPS, Kind, apply


@pytest.mark.parametrize("op", sorted(OPS.keys() - OWN))
def test_states_of_zeros_are_values_that_ops_take(op: str) -> None:
    """Leaves may be states, which begin with zeros whatever was drawn for them: an index of zero is
    one, but a row that follows itself is none."""
    spec = OPS[op]
    for seed in range(12):
        for example in spec.examples:
            grown = Grown(random.Random(seed))
            sources = [
                grown.leaf(arg, Kind.STATE if i == spec.overwrites else None)
                for i, arg in enumerate(example.args)
            ]
            y = apply(op, *sources, name="y", **example.attrs)
            graph = Graph.of({"y": y})
            states = {t.name: np.zeros_like(grown.feeds[t.name]) for t in graph.leaves(Kind.STATE)}
            with np.errstate(all="ignore"):
                meaning(graph, grown.feeds, states)


def test_random_graphs_have_every_op() -> None:
    """Those of OWN are made by planning alone."""
    left = set(OPS) - OWN
    for seed in range(4000):
        graph = graph_of(grow(seed))
        left -= {t.op for t in graph} if graph is not None else set()
        if not left:
            return
    assert not left
