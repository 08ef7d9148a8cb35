"""Two kernels on two streams share one workspace."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T
from ggraph.tensor import Tensor, input, weight

PARTS = 2  # pieces into which the products' inner dimension is cut
STREAMS = {"a.partial": 0, "a": 0, "b.partial": 1, "b": 1}


def _split_product(x: Tensor, name: str) -> Tensor:
    """x [T, E] @ w^T with the sum over E cut in pieces: partial sums, then their sum."""
    pieces = x.reshape(T, PARTS, E // PARTS).permute(1, 0, 2)  # [PARTS, T, E / PARTS]
    w = weight(f"{name}.weight", (PARTS, E, E // PARTS))
    partial = ops.mul_mat(w, pieces, name=f"{name}.partial")  # the workspace: [PARTS, T, E]
    summed = ops.sum_rows(partial.permute(1, 2, 0), name=name)  # [T, E, 1]
    return summed.reshape(T, E)


def two_products() -> Graph:
    """Two products of x [T, E], each with a workspace of partial sums; y is their product."""
    x = input("x", (T, E))
    return Graph.of({"y": _split_product(x, "a") * _split_product(x, "b")}, name="workspaces")


HAZARDS = (
    Hazard(
        "16",
        16,
        "Split products on two streams: one workspace for both",
        ("llama.cpp #9413", "llama.cpp #26574"),
        "A product that is cut along its sum keeps partial sums in a workspace until they are "
        "added. The pool that hands workspaces out knew one stream: two products that run at once "
        "got the same bytes. Upstream turned the method off there, then gave each stream a pool.",
        two_products,
        (GPU,),
        Recipe(on_stream=STREAMS, streams=2),
        "workspaces are values of the plan: those that may be in use at once lie apart",
        Recipe("ggml", on_stream=STREAMS, streams=2),
        Expected("race", "a", "b.partial"),
    ),
)
