"""The rows at which a cache is written are changed while the write is in flight."""

from ggraph import ops
from ggraph.dtype import I64
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import IGPU, E, T, linear
from ggraph.tensor import input, state

C = 8  # cache rows


def step() -> Graph:
    """x [T, E] looks at the cache [C, E], then its keys go to the cache rows `k_idxs` [T]."""
    old, keys = state("cache", (C, E)), linear(input("x", (T, E)), "k")
    seen = linear(ops.mul_mat(old, keys, name="scores"), "read")  # [T, C] -> [T, E]
    cached = ops.set_rows(old, keys, input("k_idxs", (T,), I64), name="cached")
    return Graph.of({"seen": seen}, also=[cached], name="cache step")


HAZARDS = (
    Hazard(
        "07",
        7,
        "KV cache: the next step's row numbers arrive before this step's rows are written",
        ("llama.cpp #28056", "llama.cpp #28058"),
        "On a GPU that shares the host's memory the row numbers of the cache were replaced while "
        "the kernel that uses them was queued. Keys went to rows of another sequence: one chat "
        "leaked into another.",
        step,
        (IGPU,),
        Recipe("ggml", overlap=True),
        "the host waits for the step before it sets the next step's inputs",
        Recipe("ggml", overlap=True, faults=(forgets_wait("end:sim0.0"),)),
        Expected("race", "cached", "write:k_idxs"),
        {"inputs in two slots": Recipe("ggml", overlap=True, copies=2)},
        runs=3,
    ),
)
