"""Concurrent branches of a linear-attention layer that read views of one product."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, linear, norm
from ggraph.tensor import Tensor, input

STREAMS = {"q.l2": 0, "q": 0, "k.l2": 1, "k": 1, "v.act": 2, "v": 2, "gate.act": 3, "gate": 3}


def _branch(part: Tensor, name: str) -> Tensor:
    """A column block, normed or squashed, then multiplied: [T, E] -> [T, E]."""
    whole = ops.cont(part, name=f"{name}.part")
    if name in ("q", "k"):
        return linear(ops.l2_norm(whole, name=f"{name}.l2"), name)
    return linear(ops.silu(whole, name=f"{name}.act"), name)


def layer() -> Graph:
    """One product for q, k, v and gate, four branches over its columns: x, y [T, E]."""
    packed = linear(norm(input("x", (T, E)), "attn_norm"), "qkvz", 4 * E)  # [T, 4E]
    names = ("q", "k", "v", "gate")
    q, k, v, z = (_branch(ops.columns(packed, i * E, E), n) for i, n in enumerate(names))
    return Graph.of({"y": (q * k + v) * z}, name="linear attention")


HAZARDS = (
    Hazard(
        "04",
        4,
        "Linear attention on four streams: the sources of branches are recycled",
        ("llama.cpp #21897", "llama.cpp #27301"),
        "Four branches read views of one product. In list order each branch's temporaries are "
        "dead when the next branch is placed. A flag against freeing was proposed and refused; a "
        "hook that stretches single lifetimes was merged, and nothing checks that it is enough.",
        layer,
        (GPU,),
        Recipe(on_stream=STREAMS, streams=4),
        "branches that may run at once have bytes of their own",
        Recipe("ggml", on_stream=STREAMS, streams=4),
        Expected("race", "q", "k.part"),
    ),
)
