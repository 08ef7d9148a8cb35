"""Concurrent Q, K and V branches with bytes recycled inside the region."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, linear, norm
from ggraph.tensor import input

HEADS, HEAD = 2, E // 2
STREAMS = {"q": 0, "q.norm.rms": 0, "q.norm": 0, "k": 1, "k.norm.rms": 1, "k.norm": 1, "v": 2}
BRANCHES = ("attn_norm", "q", "q.norm", "k", "k.norm", "v", "qk")


def region() -> Graph:
    """norm -> q, k, v, with a norm on each head of q and k -> a join: x [T, E] -> y [T, E]."""
    n = norm(input("x", (T, E)), "attn_norm")
    q = norm(linear(n, "q").reshape(T, HEADS, HEAD), "q.norm")  # [T, HEADS, HEAD]
    k = norm(linear(n, "k").reshape(T, HEADS, HEAD), "k.norm")
    qk = ops.mul(q, k, name="qk").reshape(T, E)
    return Graph.of({"y": linear(qk + linear(n, "v"), "out")}, name="fork and join")


HAZARDS = (
    Hazard(
        "02",
        2,
        "CUDA fork and join: a branch's output lies on another branch's bytes",
        ("llama.cpp #16991", "llama.cpp #18496"),
        "Q, K and V were put on three streams after their memory had been laid out for one. In "
        "list order the first branch's product is dead before the next branch begins, and its "
        "bytes go to that branch. Upstream interleaves the branches before it lays out memory, "
        "compares writes with writes, and falls back to one stream.",
        region,
        (GPU,),
        Recipe(on_stream=STREAMS, streams=3, listed=BRANCHES),
        "branches that may run at once have bytes of their own",
        Recipe("ggml", on_stream=STREAMS, streams=3, listed=BRANCHES),
        Expected("race", "q.norm.rms", "k"),
        {"one stream, as upstream falls back": Recipe("ggml")},
    ),
)
